"""Devices that compute or answer wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggmlb.backends.cpu.backend import CpuBackend
from ggmlb.backends.cpu.device import CpuDevice, CpuReg
from ggmlb.backends.cpu.plan import CpuLowering, CpuPlan
from ggmlb.core.enums import NO_OPS, Op, Status
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor, contiguous_nb, layout_of
from ggmlb.interface import Device


def like(t: Tensor, **changes: Any) -> Tensor:
    """The same tensor, seen wrongly."""
    clone = t.reading(t.src, t.view_src)
    for name, value in changes.items():
        setattr(clone, name, value)
    clone.layout = layout_of(clone.dtype, clone.ne, clone.nb)
    return clone


class WrongBackend(CpuBackend):
    """The CPU, with hooks where faults are put in."""

    def node(self, node: Tensor) -> Tensor:
        """What is computed in place of a node."""
        return node

    def after(self, node: Tensor, memory: np.ndarray) -> None:
        """What happens to memory once a node is computed."""

    def _plan(self, graph: Any) -> Any:
        lowering = CpuLowering(self.device.kinds, self._workspace, self._threads)
        right = lowering.lower
        lowering.lower = lambda nodes: right([self.node(n) if n.op not in NO_OPS else n for n in nodes])
        return CpuPlan(self, graph, lowering)

    def _compute(self, plan: Any) -> Status:
        status = super()._compute(plan)
        for node in plan.nodes:
            if node.op not in NO_OPS and node.nbytes:
                self.after(node, node.buffer.base)
        return status


def sources(node: Tensor, change: Any) -> Tensor:
    return node.reading(tuple(s if s is None else change(s) for s in node.src), node.view_src)


class WrongStride(WrongBackend):
    """It takes every operand for contiguous."""

    def node(self, node):
        if node.op is not Op.ADD:
            return node
        return sources(node, lambda s: like(s, nb=contiguous_nb(s.dtype, s.ne)))


class WrongBroadcast(WrongBackend):
    """It repeats the first row of src1 where it should go through all."""

    def node(self, node):
        if node.op is not Op.MUL or node.src[1].ne[1] == 1:
            return node
        a, b = node.src
        first = like(b, ne=(b.ne[0], 1, *b.ne[2:]))
        return node.reading((a, first), node.view_src)


class UnalignedOffset(WrongBackend):
    """It rounds the offset of a view down to its alignment."""

    def node(self, node):
        if node.op is not Op.CONT:
            return node
        return sources(node, lambda s: like(s, offset=s.offset // 64 * 64))


class OneByteTooMany(WrongBackend):
    """It writes one byte after the end of its result."""

    def after(self, node, memory):
        memory[node.offset + node.nbytes] ^= 1


class OneByteBefore(WrongBackend):
    """It writes one byte before its result."""

    def after(self, node, memory):
        memory[node.offset - 1] ^= 1


class LastElementMissing(WrongBackend):
    """It does not write the last element of its result."""

    def after(self, node, memory):
        size = node.dtype.type_size
        memory[node.offset + node.nbytes - size : node.offset + node.nbytes] = 0xFF


class ChangesItsInput(WrongBackend):
    """It uses an input as scratch."""

    def after(self, node, memory):
        a = node.src[0]
        if a is not None and a.view_src is None and a.nbytes and node.view_src is None:
            memory[a.offset] ^= 1


class FillsTheGaps(WrongBackend):
    """It writes rows with the gaps between them."""

    def after(self, node, memory):
        if node.op is Op.CPY and not node.is_contiguous() and node.ne[1] > 1 and node.ne[0] < 1000:
            memory[node.offset + node.ne[0] * node.nb[0]] ^= 1


class NoInfinity(WrongBackend):
    """It writes a large number where -inf is right."""

    def after(self, node, memory):
        if node.op is Op.DIAG_MASK_INF:
            values = memory[node.offset : node.offset + node.nbytes].view(np.float32)
            values[np.isinf(values)] = -1e30


class LowPrecision(WrongBackend):
    """It keeps 8 bits of its results."""

    def after(self, node, memory):
        if node.op is Op.NORM and node.is_contiguous() and node.dtype.name == "F32":
            values = memory[node.offset : node.offset + node.nbytes].view(np.uint32)
            values &= 0xFFFF0000


class WorksOnce(WrongBackend):
    """A plan computes the first time only."""

    def _compute(self, plan):
        if getattr(plan, "ran", False):
            return Status.SUCCESS
        plan.ran = True
        return super()._compute(plan)


class StalePlan(WrongBackend):
    """It computes the first plan of a graph for ever, wherever the tensors lie."""

    def graph_compute_async(self, graph):
        plan = self._plans.get(graph)
        if plan is None:
            plan = self._plans[graph] = self.graph_plan_create(graph)
        return self._compute(plan)

    def graph_plan_update(self, plan, graph):
        return plan


class StaleKeptPlan(WrongBackend):
    """It computes a plan that the caller kept as it was made, wherever the tensors lie."""

    def graph_plan_compute(self, plan):
        return self._compute(plan)


class IgnoresAbort(WrongBackend):
    """It never asks the abort callback."""

    def _compute(self, plan):
        callback, self.abort_callback = self.abort_callback, None
        try:
            return super()._compute(plan)
        finally:
            self.abort_callback = callback


class ComputesWhatItRefuses(WrongBackend):
    """Its device refuses ABS, and it computes it all the same."""

    def _check_graph(self, graph):
        pass


class OtherError(WrongBackend):
    """It refuses with an error of its own."""

    def _check_graph(self, graph):
        for node in graph.nodes:
            if self.device.declines(node):
                raise KeyError(node.op)


class InOrderOfNe(WrongBackend):
    """It gives a user's function arrays whose dimensions are in ggml's order."""

    def node(self, node):
        if node.op is not Op.MAP_CUSTOM1:
            return node
        clone, fun = like(node), node.params["fun"]
        clone.params = {**node.params, "fun": lambda dst, a, *rest: fun(dst.T, a.T, *rest)}
        return clone


class WrongDevice(CpuDevice):
    """A CPU whose stream is of the class given."""

    name = "Broken0"

    backend: type[CpuBackend] = WrongBackend

    def init_backend(self, params=None):
        return self.backend(self, 1)


class ClaimsAll(WrongDevice):
    """It claims every op, and fails where it has no rule."""

    def declines(self, op):
        return None

    def init_backend(self, params=None):
        return RefusesLate(self, 1)


class RefusesLate(WrongBackend):
    """It fails while it plans."""

    def _plan(self, graph):
        for node in graph.nodes:
            if node.op is Op.UNARY:
                raise BackendError("no kernel")
        return super()._plan(graph)


class SaysNoForYes(WrongDevice):
    """Its `supports_op` denies what its `declines` does not."""

    def supports_op(self, op):
        return op.op is not Op.UNARY and super().supports_op(op)


class NoReason(WrongDevice):
    """It refuses and does not say why."""

    def declines(self, op):
        return " " if op.op is Op.UNARY else super().declines(op)


class ChangesItsMind(WrongDevice):
    """Its answer depends on whether the tensors lie somewhere."""

    def declines(self, op):
        return "not now" if op.op is Op.UNARY and op.buffer is not None else super().declines(op)


class RefusesAbs(WrongDevice):
    """It refuses unary ops."""

    def declines(self, op):
        return "not of mine" if op.op is Op.UNARY else super().declines(op)


def computing(backend: type[CpuBackend], device: type[WrongDevice] = WrongDevice) -> Device:
    """A device whose streams are broken."""
    return type(backend.__name__, (device,), {"backend": backend})(CpuReg())


def refusing(device: type[WrongDevice], backend: type[CpuBackend] = WrongBackend) -> Device:
    """A device that says what is not so."""
    return computing(backend, device)
