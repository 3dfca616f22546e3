"""Modes `test` and `support`: a device computes the cases, with the CPU backend as reference."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ggmlb.core.enums import NO_OPS, Status
from ggmlb.core.errors import ArgumentError, DTypeError, Error, ShapeError, UnsupportedOpError, one_line
from ggmlb.core.lifetime import Freeable
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor, same_layout
from ggmlb.interface import Backend, Device
from ggmlb.interface.registry import device_by_name
from ggmlb.testing.devices import weight_memories
from ggmlb.testing.guarded import GuardedMemory
from ggmlb.testing.limits import limit
from ggmlb.testing.placing import WeightMemory, memory_of
from ggmlb.testing.results import CaseResult, Outcome

if TYPE_CHECKING:
    from ggmlb.testing.cases import KitCase
    from ggmlb.testing.guarded import Image, ProgramMemory
    from ggmlb.testing.programs import Built, Case


RUNS = ("", "computed a second time", "computed a third time")
"""Runs of a plan: a device may execute the first, capture the second and replay the third."""


class Bench(Freeable):
    """Computes cases on a device under test and on a reference device, and compares the results.

    A context manager, which frees both streams on exit.

    Args:
        device: The device under test.
        reference: The reference device; the CPU by default.
    """

    def __init__(self, device: Device, reference: Device | None = None) -> None:
        self.device = device
        self.stream = device.init_backend()
        self.reference = (reference or device_by_name("CPU")).init_backend()
        self._memory = memory_of(self.stream.default_buffer_type)
        self._reference_memory = memory_of(self.reference.default_buffer_type)
        self._weights = {m.name: WeightMemory(m, self._memory) for m in weight_memories(device)}

    def test(self, case: KitCase) -> CaseResult:
        """Compute a case on device and reference; compare the values, and check for writes elsewhere."""
        start = perf_counter()
        outcome, reason, nmse = self._test(case)
        return CaseResult(
            "test", self.device.name, case.family, case.id, outcome, reason, nmse, perf_counter() - start
        )

    def support(self, case: KitCase) -> CaseResult:
        """Check by computing a case that the device computes what it claims to, and declines the rest."""
        start = perf_counter()
        outcome, reason, claimed = self._support(case)
        took, facts = perf_counter() - start, {"supported": claimed}
        return CaseResult(
            "support", self.device.name, case.family, case.id, outcome, reason, None, took, facts
        )

    def free(self) -> None:
        """Free the bench's streams, and its memory for programs.

        Raises:
            FreedError: They were freed before.
        """
        self.is_freed = True
        for memory in (*self._weights.values(), self._memory, self._reference_memory):
            memory.free()
        for stream in (self.stream, self.reference):
            stream.free()

    # -- test ----------------------------------------------------------------------------------

    def _test(self, case: KitCase) -> tuple[Outcome, str, float | None]:
        built = case.program.case(case.id).build()
        why = refusal(self.device, built)
        if why:
            return Outcome.SKIPPED, f"not supported: {why}", None
        why = refusal(self.reference.device, built)
        if why:
            return Outcome.SKIPPED, f"no reference: {why}", None
        try:
            expected = _expected(self.reference, self._reference_memory, case)
        except Exception as error:
            return Outcome.FAILED, f"the reference fails: it raised {one_line(error)}", None
        wrong, nmse = "", None
        try:
            built = expected.build()
            image, why = self._placed(case, built)
            why = why or refusal(self.device, built)  # it may depend on the memory of a weight
            if image is None or (case.memory and why):
                return Outcome.SKIPPED, f"not supported: {why}", None
            for run in RUNS if image.keeps_inputs else RUNS[:1]:
                image.upload()
                wrong, nmse = _compute(self.stream, image)
                if wrong:
                    wrong = f"{run}: {wrong}" if run else wrong
                    break
            if not (wrong or case.memory) and isinstance(self._memory, GuardedMemory):
                wrong = self._in_place(expected, self._memory)
        except Exception as error:  # a backend may raise anything; the next case is tested all the same
            return Outcome.FAILED, f"it raised {one_line(error)}", None
        return (Outcome.FAILED if wrong else Outcome.PASSED), wrong, nmse

    def _in_place(self, expected: Case, memory: GuardedMemory) -> str:
        """Return faults of the result when an allocator places it in an operand's memory."""
        for i in inplace_operands(expected.build().graph.nodes[-1]):
            built = expected.build()
            node = built.graph.nodes[-1]
            image = memory.place(built, (node, node.operand(i)))
            image.upload()
            wrong, _ = _compute(self.stream, image)
            if wrong:
                return f"its result in the place of src{i}: {wrong}"
        return ""

    # -- support -------------------------------------------------------------------------------

    def _support(self, case: KitCase) -> tuple[Outcome, str, bool]:
        built, failed = case.program.case(case.id).build(), Outcome.FAILED
        try:
            before = refusal(self.device, built)
        except Exception as error:
            return failed, f"declines() must answer, but it raised {one_line(error)}", False
        wrong = _inconsistency(self.device, self.stream, built)
        if wrong:
            return failed, wrong, before is None
        try:
            image, why = self._placed(case, built)
            if image is None:
                return Outcome.SKIPPED, f"not supported: {why}", False
            image.upload()
        except Exception as error:
            return failed, f"cannot be placed: it raised {one_line(error)}", before is None
        after = refusal(self.device, built)
        if after != before and not case.memory:
            return failed, "the answer changes once the tensors are in a buffer", before is None
        before = after
        try:
            _run(self.stream, image)
        except UnsupportedOpError as error:
            if before is None:
                return failed, f"it claims the op, then refuses it: {error}", True
            return Outcome.SKIPPED, f"refused: {before}", False
        except Exception as error:
            if before is None:
                return failed, f"it claims the op, then fails: it raised {one_line(error)}", True
            return (
                failed,
                f"it refuses the op, but not with an UnsupportedOpError: it raised {one_line(error)}",
                False,
            )
        if before is not None:
            return failed, f"it refuses the op ({before}), then computes it", False
        return Outcome.PASSED, "", True

    def _placed(self, case: KitCase, built: Built) -> tuple[Image | None, str]:
        """Place a program, or return why the memory for weights refuses it."""
        if not case.memory:
            return self._memory.place(built), ""
        try:
            return self._weights[case.memory].place(built), ""
        except (ArgumentError, DTypeError, ShapeError) as error:
            return None, str(error)


