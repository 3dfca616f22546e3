"""What `pytest --pyargs ggmlb.testing` collects: a test for each case (see `plugin.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ggmlb.testing.plugin import run_case

if TYPE_CHECKING:
    import pytest

    from ggmlb.testing.run import Runner, Task
    from ggmlb.testing.xfail import ExpectedFailures


def test_case(
    ggmlb_case: tuple[Task, str],
    ggmlb_runner: Runner,
    ggmlb_xfails: Callable[[str], ExpectedFailures],
    request: pytest.FixtureRequest,
) -> None:
    """The device does what the case asks."""
    run_case(ggmlb_runner, ggmlb_xfails, ggmlb_case, request.node.user_properties)
