"""Ops and data types that a device supports, and those that a run did not test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import DTypeError, ShapeError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Device
from ggmlb.testing.cases import cases_of
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.ops.record import Sample
from ggmlb.testing.results import CaseResult

MODES = ("test", "support")
"""Modes whose cases compute ops of every family."""


SAMPLES: Final[dict[str, Sample]] = {
    name: make for record in RECORDS.values() for name, make in record.samples.items()
}
"""A small node of every op, by its name in the table of `ggmlb ops`."""

TYPES: Final = tuple(t for t in DType if t not in (DType.Q8_1, DType.Q8_K))
"""Types of the table, without Q8_1 and Q8_K, which are ggml's scratch types."""

TYPE_FAMILIES: Final[dict[str, frozenset[DType]]] = {
    "all types": frozenset(TYPES),
    "all quantised": frozenset(t for t in TYPES if t.is_quantized),
    "floats": frozenset({DType.F32, DType.F16, DType.BF16}),
    "integers": frozenset({DType.I8, DType.I16, DType.I32, DType.I64}),
    "q4_0 to q8_0": frozenset({DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0}),
    "q2_K to q6_K": frozenset({DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K}),
    "iq*": frozenset(t for t in TYPES if t.name.startswith("IQ")),
}


def sample(name: str, dtype: DType) -> Tensor | None:
    """Return a small node of an op, or `None` if it takes no main operand of that type."""
    try:
        return SAMPLES[name](Context(), dtype)
    except (DTypeError, ShapeError):
        return None


def supported_types(device: Device, name: str) -> list[DType]:
    """Return the types of the main operand for which the device computes the op."""
    nodes = ((dtype, sample(name, dtype)) for dtype in TYPES)
    return [dtype for dtype, node in nodes if node is not None and device.supports_op(node)]


def brief(types: Iterable[DType]) -> str:
    """Return the types as text; one word, such as `"floats"`, stands for a complete family."""
    left = list(types)
    words = []
    for word, family in TYPE_FAMILIES.items():
        if len(family) > 1 and family <= set(left):
            words.append(word)
            left = [t for t in left if t not in family]
    return ", ".join([*words, *(t.name.lower() for t in left)]) or "-"


def claims_not_run(device: Device, results: Iterable[CaseResult], *, whole: bool = False) -> list[str]:
    """Return the ops claimed by a device, and in the run (all ops if `whole`), of which no case was computed.

    Such claims are untested: either no case has the claimed form, or the claim is wrong.

    Args:
        device: The device.
        results: The results of the run.
        whole: Whether the run included all ops, so that ops without any case count too.
    """
    tried = {op for name in SAMPLES if (op := _op_of_sample(name))} if whole else set()
    computed: set[str] = set()
    for result in results:
        if result.device == device.name and result.mode in MODES:
            (computed if result.outcome.ran else tried).add(_op(result))
    doubtful = tried - computed
    nodes = (sample(name, dtype) for name in SAMPLES for dtype in TYPES) if doubtful else ()
    asked = (node for node in nodes if node is not None and node.op_desc() in doubtful)
    return sorted({node.op_desc() for node in asked if device.supports_op(node)})


def warnings(
    devices: Iterable[Device], results: Sequence[CaseResult], *, whole: bool = False
) -> Iterator[str]:
    """Yield a line for each device with claimed ops of which no case was computed (see `claims_not_run`)."""
    for device in devices:
        if ops := claims_not_run(device, results, whole=whole):
            yield f"{device.name} claims {', '.join(ops)}, of which no case was computed: they are not tested"


def _op_of_sample(name: str) -> str:
    return next((node.op_desc() for dtype in TYPES if (node := sample(name, dtype)) is not None), "")


def _op(result: CaseResult) -> str:
    name = result.id.partition(" in ")[0]  # without the buffer type of the weight
    return next((case.op for case in cases_of(result.family) if case.id == name), "")
