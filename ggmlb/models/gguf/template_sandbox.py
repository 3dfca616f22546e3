"""The process that renders chat templates: Jinja's sandbox, with limits of time and memory.

A template is a program of whoever made the model file (CVE-2024-34359). The sandbox denies it
Python's internals; the process's limits of time and memory hold even within one long call in C. `chat.py`
starts this file as a script, with its `sys.path` as arguments. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]  # `-I -S` leave only the standard library

import faulthandler
import functools
import json
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT: Final = 1 << 22
"""Longest text of a conversation [characters]."""

MAX_MEMORY: Final = 1 << 29
"""Address space of the process, where the system limits it [bytes]."""


class Refusal(Exception):
    """The template called `raise_exception`, to refuse a conversation."""


class TooLong(Exception):
    """The text of the conversation is too long."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where use of Python's internal attributes is an error instead of an empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse an attribute that templates must not use."""
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")
        return super().unsafe_undefined(obj, attribute)


class GenerationTag(ext.Extension):
    """The tag `generation`, which marks the assistant's text for training; it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> nodes.Node:
        """Return the statements between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as Hugging Face writes it: nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> str:
    """Raise a `Refusal` with a message; templates call this to refuse a conversation."""
    raise Refusal(str(message))


def strftime_now(form: str) -> str:
    """Return the current time in a `strftime` format."""
    return datetime.now().strftime(form)


@functools.lru_cache(8)
def compiled(source: str) -> jinja2.Template:
    """Compile a template, with the filters and functions that Hugging Face gives to chat templates."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, GenerationTag])
    environment.filters |= {"tojson": tojson, "from_json": json.loads}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def rendered(source: str, variables: dict[str, Any]) -> str:
    """Return the text of a template rendered with `variables`; raise `TooLong` if it is too long."""
    pieces, length = [], 0
    for piece in compiled(source).generate(variables):
        length += len(piece)
        if length > MAX_TEXT:
            raise TooLong(f"the text has more than {MAX_TEXT:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(source: str, variables: dict[str, Any] | None) -> dict[str, Any]:
    """Return the text of a rendered template, or the failure; `variables=None` only compiles the template."""
    try:
        compiled(source)
    except Exception as error:
        line = getattr(error, "lineno", None)
        return {"failure": "the chat template is no Jinja template", "why": why(error), "line": line}
    try:
        return {"text": "" if variables is None else rendered(source, variables)}
    except Refusal as error:
        return {"failure": "the chat template refuses the messages", "why": str(error)[:500]}
    except Exception as error:
        return {"failure": "the chat template fails", "why": why(error)}


def why(error: Exception) -> str:
    """Return the message of an error, at most 500 characters."""
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deeply, or needs too much memory"
    return str(error)[:500] or type(error).__name__


def main() -> None:
    """Render templates for requests on stdin (JSON lines); one that takes too long ends the process."""
    if sys.platform == "linux":
        import resource as rlimits

        for limit, most in (
            (rlimits.RLIMIT_AS, MAX_MEMORY),
            (rlimits.RLIMIT_FSIZE, 0),
            (rlimits.RLIMIT_CORE, 0),
        ):
            hard = rlimits.getrlimit(limit)[1]
            most = most if hard == rlimits.RLIM_INFINITY else min(most, hard)
            rlimits.setrlimit(limit, (most, most))
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["max_time_s"], exit=True)
        said = json.dumps(answer(request["source"], request["variables"]))
        faulthandler.cancel_dump_traceback_later()
        print(said, flush=True)


if __name__ == "__main__":
    main()
