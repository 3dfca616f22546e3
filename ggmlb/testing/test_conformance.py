"""The tests that `pytest --pyargs ggmlb.testing` collects, one for each case (see `plugin.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ggmlb.testing.plugin import run_case

if TYPE_CHECKING:
    import pytest

    from ggmlb.testing.run import FamilyTask, Runner
    from ggmlb.testing.xfail import ExpectedFailures


def test_case(
    ggmlb_case: tuple[FamilyTask, str],
    ggmlb_runner: Runner,
    ggmlb_xfails: Callable[[str], ExpectedFailures],
    request: pytest.FixtureRequest,
) -> None:
    """Check one case on one device."""
    __tracebackhide__ = True
    run_case(ggmlb_runner, ggmlb_xfails, ggmlb_case, request.node)
