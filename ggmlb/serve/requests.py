"""Requests of OpenAI's API: bodies of JSON to prompts and options."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ggmlb.core.errors import ArgumentError, kind_of
from ggmlb.models import Options, TextModel

JSON = Mapping[str, Any]
"""An object of JSON."""

REAL: Final = (int, float)

SAMPLING: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repeat_penalty"), REAL),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "xtc_probability", "xtc_threshold"), REAL),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base"), REAL),
    **dict.fromkeys(("top_k", "mirostat", "seed", "dry_allowed_length", "dry_penalty_last_n"), int),
    "ignore_eos": bool, "grammar": str, "json_schema": (str, Mapping),
}  # fmt: skip
"""Types of the fields that are options of the same name; those that OpenAI lacks are llama.cpp's."""

MAX_LOGPROBS: Final = 20
MAX_CHOICES: Final = 128
MAX_STOPS: Final = 64
MAX_BIASES: Final = 4096
"""Limits of a request."""

TOOL_INTRO: Final = (
    "You may call one or more of these functions:\n{tools}\nTo call one, answer only\n"
    '<tool_call>\n{{"name": "FUNCTION", "arguments": {{...}}}}\n</tool_call>'
)
"""System message about tools, for models whose chat template does not mention them."""


@dataclass
class Asked:
    """What a request asks for.

    Attributes:
        prompts: Token numbers of each prompt.
        options: Options of the first choice of each; further ones have other seeds.
        n: Choices for each prompt.
        is_chat: Whether the answer is a message.
        is_streamed: Whether pieces are sent as they come.
        has_usage: Whether a stream ends with the numbers of tokens.
        echo: Texts that precede the answers.
        tools: Names of the functions that the model may call.
        must_call: Whether the answer must be a call.
        n_top: Likeliest tokens that are sent with each token's log-probability; `None`: neither is sent.
    """

    prompts: list[list[int]]
    options: Options
    n: int = 1
    is_chat: bool = False
    is_streamed: bool = False
    has_usage: bool = False
    echo: list[str] = field(default_factory=list)
    tools: tuple[str, ...] = ()
    must_call: bool = False
    n_top: int | None = None


