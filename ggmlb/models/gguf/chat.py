"""ChatTemplate: a conversation rendered as one text by the Jinja template of a model file."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Final

from ggmlb.core.errors import ArgumentError, ModelError, kind_of, shown

NEEDLE: Final = "needle"
"""Marker in the messages with which a template is probed."""

MAX_SOURCE: Final = 1 << 16
"""Longest template [characters]; the longest known has 17,000."""

MAX_TIME_S = 5.0
"""Longest rendering [s]."""


class ChatTemplate:
    """A chat template, as in model files and Hugging Face's `tokenizer_config.json`.

    It is run in Jinja's sandbox, in a process with limits of time and memory (`template_sandbox`).

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
        if find_spec("jinja2") is None:
            raise ModelError("chat templates need jinja2: pip install 'ggmlb[models]'")
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._run(None)

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
            **variables: Other variables of the template, such as `enable_thinking`; JSON values.

        Raises:
            ArgumentError: A message's content is something else.
            ModelError: The template refuses the messages, fails, or takes too much time or memory.
        """
        normalised = [self._normalised(i, message) for i, message in enumerate(messages)]
        return self._rendered(normalised, add_generation_prompt, variables)

    def _normalised(self, i: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template supports."""
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
            # A single part is passed as text: some templates support parts of users only.
            as_parts = self._takes_parts and not (len(parts) == 1 and self._takes_text)
            found["content"] = parts if as_parts else "\n".join(part["text"] for part in parts)
        elif "content" in found and not self._takes_text:
            found["content"] = [{"type": "text", "text": content}]
        return found

    def _call(self, call: Any) -> Any:
        """Return a tool call with its arguments in the form that the template supports."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        given = function["arguments"]
        with suppress(ValueError, TypeError, RecursionError):  # unchanged if they are not JSON
            if self._takes_objects:
                given = json.loads(given) if isinstance(given, str) else given
            elif not isinstance(given, str):
                given = json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": given}}

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template supports content as a text; else it supports a list of parts."""
        return NEEDLE in self._tried({"role": "user", "content": NEEDLE}) or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        text = self._tried({"role": "user", "content": [{"type": "text", "text": NEEDLE}]})
        return NEEDLE in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether the template formats arguments that are objects, not by Python's `str`."""
        function = {"name": "f", "arguments": {NEEDLE: "x"}}
        call = {"id": "123456789", "type": "function", "function": function}
        user = {"role": "user", "content": "x"}
        text = self._tried(user, {"role": "assistant", "content": "", "tool_calls": [call]})
        return NEEDLE in text and f"'{NEEDLE}':" not in text

    def _tried(self, *messages: dict[str, Any]) -> str:
        """Return the text of messages; empty if the template fails."""
        try:
            return self._rendered(messages, True, {})
        except ModelError:
            return ""

    def _rendered(
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
        return self._run(known)

    def _run(self, variables: Mapping[str, Any] | None) -> str:
        """Render the template; without variables, only compile it."""
        request = {"source": self.source, "variables": variables, "max_time_s": MAX_TIME_S}
        try:
            line = json.dumps(request, default=dict) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ModelError(f"the chat template's variables must be JSON values: {error}") from None
        answer = _sandbox.ask(line)
        if "text" in answer:
            return str(answer["text"])
        where = f" in line {answer['line']}" if answer.get("line") else ""
        raise ModelError(f"{answer['failure']}{where}: {shown(answer['why'])}")


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


class _Sandbox:
    """The process that renders templates; started on first use, and restarted after a crash."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        self._parents: subprocess.Popen[str] | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            ModelError: The process cannot be started.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            process = self._process = self._process or _started()
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            answer = ""
            try:
                with suppress(OSError):  # the process has ended
                    process.stdin.write(request)
                    process.stdin.flush()
                    answer = process.stdout.readline()
                if answer.endswith("\n"):
                    found: dict[str, Any] = json.loads(answer)
                    return found
                said = process.stderr.read()
                status = process.wait()
            except BaseException:  # as Ctrl-C: the next request would read this answer
                self.close()
                raise
            self.close()
        why = f"its process ended with status {status}: {said.strip().rpartition(chr(10))[2]}"
        if said.startswith("Timeout"):
            why = f"it takes more than {MAX_TIME_S:g} s"
        return {"failure": "the chat template fails", "why": why}

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError), process:  # unsent bytes
                pass

    def _forget(self) -> None:
        """After a fork, leave the process to the parent."""
        self._lock = Lock()
        self._parents, self._process = self._process, None


def _started() -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("template_sandbox.py"))
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-W", "ignore", script, *filter(None, sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ModelError(f"chat templates need a Python process, which cannot be started: {error}") from None


_sandbox: Final = _Sandbox()
