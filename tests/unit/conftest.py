"""Backends as modules that a test writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggmlb.interface.registry.discovery import Candidate
from tests.support.backend_files import GOOD, Write, source_of


@pytest.fixture
def write_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a backend module that can be imported, and return its candidate."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(
        module: str, name: str = "Echo", source: str = GOOD, extra: str = "", called: str = ""
    ) -> Candidate:
        (tmp_path / f"{module}.py").write_text(source_of(name, extra, source))
        called = called or name
        return Candidate(called, f"{module}:backend_reg", called.casefold(), f"{module} 1.0")

    yield write
    for module in set(sys.modules) - before:
        del sys.modules[module]
