"""Copies to another type, shape or layout; repeat, concat, and writes to views (SET, ACC)."""

from __future__ import annotations

import numpy as np

from ggmlb.backends.common.rules import ANY, F32, FLOATS, in_window, operands, same_types
from ggmlb.backends.cpu import kernels
from ggmlb.backends.cpu.lowering import PLAIN, RULES, STORED, NodeLowering
from ggmlb.backends.cpu.views import View, broadcast
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

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
        return "quantised tensors must have contiguous rows"
    if node.ne != src.ne and not (src.is_contiguous() or node.is_contiguous()):
        return "the shapes differ, and neither src0 nor the result is contiguous"
    return None


@RULES.rule(Op.CPY, _copies)
@RULES.rule(Op.CONT, _copies)
@RULES.rule(Op.DUP, _copies)
def copy(lw: NodeLowering, t: Tensor) -> None:
    """Copy the elements in their logical order into the result's type, shape and strides."""
    src = t.sources[0]
    y, x = lw.view(t), lw.view(src)
    if t.ne != src.ne:
        if src.is_contiguous():
            x = View.lay(x.memory, src.dtype, x.offset, t.ne)
        elif t.is_contiguous():
            y = View.lay(y.memory, t.dtype, y.offset, src.ne)
        else:
            packed = lw.scratch(x.shape, x.item, x.type)
            lw.emit(kernels.copy, packed, x)
            x = View.lay(packed.memory, src.dtype, 0, t.ne)
    lw.copy(y, x)


@RULES.rule(Op.REPEAT, same_types)
def repeat(lw: NodeLowering, t: Tensor) -> None:
    """`a`, tiled over the shape of the result."""
    y, x = broadcast([lw.view(t), lw.view(t.sources[0])])
    lw.copy(y, x)


@RULES.rule(Op.REPEAT_BACK, operands(FLOATS))
def repeat_back(lw: NodeLowering, t: Tensor) -> None:
    """The sum of all tiles of `a` that have the shape of the result."""
    (a,) = t.sources
    x, y = lw.f32(lw.view(a)), lw.out_f32(t)
    shape = [n for d in range(4) for n in (a.ne[3 - d] // t.ne[3 - d], t.ne[3 - d])]
    lw.emit(lambda y, x: np.sum(x.reshape(shape), axis=(0, 2, 4, 6), out=y), y, x)
    lw.store(t, y)


@RULES.rule(Op.CONCAT, same_types)
def concat(lw: NodeLowering, t: Tensor) -> None:
    """`a`, then `b` along dimension `dim`."""
    axis, y, start = 3 - t.params["dim"], lw.view(t), 0
    for s in t.sources:
        x = lw.view(s)
        n = x.shape[axis]
        lw.copy(y.cut(axis, start, n), x)
        start += n


def _window(lw: NodeLowering, t: Tensor) -> View:
    """Emit the copy of `a`, unless the result is `a` itself, and return the window of the result."""
    a, b = t.sources
    p, y = t.params, lw.view(t)
    if not p["inplace"]:
        lw.copy(y, lw.view(a))
    strides = (p["nb3"], p["nb2"], p["nb1"], y.item.itemsize)
    return y.reshaped(b.ne[::-1], strides, p["offset"])


@RULES.rule(Op.SET, operands(PLAIN, PLAIN, out=PLAIN), in_window)
def set_window(lw: NodeLowering, t: Tensor) -> None:
    """Copy `a`, with the view given by `nb1, nb2, nb3, offset` replaced by `b` (SET)."""
    lw.copy(_window(lw, t), lw.view(t.sources[1]))


@RULES.rule(Op.ACC, operands(F32, F32, out=F32), in_window)
def acc(lw: NodeLowering, t: Tensor) -> None:
    """Copy `a`, with `b` added to the view given by `nb1, nb2, nb3, offset` (ACC)."""
    window = _window(lw, t)
    lw.tiled(lambda y, x, b: np.add(x, b, out=y), window, window, lw.view(t.sources[1]))
