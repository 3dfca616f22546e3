"""Generated tensors: arange, fill, triangular and diagonal matrices, timestep embeddings."""

from __future__ import annotations

from math import log

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.core.enums import Op, TriType
from ggmlb.core.tensor import Tensor


@RULES.rule(Op.ARANGE, operands(out=F32))
def arange(lw: NodeLowering, t: Tensor) -> None:
    """`start + i step`."""
    start, step = t.params["start"], t.params["step"]

    def kernel(y: Array, count: Array) -> None:
        np.multiply(count, step, out=y)
        np.add(y, start, out=y)

    lw.emit(kernel, lw.view(t), np.arange(t.ne[0], dtype=np.float32))


@RULES.rule(Op.FILL, operands(FLOATS))
def fill(lw: NodeLowering, t: Tensor) -> None:
    """All elements set to the node's constant."""
    value = t.params["value"]
    lw.tiled(lambda y: y.fill(value), lw.view(t))


@RULES.rule(Op.TRI, operands(FLOATS))
def tri(lw: NodeLowering, t: Tensor) -> None:
    """The lower or upper triangle of `a`, with or without the diagonal; 0 elsewhere."""
    is_outside = {
        TriType.LOWER: np.greater_equal,
        TriType.LOWER_DIAG: np.greater,
        TriType.UPPER: np.less_equal,
        TriType.UPPER_DIAG: np.less,
    }[t.params["type"]]

    def kernel(y: Array, x: Array) -> None:
        n_rows, n = y.shape[-2:]
        np.copyto(y, x)
        np.copyto(y, 0, where=is_outside(np.arange(n), np.arange(n_rows)[:, None]))

    lw.tiled(kernel, lw.view(t), lw.view(t.sources[0]), inner=2)


@RULES.rule(Op.DIAG, operands(FLOATS))
def diag(lw: NodeLowering, t: Tensor) -> None:
    """Diagonal matrices of the rows of `a`."""
    (a,) = t.sources
    y, x = lw.view(t), lw.view(a)
    lw.emit(np.ndarray.fill, y, 0)
    shape = (*y.shape[:2], y.shape[3])
    diagonal = y.reshaped(shape, (*y.strides[:2], y.strides[2] + y.strides[3]))
    lw.copy(diagonal, x.reshaped(shape, (*x.strides[:2], x.strides[3])))


@RULES.rule(Op.TIMESTEP_EMBEDDING, operands(FLOATS, out=F32))
def timestep_embedding(lw: NodeLowering, t: Tensor) -> None:
    """`[cos(x f) | sin(x f)]` at frequencies `f[j] = max_period ** (-j / half)`."""
    half = t.params["dim"] // 2
    frequency = np.exp(
        np.arange(half, dtype=np.float32) * np.float32(-log(t.params["max_period"]) / max(half, 1))
    )
    x, angle = lw.f32(lw.view(t.sources[0])), lw.scratch((t.ne[1], half))

    def kernel(y: Array, x: Array, frequency: Array, angle: Array) -> None:
        np.multiply(x, frequency, out=angle)
        np.cos(angle, out=y[:, :half])
        np.sin(angle, out=y[:, half : 2 * half])
        y[:, 2 * half :] = 0

    lw.emit(kernel, lw.view(t)[0, 0], x[0, 0, 0, :, None], frequency, angle)
