"""The chat templates that llama.cpp ships give the text that Hugging Face's environment gives."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ggmlb.core.errors import ModelError
from ggmlb.models.gguf import ChatTemplate
from tests.support.llama_cpp_files import llama_cpp_files

pytestmark = pytest.mark.oracle

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name"},
                "day": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city"],
        },
    },
}
CALL = {"name": "get_weather", "arguments": {"city": "Bonn"}}

CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello <b> é"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes\n"},
        {"role": "user", "content": "more"},
    ],
    [
        {"role": "user", "content": "And the weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "thanks"},
    ],
)

DIFFERENT = {
    "llama-cpp-deepseek-r1.jinja": "Hugging Face's cannot write a generator as JSON",
    "meetkai-functionary-medium-v3.1.jinja": "Hugging Face's escapes JSON for HTML after `safe`",
    "meetkai-functionary-medium-v3.2.jinja": "it takes arguments as JSON, which Hugging Face's does not make",
}


class Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def by_hugging_face(source: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
    """The text of `transformers`' environment; `None` if the template fails or refuses."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters |= {"tojson": tojson, "from_json": json.loads}
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    try:
        return environment.from_string(source).render(
            messages=messages, tools=tools, documents=None, bos_token="<s>", eos_token="</s>",
            add_generation_prompt=True,
        )  # fmt: skip
    except (TemplateError, TypeError):
        return None


def test_templates() -> None:
    files = sorted(llama_cpp_files().glob("*.jinja"))
    assert len(files) > 60
    n_same = 0
    for path in files:
        if path.name in DIFFERENT:
            continue
        source = path.read_text(encoding="utf-8")
        for messages in CONVERSATIONS:
            for tools in (None, [TOOL]):
                expected = by_hugging_face(source, messages, tools)
                found = render(source, messages, tools)
                assert found == expected, (path.name, tools is not None)
                n_same += expected is not None
    assert n_same > 360


def test_other_forms_of_a_message() -> None:
    """Arguments as JSON, content that is `None` or a list of parts: the same text, as llama.cpp gives it."""
    call = CONVERSATIONS[2][1]["tool_calls"][0]
    as_json = {**call, "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}
    other = [
        message | {"content": None, "tool_calls": [as_json]}
        if "tool_calls" in message
        else message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in CONVERSATIONS[2]
    ]
    n_same = 0
    for path in sorted(llama_cpp_files().glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        expected = render(source, CONVERSATIONS[2], [TOOL])
        assert render(source, other, [TOOL]) == expected, path.name
        n_same += expected is not None
    assert n_same > 50


def render(source: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
    try:
        return ChatTemplate(source, "<s>", "</s>").render(messages, tools=tools)
    except ModelError:
        return None


def test_every_exception_is_there() -> None:
    assert {path.name for path in Path(llama_cpp_files()).glob("*.jinja")} >= DIFFERENT.keys()
