"""What `pytest --pyargs ggmlb.testing` collects: a test for each case (see `plugin.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ggmlb.testing.plugin import run_case

if TYPE_CHECKING:
    from ggmlb.testing.run import Runner, Task
    from ggmlb.testing.xfail import ExpectedFailures


def test_case(
    ggmlb_case: tuple[Task, str],
    ggmlb_runner: Runner,
    ggmlb_xfails: Callable[[str], ExpectedFailures],
    record_property: Any,
) -> None:
    """The device does what the case asks."""
    run_case(ggmlb_runner, ggmlb_xfails, ggmlb_case, record_property)
