"""Modes `test` and `support`: a device computes the cases, with the CPU backend as reference."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ggmlb.core.enums import NO_OPS, Status
from ggmlb.core.errors import ArgumentError, DTypeError, Error, ShapeError, UnsupportedOpError
from ggmlb.core.lifetime import Freeable
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor, same_layout
from ggmlb.interface import Backend, Device
from ggmlb.interface.registry import device_by_name
from ggmlb.testing.devices import weight_memories
from ggmlb.testing.failure import WrongValuesError, traceback_of
from ggmlb.testing.guarded import GuardedMemory
from ggmlb.testing.limits import limit
from ggmlb.testing.placing import WeightMemory, memory_of
from ggmlb.testing.results import CaseResult, Finding, Outcome

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
        found = self._test(case)
        return found.result("test", self.device.name, case.family, case.id, perf_counter() - start)

    def support(self, case: KitCase) -> CaseResult:
        """Check by computing a case that the device computes what it claims to, and declines the rest."""
        start = perf_counter()
        found, claimed = self._support(case)
        took = perf_counter() - start
        return found.result("support", self.device.name, case.family, case.id, took, {"supported": claimed})

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

    def _test(self, case: KitCase) -> Finding:
        built = case.program.case(case.id).build()
        try:
            why = refusal(self.device, built)
        except Exception as error:
            return Finding.failed(error, "declines() must answer, but ")
        if why:
            return Finding(Outcome.SKIPPED, f"not supported: {why}")
        why = refusal(self.reference.device, built)
        if why:
            return Finding(Outcome.SKIPPED, f"no reference: {why}")
        try:
            expected = _expected(self.reference, self._reference_memory, case)
        except Exception as error:
            return Finding.failed(error, "the reference fails: ")
        try:
            built = expected.build()
            image, why = self._placed(case, built)
            why = why or refusal(self.device, built)  # it may depend on the memory of a weight
            if image is None or (case.memory and why):
                return Finding(Outcome.SKIPPED, f"not supported: {why}")
            for run in RUNS if image.keeps_inputs else RUNS[:1]:
                image.upload()
                found = _compute(self.stream, image)
                if found.outcome is Outcome.FAILED:
                    return found._replace(reason=f"{run}: {found.reason}") if run else found
            if not case.memory and isinstance(self._memory, GuardedMemory):
                return self._in_place(expected, self._memory) or found
            return found
        except Exception as error:  # a backend may raise anything; the next case is tested all the same
            return Finding.failed(error)

    def _in_place(self, expected: Case, memory: GuardedMemory) -> Finding | None:
        """Return the failure, if any, when an allocator places the result in an operand's memory."""
        for i in inplace_operands(expected.build().graph.nodes[-1]):
            built = expected.build()
            node = built.graph.nodes[-1]
            image = memory.place(built, (node, node.operand(i)))
            image.upload()
            found = _compute(self.stream, image)
            if found.outcome is Outcome.FAILED:
                return found._replace(reason=f"its result in the place of src{i}: {found.reason}")
        return None

    # -- support -------------------------------------------------------------------------------

    def _support(self, case: KitCase) -> tuple[Finding, bool]:
        built, failed = case.program.case(case.id).build(), Outcome.FAILED
        try:
            before = refusal(self.device, built)
        except Exception as error:
            return Finding.failed(error, "declines() must answer, but "), False
        try:
            wrong = _inconsistency(self.device, self.stream, built)
        except Exception as error:
            return Finding.failed(error, "supports_op() must answer, but "), before is None
        if wrong:
            return Finding(failed, wrong), before is None
        try:
            image, why = self._placed(case, built)
            if image is None:
                return Finding(Outcome.SKIPPED, f"not supported: {why}"), False
            image.upload()
        except Exception as error:
            return Finding.failed(error, "cannot be placed: "), before is None
        after = refusal(self.device, built)
        if after != before and not case.memory:
            return Finding(failed, "the answer changes once the tensors are in a buffer"), before is None
        before = after
        try:
            _run(self.stream, image)
        except UnsupportedOpError as error:
            if before is None:
                told = f"it claims the op, then refuses it: {error}"
                return Finding(failed, told, None, traceback_of(error), error), True
            return Finding(Outcome.SKIPPED, f"refused: {before}"), False
        except Exception as error:
            claimed = before is None
            told = (
                "claims the op, then fails"
                if claimed
                else "refuses the op, but not with an UnsupportedOpError"
            )
            return Finding.failed(error, f"it {told}: "), claimed
        if before is not None:
            return Finding(failed, f"it refuses the op ({before}), then computes it"), False
        return Finding(Outcome.PASSED), True

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


def _compute(stream: Backend, image: Image) -> Finding:
    """Compute a program; return its faults, and the largest error."""
    _run(stream, image)
    verdicts = image.built.compare()
    nmse = max((v.nmse for v in verdicts.values() if v.nmse is not None), default=None)
    reasons = [v.reason or "wrong" for v in verdicts.values() if not v.ok]
    reasons += filter(None, [image.trespass()])
    if not reasons:
        return Finding(Outcome.PASSED, "", nmse)
    wrong = {name: v.difference for name, v in verdicts.items() if v.difference is not None}
    detail = "\n".join(f"{name}:\n{of.text}" if len(verdicts) > 1 else of.text for name, of in wrong.items())
    told = "; ".join(reasons)
    first = next(iter(wrong.values()), None)
    error = None if first is None else WrongValuesError(told, first.got, first.expected)
    return Finding(Outcome.FAILED, told, nmse, detail, error)
