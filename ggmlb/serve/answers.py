"""Answers of OpenAI's API: generations to objects of JSON."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from ggmlb.models import Generation, TextModel

REASONS: Final = {"length": "length", "context": "length"}
"""`finish_reason` of `stopped_by`; else it is `"stop"`."""

_TOOL_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)|\[TOOL_CALLS\]\s*(.*)", re.DOTALL)

CALL_MARKS: Final = ("<tool_call>", "[TOOL_CALLS]", "{", "<|python_tag|>")
"""Beginnings of answers that may be tool calls; they are not streamed as text."""


def new_id(kind: str) -> str:
    """Return a new id such as `chatcmpl-...`."""
    return f"{kind}-{secrets.token_hex(12)}"


def tool_calls(text: str, names: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of an answer without tool calls, and the calls in OpenAI's form.

    Calls are `<tool_call>{...}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS][{...}]` (Mistral), or a JSON object
    alone (Llama); others, and those of unknown functions, stay text.
    """
    found: list[dict[str, Any]] = []

    def add(source: str) -> bool:
        try:
            given = json.loads(source)
        except (ValueError, RecursionError):
            return False
        calls = given if isinstance(given, list) else [given]
        if not calls or not all(isinstance(c, dict) and c.get("name") in names for c in calls):
            return False
        for call in calls:
            arguments = call.get("arguments", call.get("parameters", {}))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            function = {"name": call["name"], "arguments": written}
            found.append({"id": new_id("call"), "type": "function", "function": function})
        return True

    if add(text.strip().removeprefix("<|python_tag|>")):
        return "", found
    rest = _TOOL_CALL.sub(lambda m: "" if add(m[1] or m[2] or "") else m[0], text)
    return (rest.strip() if found else text), found


def before_call(text: str, start: int) -> int:
    """Return where a tool call, or a prefix of its marker, begins in a text, from `start` on."""
    n = len(text)
    for mark in CALL_MARKS[:2]:
        ends = (k for k in range(min(len(mark) - 1, n - start), 0, -1) if text.endswith(mark[:k]))
        at = text.find(mark, start)
        n = min(n, len(text) - next(ends, 0), at if at >= 0 else n)
    return n


def message(result: Generation, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return a chat's message, and its `finish_reason`."""
    text, calls = tool_calls(result.text, names) if names else (result.text, [])
    found: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        found["tool_calls"] = calls
    return found, "tool_calls" if calls else REASONS.get(result.stopped_by, "stop")


def chat_logprobs(
    model: TextModel, result: Generation, n_top: int | None, first: int, end: int
) -> dict[str, Any] | None:
    """Return log-probabilities of a chat's tokens `first` to `end`, with `n_top` likeliest; `None`: none."""
    if n_top is None:
        return None
    content = []
    for token, (ids, logs) in zip(result.tokens[first:end], result.logprobs[first:end], strict=True):
        best = [_logprob(model, i, log) for i, log in zip(ids[:n_top], logs[:n_top], strict=True)]
        content.append({**_logprob(model, token, _own(token, ids, logs)), "top_logprobs": best})
    return {"content": content}


def text_logprobs(
    model: TextModel, result: Generation, n_top: int | None, first: int, end: int, offset: int
) -> dict[str, Any] | None:
    """As `chat_logprobs`, of a completion's tokens; the first one begins at the character `offset`."""
    if n_top is None:
        return None

    def text(token: int) -> str:
        return model.vocabulary.decode([token], special=True)

    tokens, logprobs = result.tokens[first:end], result.logprobs[first:end]
    texts = [text(token) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [_own(token, *found) for token, found in zip(tokens, logprobs, strict=True)],
        "top_logprobs": [
            {text(i): log for i, log in zip(ids[:n_top], logs[:n_top], strict=True)} for ids, logs in logprobs
        ],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)],
    }


def _own(token: int, ids: Sequence[int], logs: Sequence[float]) -> float:
    """Return the log-probability of a token; OpenAI's -9999 if it is not among the likeliest."""
    return dict(zip(ids, logs, strict=True)).get(token, -9999.0)


def _logprob(model: TextModel, token: int, log: float) -> dict[str, Any]:
    raw = model.vocabulary.bytes_of(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": log, "bytes": list(raw)}


def usage(results: Sequence[Generation], prompts: Sequence[Sequence[int]], n_reused: int) -> dict[str, Any]:
    """Return the numbers of tokens."""
    n_prompt, n = sum(map(len, prompts)), sum(len(result.tokens) for result in results)
    return {
        "prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n,
        "prompt_tokens_details": {"cached_tokens": n_reused},
    }  # fmt: skip


def error(text: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}
