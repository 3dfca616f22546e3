"""docs/traps.md names tests, and checks of the kit, that exist; and all tests that step into a trap."""

from __future__ import annotations

import re
from pathlib import Path

from ggmlb.testing.behaviour import CHECKS

ROOT = Path(__file__).parents[2]


def test_the_tests_of_the_table_exist() -> None:
    named = set(re.findall(r"`(\w+_\w+)`", (ROOT / "docs/traps.md").read_text()))
    texts = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    found = set(re.findall(r"^def (test_\w+)", texts, re.MULTILINE)).union(*CHECKS.values())
    assert len(named) > 30
    assert named <= found, named - found
    assert {name for name in found if name.startswith("test_trap_")} <= named
