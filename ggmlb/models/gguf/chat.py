"""ChatTemplate: a conversation as one text, by the Jinja template of a model file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from ggmlb.core.errors import ArgumentError, ModelError, kind_of, shown

NEEDLE: Final = "needle"
"""What is looked for in the text of messages by which a template is tried."""

MAX_SOURCE: Final = 1 << 16
"""Longest template [characters]; the longest known has 17,000."""


class ChatTemplate:
    """A chat template, as model files and Hugging Face's `tokenizer_config.json` have them.

    It is run in a sandbox, with bounds on time and memory (`template_sandbox`).

    Args:
        source: The template in Jinja.
        bos: Text of the token that begins a text.
        eos: Text of the token that ends a text.

    Attributes:
        source: The template.

    Raises:
        ModelError: The template is too long, or no template, or `jinja2` is not installed.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise ModelError(
                f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed"
            )
        try:
            from ggmlb.models.gguf.template_sandbox import Program, Refusal
        except ImportError:
            raise ModelError("chat templates need jinja2: pip install 'ggmlb[models]'") from None
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._refusal = Refusal
        try:
            self._program = Program(source)
        except (Exception, RecursionError) as error:
            raise _failure("the chat template is no Jinja template", error) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return a conversation as the text that the model continues.

        Args:
            messages: Each with `role` (`"system"`, `"user"`, `"assistant"`) and `content`: a text, a list of
                parts `{"type": "text", "text": ...}`, or `None`. As in llama.cpp, content, and `arguments` of
                tool calls, are given to the template in the form that it takes: texts of parts are joined by
                line breaks, arguments that are JSON are decoded.
            add_generation_prompt: Whether the text ends with the beginning of the assistant's answer.
            **variables: What else the template asks for, such as `enable_thinking`.

        Raises:
            ArgumentError: A message's content is something else.
            ModelError: The template refuses the messages, fails, or takes too much time or memory.
        """
        normalised = [self._normalised(i, message) for i, message in enumerate(messages)]
        return self._run(normalised, add_generation_prompt, variables)

    def _normalised(self, i: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template takes."""
        if not isinstance(message, Mapping):
            raise ArgumentError(f"message {i} is {kind_of(message)}; give {{'role': ..., 'content': ...}}")
        found = dict(message)
        if isinstance(calls := found.get("tool_calls"), (list, tuple)) and calls:
            found.setdefault("content", None)
            found["tool_calls"] = [self._call(call) for call in calls]
        content = found.get("content", "")
        if content is None:
            found["content"] = ""
        elif not isinstance(content, str):
            if not (isinstance(content, (list, tuple)) and all(map(_is_text, content))):
                raise ArgumentError(
                    f"message {i}: content is {content!r}; give a text, or a list of parts "
                    "{'type': 'text', 'text': ...}"
                )
            parts = [dict(part) for part in content]
            # One part goes as a text: some templates take parts of a user only.
            as_parts = self._takes_parts and not (len(parts) == 1 and self._takes_text)
            found["content"] = parts if as_parts else "\n".join(part["text"] for part in parts)
        elif "content" in found and not self._takes_text:
            found["content"] = [{"type": "text", "text": content}]
        return found

    def _call(self, call: Any) -> Any:
        """Return a tool call with its arguments as the template takes them."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        given = function["arguments"]
        with suppress(ValueError, TypeError, RecursionError):  # as they were given, where they are no JSON
            if self._takes_objects:
                given = json.loads(given) if isinstance(given, str) else given
            elif not isinstance(given, str):
                given = json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": given}}

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template shows content that is a text; else a list of parts, where it shows these."""
        return NEEDLE in self._tried({"role": "user", "content": NEEDLE}) or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        text = self._tried({"role": "user", "content": [{"type": "text", "text": NEEDLE}]})
        return NEEDLE in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether the template shows arguments that are no text otherwise than Python does."""
        function = {"name": "f", "arguments": {NEEDLE: "x"}}
        call = {"id": "123456789", "type": "function", "function": function}
        user = {"role": "user", "content": "x"}
        text = self._tried(user, {"role": "assistant", "content": "", "tool_calls": [call]})
        return NEEDLE in text and f"'{NEEDLE}':" not in text

    def _tried(self, *messages: dict[str, Any]) -> str:
        """Return the text of messages; empty where the template fails."""
        try:
            return self._run(messages, True, {})
        except ModelError:
            return ""

    def _run(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        known = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **variables,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._program.run(known)
        except self._refusal as error:
            raise ModelError(f"the chat template refuses the messages: {shown(str(error))[:500]}") from None
        except (Exception, RecursionError) as error:
            raise _failure("the chat template fails", error) from None


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _failure(what: str, error: Exception) -> ModelError:
    line = getattr(error, "lineno", None)
    where = f" in line {line}" if line else ""
    why = shown(str(error))[:500] or type(error).__name__
    if isinstance(error, RecursionError | MemoryError):
        why = "it is nested too deeply, or too large"
    return ModelError(f"{what}{where}: {why}")
