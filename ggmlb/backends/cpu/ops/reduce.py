"""Sums and means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, I32, operands
from ggmlb.backends.cpu.rules import RULES
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.SUM, operands(FLOATS))
def sum_all(lw: CpuLowering, t: Tensor) -> None:
    """The sum of all elements."""
    (a,) = t.sources
    x, y = lw.f32(a), lw.out_f32(t)
    lw.emit(np.sum, x, keepdims=True, out=y)
    lw.store(t, y)


@RULES.rule(Op.SUM_ROWS, operands(FLOATS))
def sum_rows(lw: CpuLowering, t: Tensor) -> None:
    """The sum of each row."""
    lw.rowwise(lambda y, x: np.sum(x, axis=-1, keepdims=True, out=y), t, *t.sources)


@RULES.rule(Op.MEAN, operands(FLOATS))
def mean(lw: CpuLowering, t: Tensor) -> None:
    """The mean of each row."""
    (a,) = t.sources

    def kernel(y: Array, x: Array) -> None:
        np.sum(x, axis=-1, keepdims=True, out=y)
        np.divide(y, a.ne[0], out=y)

    lw.rowwise(kernel, t, a)


@RULES.rule(Op.CUMSUM, operands(FLOATS))
def cumsum(lw: CpuLowering, t: Tensor) -> None:
    """Each element plus all before it in its row."""
    lw.rowwise(lambda y, x: np.cumsum(x, axis=-1, out=y), t, *t.sources)


@RULES.rule(Op.COUNT_EQUAL, operands(I32, I32, out=frozenset({DType.I64})))
def count_equal(lw: CpuLowering, t: Tensor) -> None:
    """How many elements of `a` and `b` are equal."""
    a, b, y = *(lw.array(s) for s in t.sources), lw.array(t)

    def step() -> None:
        y[...] = np.count_nonzero(a == b)

    lw.emit(step)
