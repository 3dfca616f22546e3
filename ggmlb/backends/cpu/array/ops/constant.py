"""Tensors that follow from numbers or from a shape."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.cpu.array.rules import F32, FLOAT, operands, rule
from ggmlb.backends.cpu.array.views import View
from ggmlb.core.enums import Op, TriType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Lowering


@rule(Op.ARANGE, operands(out=F32))
def arange(lw: Lowering, t: Tensor) -> None:
    """`start + i step`."""
    xp, p, y = lw.xp, t.params, lw.array(t)
    count = xp.arange(t.ne[0], dtype=np.float32)

    def step() -> None:
        xp.multiply(count, p["step"], out=y)
        xp.add(y, p["start"], out=y)

    lw.emit(step)


@rule(Op.FILL, operands(FLOAT))
def fill(lw: Lowering, t: Tensor) -> None:
    """The same value everywhere."""
    lw.tiled(lambda y: y.fill(t.params["value"]), View.of(t))


@rule(Op.TRI, operands(FLOAT))
def tri(lw: Lowering, t: Tensor) -> None:
    """`a` on one side of the diagonal, 0 on the other; the diagonal goes with either."""
    xp, kind = lw.xp, t.params["type"]
    column, row = xp.arange(t.ne[0]), xp.arange(t.ne[1])[:, None]
    outside = {
        TriType.LOWER: column >= row,
        TriType.LOWER_DIAG: column > row,
        TriType.UPPER: column <= row,
        TriType.UPPER_DIAG: column < row,
    }[kind]

    def kernel(y: Array, x: Array) -> None:
        xp.copyto(y, x)
        xp.copyto(y, 0, where=outside)

    lw.tiled(kernel, View.of(t), View.of(t.sources[0]), inner=2)


@rule(Op.DIAG, operands(FLOAT))
def diag(lw: Lowering, t: Tensor) -> None:
    """Rows on the diagonals of matrices of zeros."""
    (a,) = t.sources
    y, x = View.of(t), View.of(a)
    lw.emit(lw.bind(y).fill, 0)
    shape = (*y.shape[:2], y.shape[3])
    diagonal = y.reshaped(shape, (*y.strides[:2], y.strides[2] + y.strides[3]))
    lw.copy(diagonal, x.reshaped(shape, (*x.strides[:2], x.strides[3])))


@rule(Op.TIMESTEP_EMBEDDING, operands(FLOAT, out=F32))
def timestep_embedding(lw: Lowering, t: Tensor) -> None:
    """`[cos(x f) | sin(x f)]` at frequencies `f[j] = max_period ** (-j / half)`."""
    xp, half = lw.xp, t.params["dim"] // 2
    frequency = xp.exp(
        xp.arange(half, dtype=np.float32) * np.float32(-log(t.params["max_period"]) / max(half, 1))
    )
    x, y = lw.f32(t.sources[0])[0, 0, 0, :, None], lw.array(t)[0, 0]
    angle = lw.scratch((t.ne[1], half))

    def step() -> None:
        xp.multiply(x, frequency, out=angle)
        xp.cos(angle, out=y[:, :half])
        xp.sin(angle, out=y[:, half : 2 * half])
        y[:, 2 * half :] = 0

    lw.emit(step)
