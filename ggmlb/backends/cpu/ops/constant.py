"""Tensors that follow from numbers or from a shape."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op, TriType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.ARANGE, operands(out=F32))
def arange(lw: CpuLowering, t: Tensor) -> None:
    """`start + i step`."""
    p, y = t.params, lw.array(t)
    count = np.arange(t.ne[0], dtype=np.float32)

    def step() -> None:
        np.multiply(count, p["step"], out=y)
        np.add(y, p["start"], out=y)

    lw.emit(step)


@RULES.rule(Op.FILL, operands(FLOATS))
def fill(lw: CpuLowering, t: Tensor) -> None:
    """The same value everywhere."""
    lw.tiled(lambda y: y.fill(t.params["value"]), View.of(t))


@RULES.rule(Op.TRI, operands(FLOATS))
def tri(lw: CpuLowering, t: Tensor) -> None:
    """`a` on one side of the diagonal, 0 on the other; the diagonal goes with either."""
    kind = t.params["type"]
    column, row = np.arange(t.ne[0]), np.arange(t.ne[1])[:, None]
    outside = {
        TriType.LOWER: column >= row,
        TriType.LOWER_DIAG: column > row,
        TriType.UPPER: column <= row,
        TriType.UPPER_DIAG: column < row,
    }[kind]

    def kernel(y: Array, x: Array) -> None:
        np.copyto(y, x)
        np.copyto(y, 0, where=outside)

    lw.tiled(kernel, View.of(t), View.of(t.sources[0]), inner=2)


@RULES.rule(Op.DIAG, operands(FLOATS))
def diag(lw: CpuLowering, t: Tensor) -> None:
    """Rows on the diagonals of matrices of zeros."""
    (a,) = t.sources
    y, x = View.of(t), View.of(a)
    lw.emit(lw.bind(y).fill, 0)
    shape = (*y.shape[:2], y.shape[3])
    diagonal = y.reshaped(shape, (*y.strides[:2], y.strides[2] + y.strides[3]))
    lw.copy(diagonal, x.reshaped(shape, (*x.strides[:2], x.strides[3])))


@RULES.rule(Op.TIMESTEP_EMBEDDING, operands(FLOATS, out=F32))
def timestep_embedding(lw: CpuLowering, t: Tensor) -> None:
    """`[cos(x f) | sin(x f)]` at frequencies `f[j] = max_period ** (-j / half)`."""
    half = t.params["dim"] // 2
    frequency = np.exp(
        np.arange(half, dtype=np.float32) * np.float32(-log(t.params["max_period"]) / max(half, 1))
    )
    x, y = lw.f32(t.sources[0])[0, 0, 0, :, None], lw.array(t)[0, 0]
    angle = lw.scratch((t.ne[1], half))

    def step() -> None:
        np.multiply(x, frequency, out=angle)
        np.cos(angle, out=y[:, :half])
        np.sin(angle, out=y[:, half : 2 * half])
        y[:, 2 * half :] = 0

    lw.emit(step)
