"""Files that are backends, for tests of the registry."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

from ggmlb.interface.registry import Registry
from ggmlb.interface.registry.discovery import Candidate

Write = Callable[..., Candidate]

GOOD = """
    from tests.support.stub_backend import StubReg
    {extra}
    def backend_reg():
        return StubReg("{name}")
"""


def source_of(name: str, extra: str = "", source: str = GOOD) -> str:
    """The text of a backend of one device, with more lines before it."""
    return dedent(source).format(name=name, extra=extra)


def registry_of(*candidates: Candidate) -> Registry:
    return Registry(lambda: candidates)