def _typed(body: JSON, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """Return a field of a body, or `default` where it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ArgumentError(f"{name} is {kind_of(value)}; give {words}")
    return value


def _count(body: JSON, name: str, default: int, most: int, least: int = 0) -> int:
    value: int = _typed(body, name, int, default)
    if not least <= value <= most:
        raise ArgumentError(f"{name} is {value}; give {least} to {most}")
    return value


def _real(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} has a number beyond those of floating point; give another") from None


def _options(body: JSON, **changes: Any) -> Options:
    given: dict[str, Any] = {}
    for name, kind in SAMPLING.items():
        if (value := _typed(body, name, kind, None)) is not None:
            given[name] = _real(name, value) if kind is REAL else value
    given.setdefault("seed", secrets.randbits(63))
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise ArgumentError("stop must be a text or a list of texts")
    breakers = _typed(body, "dry_sequence_breakers", list, None)
    if breakers is not None:
        if not all(isinstance(text, str) for text in breakers):
            raise ArgumentError("dry_sequence_breakers must be a list of texts")
        given["dry_sequence_breakers"] = tuple(breakers)
    for name, texts in (("stop", stops), ("dry_sequence_breakers", breakers or ())):
        if len(texts) > MAX_STOPS:
            raise ArgumentError(f"{name} has {len(texts)} texts; give at most {MAX_STOPS}")
    most = _typed(body, "max_completion_tokens", int, _typed(body, "max_tokens", int, None))
    biases = _typed(body, "logit_bias", Mapping, {})
    if len(biases) > MAX_BIASES:
        raise ArgumentError(f"logit_bias has {len(biases)} tokens; give at most {MAX_BIASES}")
    try:
        bias = {int(token): max(_real("logit_bias", value), -1e6) for token, value in biases.items()}
    except (TypeError, ValueError):
        raise ArgumentError("logit_bias must give a number for each token number") from None
    form = _typed(body, "response_format", Mapping, {})
    match form.get("type", "text"):
        case "json_object":
            given["json_schema"] = {"type": "object"}
        case "json_schema":
            schema = form.get("json_schema")
            if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
                raise ArgumentError("response_format.json_schema must have the object 'schema'")
            given["json_schema"] = schema["schema"]
        case "text":
            pass
        case other:
            raise ArgumentError(f"response_format.type is {other!r}; give text, json_object or json_schema")
    given |= {"stop": tuple(stops), "max_tokens": -1 if most is None else most, "logit_bias": bias} | changes
    given["seed"] %= 1 << 64
    return Options(**given)


def _common(body: JSON, options: Options, prompts: list[list[int]]) -> Asked:
    stream_options = _typed(body, "stream_options", Mapping, {})
    n, is_streamed = _count(body, "n", 1, MAX_CHOICES, 1), _typed(body, "stream", bool, False)
    has_usage = bool(stream_options.get("include_usage"))
    return Asked(prompts, options, n, is_streamed=is_streamed, has_usage=has_usage)


def completion(body: JSON, model: TextModel) -> Asked:
    """Return the parsed body of `/v1/completions`.

    Raises:
        ArgumentError: The body is wrong.
    """
    prompt = body.get("prompt")
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(p) is int for p in prompt))
    many = [prompt] if is_one else prompt
    if not isinstance(many, list) or not many or len(many) > MAX_CHOICES:
        raise ArgumentError(f"prompt must be a text, token numbers, or a list of 1 to {MAX_CHOICES} of these")
    for one in many:
        if not isinstance(one, (str, list)):
            raise ArgumentError(f"prompt has {kind_of(one)}; give texts or lists of token numbers")
    n_top = None if body.get("logprobs") is None else _count(body, "logprobs", 0, MAX_LOGPROBS)
    tokens = [model.tokens_of(one) for one in many]
    asked = _common(body, _options(body, logprobs=0 if n_top is None else MAX_LOGPROBS), tokens)
    asked.n_top = n_top
    if _typed(body, "echo", bool, False):
        asked.echo = [one if isinstance(one, str) else model.vocabulary.decode(one) for one in many]
    return asked


def chat(body: JSON, model: TextModel) -> Asked:
    """Return the parsed body of `/v1/chat/completions`.

    Raises:
        ArgumentError: The body is wrong.
        ModelError: The file has no chat template, or the template refuses the messages.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ArgumentError("messages must be a list of one or more objects with 'role' and 'content'")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ArgumentError(f"messages[{i}] has no text 'role'")
    tools = [_function(tool) for tool in _typed(body, "tools", list, [])]
    choice = body.get("tool_choice") or "auto"
    names = tuple(str(tool["name"]) for tool in tools) if choice != "none" else ()
    variables: dict[str, Any] = dict(_typed(body, "chat_template_kwargs", Mapping, {}))
    template = model.chat_template
    if names:
        if "tools" in template.source:
            variables["tools"] = [{"type": "function", "function": tool} for tool in tools]
        else:
            intro = TOOL_INTRO.format(tools="\n".join(json.dumps(tool) for tool in tools))
            messages = _with_intro([_as_text(message) for message in messages], intro)
    text = template.render(messages, **variables)
    changes: dict[str, Any] = {}
    if isinstance(choice, Mapping):
        wanted = choice.get("function", {})
        wanted = wanted.get("name") if isinstance(wanted, Mapping) else None
        if wanted not in names:
            raise ArgumentError(f"tool_choice names {wanted!r}; the tools are {', '.join(names) or 'none'}")
        tools = [tool for tool in tools if tool["name"] == wanted]
    elif choice not in ("auto", "none", "required"):
        raise ArgumentError(f"tool_choice is {choice!r}; give auto, none, required, or name a function")
    must = isinstance(choice, Mapping) or choice == "required"
    if must:
        if not names:
            raise ArgumentError("tool_choice asks for a call, but there are no tools")
        changes["json_schema"] = {"anyOf": [_call_schema(tool) for tool in tools]}
    n_top = _count(body, "top_logprobs", 0, MAX_LOGPROBS)
    wants = _typed(body, "logprobs", bool, False)
    options = _options(body, logprobs=MAX_LOGPROBS if wants else 0, **changes)
    tokens = model.vocabulary.encode(text, add_special=False)
    asked = _common(body, options, [model.tokens_of(tokens)])
    asked.is_chat, asked.tools, asked.must_call = True, names, must
    asked.n_top = n_top if wants else None
    return asked


def embeddings(body: JSON, tokens_of: Callable[[Any], list[int]]) -> tuple[list[list[int]], bool]:
    """Return the token numbers of each input of a body of `/v1/embeddings`, and whether it asks for base64.

    Raises:
        ArgumentError: The body is wrong.
    """
    given = body.get("input")
    is_one = isinstance(given, str) or (isinstance(given, list) and all(type(p) is int for p in given))
    many = [given] if is_one else given
    if not isinstance(many, list) or not many or not all(isinstance(one, (str, list)) for one in many):
        raise ArgumentError("input must be a text, token numbers, or a list of these")
    if len(many) > (most := 16 * MAX_CHOICES):
        raise ArgumentError(f"input has {len(many)} texts; give at most {most}")
    return [tokens_of(one) for one in many], body.get("encoding_format") == "base64"


def _function(tool: Any) -> dict[str, Any]:
    """Return the function of a tool, after checks."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ArgumentError("each of tools must be {'type': 'function', 'function': {'name': ...}}")
    return dict(function)


def _call_schema(tool: JSON) -> JSON:
    parameters = tool.get("parameters") or {"type": "object"}
    properties = {"name": {"const": tool["name"]}, "arguments": parameters}
    return {
        "type": "object", "properties": properties, "required": ["name", "arguments"],
        "additionalProperties": False,
    }  # fmt: skip


def _with_intro(messages: list[JSON], intro: str) -> list[JSON]:
    """Add a text to the system message, or a system message."""
    first = messages[0]
    if first["role"] == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{intro}"}, *messages[1:]]
    return [{"role": "system", "content": intro}, *messages]


def _as_text(message: JSON) -> JSON:
    """Return a message without tool calls and results, which are written as text."""
    calls = message.get("tool_calls")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    if not isinstance(calls, list) or not calls:
        return message
    texts = [json.dumps(call.get("function")) for call in calls if isinstance(call, Mapping)]
    written = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return {"role": message["role"], "content": f"{message.get('content') or ''}{written}"}