def inplace_operands(node: Tensor) -> list[int]:
    """Return the operands, except views, whose memory an allocator may reuse for the result."""
    n = SPECS[node.op].inplace if node.view_src is None and not node.is_empty else 0
    roots = [None if s is None else s.view_src or s for s in node.src]
    return [
        i
        for i, s in enumerate(node.src[:n])
        if s is not None and s.view_src is None and roots.count(s) == 1 and same_layout(s, node)
    ]


def refusal(device: Device, built: Built) -> str | None:
    """Return why a device declines a node of the program (the first); `None` if it computes all."""
    for node in built.graph.nodes:
        why = device.declines(node)
        if why is not None:
            return why
    return None


def _inconsistency(device: Device, stream: Backend, built: Built) -> str:
    for node in built.graph.nodes:
        why, claimed = device.declines(node), device.supports_op(node)
        if claimed != (why is None):
            return f"supports_op says {claimed}, declines says {why!r}"
        if stream.supports_op(node) != claimed:
            return f"supports_op says {claimed} on the device, {not claimed} on its backend"
        if why is not None and not why.strip():
            return "declines gives no reason"
        if why is not None and node.op in NO_OPS:
            return f"views need no computation, but {node.op_desc()} is declined: {why}"
    return ""


def _expected(reference: Backend, memory: ProgramMemory, case: KitCase) -> Case:
    """Return the case with the outputs that the reference computes."""
    built = case.program.case(case.id).build()
    image = memory.place(built)
    image.upload()
    _run(reference, image)
    outputs: list[tuple[int, Any, bytes]] = []
    for name in case.program.outputs:
        tensor = built.tensors[name]
        outputs.append((int(tensor.dtype), tensor.ne, tensor.packed().tobytes()))
    return replace(case.program.case(case.id, outputs), nmse=limit(case.program))


def _run(stream: Backend, image: Image) -> None:
    status = stream.graph_compute(image.built.graph)
    if status is not Status.SUCCESS:
        raise Error(f"graph_compute returned {status!r}, not SUCCESS")


def _compute(stream: Backend, image: Image) -> tuple[str, float | None]:
    """Compute a program; return its faults, and the largest error."""
    _run(stream, image)
    verdicts = image.built.compare()
    nmse = max((v.nmse for v in verdicts.values() if v.nmse is not None), default=None)
    reasons = [v.reason or "wrong" for v in verdicts.values() if not v.ok]
    trespass = image.trespass()
    return "; ".join([*reasons, *([trespass] if trespass else [])]), nmse
