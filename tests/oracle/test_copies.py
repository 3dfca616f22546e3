"""The recorded numbers of ggml's copies are those of the installed ggml (ggml-python)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.processes import python

if importlib.util.find_spec("ggml") is None:
    pytest.skip("ggml-python is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

pytestmark = pytest.mark.oracle

TESTS = Path(__file__).parents[1]


def test_the_table_of_copies_is_what_ggml_does():
    # In a process of its own: ggml ends it where an assertion fails.
    done = python("-m", "tests.support.ggml_copies")
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    recorded = json.loads((TESTS / "sched" / "ggml_copies.json").read_text())
    for kind in ("programs", "writing"):
        assert counted[kind] == recorded[kind]
