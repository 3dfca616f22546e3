"""Ops that a device claims and of which a run computed no case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ggmlb.interface import Device
from ggmlb.testing.cases import cases_of
from ggmlb.testing.results import Result
from ggmlb.testing.samples import SAMPLES, TYPES, sample

MODES = ("test", "support")
"""Modes whose cases compute ops of every family."""


def claims_not_run(device: Device, results: Iterable[Result]) -> list[str]:
    """Return the ops that the device claims for some type and that had cases in a run, none of them computed.

    They are claimed in a form that the kit has no case of, or by mistake: the run says nothing about them.
    """
    tried: set[str] = set()
    computed: set[str] = set()
    for result in results:
        if result.device == device.name and result.mode in MODES:
            (computed if result.outcome.ran else tried).add(_op(result))
    doubtful = tried - computed
    nodes = (sample(name, dtype) for name in SAMPLES for dtype in TYPES) if doubtful else ()
    asked = (node for node in nodes if node is not None and node.op_desc() in doubtful)
    return sorted({node.op_desc() for node in asked if device.supports_op(node)})


def warnings(devices: Iterable[Device], results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each device that claims ops of which no case was computed."""
    for device in devices:
        if ops := claims_not_run(device, results):
            yield f"{device.name} claims {', '.join(ops)}, of which no case was computed: they are not tested"


def _op(result: Result) -> str:
    name = result.id.partition(" in ")[0]  # whatever memory its weight lies in
    return next((case.op for case in cases_of(result.family) if case.id == name), "")
