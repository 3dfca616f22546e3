"""Long tasks: told after a second, where somebody looks."""

from __future__ import annotations

import io
import sys
from time import sleep

import pytest

from ggmlb.system import progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, *, long: bool = True) -> str:
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.01 if long else 60.0)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.task("X0: compiling kernels", 2) as task:
        task.step("first_one")
        if long:
            sleep(0.2)
        task.step("second")
    return stream.getvalue() if stream is not None else ""


def test_a_screen_shows_what_goes_on_and_at_last_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run(Screen(), monkeypatch)
    shown = [line.rstrip() for line in told.split("\r")]
    assert shown[:3] == [
        "",
        "X0: compiling kernels: 1 of 2 (first_one)",
        "X0: compiling kernels: 2 of 2 (second)",
    ]
    assert shown[3].startswith("X0: compiling kernels: 2 in 0.")
    assert len(shown) == 4
    assert told.endswith("\n")


def test_a_later_line_covers_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(Screen(), monkeypatch).split("\r")[1:]
    assert len(lines[1]) == len(lines[0])


def test_a_short_task_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGMLB_PROGRESS", "1")
    assert run(Screen(), monkeypatch, long=False) == ""


def test_nothing_is_told_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGMLB_PROGRESS", raising=False)
    assert run(io.StringIO(), monkeypatch) == ""
    assert run(None, monkeypatch) == ""


@pytest.mark.parametrize(("asked", "told"), [("1", True), ("0", False), ("", False)])
def test_a_log_is_told_if_asked_for(asked: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGMLB_PROGRESS", asked)
    lines = run(io.StringIO(), monkeypatch).splitlines()
    assert bool(lines) is told
    assert "\r" not in "".join(lines)
    if told:
        assert lines[0] == "X0: compiling kernels: 1 of 2 (first_one)"
        assert lines[-1].startswith("X0: compiling kernels: 2 in ")


def test_a_screen_is_not_told_if_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGMLB_PROGRESS", "0")
    assert run(Screen(), monkeypatch) == ""


def test_a_notebook_shows_it_as_output_and_not_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    output, errors = kind(), kind()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.delenv("GGMLB_PROGRESS", raising=False)
    assert run(errors, monkeypatch) == "" and "\rX0: compiling" in output.getvalue()


def test_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Screen()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.01)
    with pytest.raises(KeyboardInterrupt), progress.task("X0: compiling kernels") as task:
        task.step("first")
        sleep(0.1)
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\n")
    sleep(0.05)
    assert stream.getvalue().count("\r") == 2
