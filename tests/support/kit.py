"""The conformance kit on one device."""

from __future__ import annotations

from typing import Any

from ggmlb import Device
from ggmlb.testing.run import Runner, Selection, tasks
from ggmlb.testing.xfail import ExpectedFailures

CPU_REG = """
from ggmlb.backends.cpu.device import CpuReg

class Reg(CpuReg):
    name = Device.name.removesuffix("0")
    def __init__(self):
        super().__init__()
        self._devices = [Device(self)]
    devices = property(lambda self: self._devices)

def backend_reg():
    return Reg()
"""
"""The end of a file that is a backend: the registration of a class `Device`, which derives from the CPU's."""


def faults(device: Device, mode: str, limit: int, least: float = 0.25, **chosen: Any) -> list[str]:
    """Return what the kit finds; more than that share of it must have run."""
    known = ExpectedFailures.of(device)
    with Runner([device]) as runner:
        work = tasks(device, Selection(mode, limit=limit, **chosen))
        results = [known.judge(r) for task in work for r in runner.run(task)]
    assert sum(r.outcome.ran for r in results) > len(results) * least
    return [f"{r.family}: {r.id}: {r.reason}" for r in results if r.outcome.is_bad]
