"""Sums and means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.rules import FLOAT, I32, Types, operands, rule
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Lowering


@rule(Op.SUM, operands(FLOAT))
def sum_all(lw: Lowering, t: Tensor) -> None:
    """The sum of all elements."""
    (a,) = t.sources
    x, y = lw.f32(a), lw.out_f32(t)
    lw.emit(lw.xp.sum, x, keepdims=True, out=y)
    lw.store(t, y)


@rule(Op.SUM_ROWS, operands(FLOAT))
def sum_rows(lw: Lowering, t: Tensor) -> None:
    """The sum of each row."""
    lw.rowwise(lambda y, x: lw.xp.sum(x, axis=-1, keepdims=True, out=y), t, *t.sources)


@rule(Op.MEAN, operands(FLOAT))
def mean(lw: Lowering, t: Tensor) -> None:
    """The mean of each row."""
    xp, (a,) = lw.xp, t.sources

    def kernel(y: Array, x: Array) -> None:
        xp.sum(x, axis=-1, keepdims=True, out=y)
        xp.divide(y, a.ne[0], out=y)

    lw.rowwise(kernel, t, a)


@rule(Op.CUMSUM, operands(FLOAT))
def cumsum(lw: Lowering, t: Tensor) -> None:
    """Each element plus all before it in its row."""
    lw.rowwise(lambda y, x: lw.xp.cumsum(x, axis=-1, out=y), t, *t.sources)


@rule(Op.COUNT_EQUAL, operands(I32, I32, out=Types(frozenset({DType.I64}))))
def count_equal(lw: Lowering, t: Tensor) -> None:
    """How many elements of `a` and `b` are equal."""
    a, b, y = *(lw.array(s) for s in t.sources), lw.array(t)

    def step() -> None:
        y[...] = lw.xp.count_nonzero(a == b)

    lw.emit(step)
