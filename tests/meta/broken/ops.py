"""A small device and a whole one, and streams of them that compute one op wrongly."""

from __future__ import annotations

from functools import cache

import numpy as np

from ggmlb.backends.cpu.device import CpuReg
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.interface import Device
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.compute import refusal
from tests.meta.broken.values import WrongBackend, WrongDevice

VIEWS = {op.value for op in NO_OPS}
BINARY = (Op.ADD, Op.SUB, Op.MUL, Op.DIV)


class SmallDevice(WrongDevice):
    """It computes little more than a first version of a backend: contiguous float32, and no broadcasts."""

    def declines(self, op):
        if op.op in NO_OPS:
            return None
        for t in (op, *op.src):
            if t is not None and t.dtype not in (DType.F32, DType.I32, DType.I64):
                return f"{t.describe()} is not float32"
            if t is not None and not t.is_contiguous():
                return f"{t.describe()} is not contiguous"
        if op.op in BINARY and op.src[1].ne != op.ne:
            return "shapes differ"
        return super().declines(op)


class WrongOp(WrongBackend):
    """It computes one op wrongly."""

    op = ""

    def after(self, node, memory):
        if node.op_desc() == self.op and self.is_wrong(node):
            values = memory[node.offset : node.offset + node.nbytes].view(node.dtype.numpy)
            self.spoil(values)

    def is_wrong(self, node):
        """Whether this node is computed wrongly."""
        return True

    def spoil(self, values):
        """Change the result, all of it."""
        with np.errstate(invalid="ignore"):
            values += (np.abs(values) / 8 + 1).astype(values.dtype)


class WrongOnOneElement(WrongOp):
    """One element is wrong."""

    def spoil(self, values):
        middle = values[values.size // 2 :][:1]
        middle[np.isinf(middle)] = 0
        super().spoil(middle)


class WrongInPlace(WrongOp):
    """It is wrong where the result takes an operand's place."""

    def is_wrong(self, node):
        return node.view_src is not None


class WrongWhereMemoryIsShared(WrongOp):
    """It is wrong where the result lies in an operand's memory, as an allocator may lay it."""

    def is_wrong(self, node):
        return node.view_src is None and any(s is not None and s.offset == node.offset for s in node.src)


@cache
def op_names(device: type[WrongDevice]) -> tuple[str, ...]:
    """The ops of which a device computes a case of the kit, as `Tensor.op_desc` names them."""
    claimed = device(CpuReg())
    found = dict.fromkeys(
        case.op
        for family in FAMILIES
        for case in cases_of(family)
        if refusal(claimed, case.program.case().build()) is None
    )
    return tuple(op for op in found if op not in VIEWS)


def wrong(backend: type[WrongOp], op: str) -> Device:
    """A device that computes an op wrongly: the small one, or the whole one for what the small one lacks."""
    base = SmallDevice if op in op_names(SmallDevice) else WrongDevice
    stream = type(backend.__name__, (backend,), {"op": op})
    return type(base.__name__, (base,), {"backend": stream})(CpuReg())
