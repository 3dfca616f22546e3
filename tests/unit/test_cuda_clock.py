"""A timeline of hours: CUDA tells the time between two events as a float32 of milliseconds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ggmlb.backends.cuda import stream as clocks
from ggmlb.backends.cuda.stream import Stream
from ggmlb.interface import Command
from tests.support import host_streams
from tests.support.host_driver import HostDriver
from tests.support.host_streams import Op


class Time:
    """The time of host and card, which goes on by what they do alone [ns]."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 5_000_000_000
        patch.setattr(host_streams, "perf_counter", lambda: self.now * 1e-9)
        patch.setattr(clocks, "perf_counter_ns", lambda: self.now)
        self.began: list[int] = []

    def work(self, nanoseconds: int) -> Op:
        def run() -> None:
            self.began.append(self.now)
            self.now += nanoseconds

        return Op("work", run)


def times(patch: pytest.MonkeyPatch, n: int, work: int, pause: int, wait: bool) -> tuple[Time, list[Command]]:
    """Time pieces of work, with pauses after them, waiting for each or not [ns]."""
    time, driver = Time(patch), HostDriver()
    commands: list[Command] = []
    with driver.on(0):
        stream: Any = Stream(driver, 0)
        clock = clocks.Clock(driver, stream, commands)
        for _ in range(n):
            with clock.time("work"):
                driver.cards.put(stream.handle, time.work(work))
            if wait:
                driver.stream_synchronize(stream.handle)
            time.now += pause
        driver.stream_synchronize(stream.handle)
        clock.settle()
        stream.free()
    assert not driver.cards.leftovers()
    return time, commands


def test_after_pauses_of_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    time, commands = times(monkeypatch, 6, 12_300, 3_600_000_000_000, wait=True)
    for began, command in zip(time.began, commands, strict=True):
        assert abs(command.start - began) < 1000
        assert abs(command.stop - command.start - 12_300) < 1000


def test_after_hours_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    time, commands = times(monkeypatch, 5000, 1_700_012_300, 0, wait=False)
    for began, command in zip(time.began, commands, strict=True):
        assert abs(command.start - began) < 600_000  # 6e-8 of it
        assert abs(command.stop - command.start - 1_700_012_300) < 1000
    for before, after in pairwise(commands):
        assert abs(after.start - before.stop) < 1000
