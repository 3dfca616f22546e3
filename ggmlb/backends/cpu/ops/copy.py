"""Copies into another place, type, shape or layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import ANY, operands
from ggmlb.backends.cpu import casts
from ggmlb.backends.cpu.rules import RULES, STORED
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering

_converts = operands(ANY, out=STORED)


def _copies(node: Tensor) -> str | None:
    src = node.sources[0]
    if node.dtype != src.dtype:
        why = _converts(node)
        if why is not None:
            return why
    if not (node.dtype.is_quantized or src.dtype.is_quantized):
        return None
    if not (src.is_contiguous_rows() and node.is_contiguous_rows()):
        return "blocks can only be copied along contiguous rows"
    if node.ne != src.ne and not (src.is_contiguous() or node.is_contiguous()):
        return "the shapes differ, and neither src0 nor the result is contiguous"
    return None


@RULES.rule(Op.CPY, _copies)
@RULES.rule(Op.CONT, _copies)
@RULES.rule(Op.DUP, _copies)
def copy(lw: CpuLowering, t: Tensor) -> None:
    """The elements in their logical order, in the result's type, shape and strides."""
    src = t.sources[0]
    y, x = View.of(t), View.of(src)
    if t.ne != src.ne:
        if src.is_contiguous():
            x = View.lay(x.buffer, src.dtype, x.offset, t.ne)
        elif t.is_contiguous():
            y = View.lay(y.buffer, t.dtype, y.offset, src.ne)
        else:
            packed = lw.scratch(x.shape, x.item)
            lw.emit(casts.copy, packed, lw.bind(x))
            x = View.lay(lw.view(packed, src.dtype).buffer, src.dtype, 0, t.ne)
    lw.copy(y, x)
