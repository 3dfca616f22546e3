"""What of an answer that may hold tool calls is sent as text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'ggmlb[server]'")

from ggmlb import ArgumentError
from ggmlb.models import Generation, Options
from ggmlb.serve.answers import before_call
from ggmlb.serve.requests import Asked, _options
from ggmlb.serve.server import _Choice

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a[0] < b", 8),
        ("see <a href", 11),
        ("see <", 4),
        ("see <tool_ca", 4),
        ("see <tool_call>{", 4),
        ("see [TOOL_CALLS", 4),
        ("see [x", 6),
    ],
)
def test_only_what_may_be_a_call_waits(text: str, end: int) -> None:
    assert before_call(text, 0) == end


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_text_around_a_call_is_sent(size: int) -> None:
    whole = f"if a < b: {CALL} then [0]"
    asked = Asked([], Options(), is_chat=True, tools=("f",))
    result = Generation(prompt_tokens=[])
    job: Any = SimpleNamespace(result=result)
    choice, found = _Choice(SimpleNamespace(), asked, job, 0), []  # type: ignore[arg-type]
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    for i, piece in enumerate(pieces):
        result.text += piece
        found += choice.take(piece, i == len(pieces) - 1)
    text = "".join(part["delta"].get("content", "") for part in found)
    assert text.split() == ["if", "a", "<", "b:", "then", "[0]"]
    (calls,) = [part["delta"]["tool_calls"] for part in found if "tool_calls" in part["delta"]]
    assert calls[0]["function"] == {"name": "f", "arguments": "{}"}
    assert found[-1]["finish_reason"] == "tool_calls"


def test_options_of_llama_cpp_are_taken() -> None:
    body = {"dry_multiplier": 1, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": -1}
    options = _options({**body, "dry_sequence_breakers": ["\n", "ab"]})
    assert {name: getattr(options, name) for name in body} == body
    assert options.dry_sequence_breakers == ("\n", "ab")
    for wrong in ("\n", [1], ["a"] * 65, [""]):
        with pytest.raises(ArgumentError, match="dry_sequence_breakers"):
            _options({"dry_sequence_breakers": wrong})
