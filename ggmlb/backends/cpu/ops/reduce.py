"""Sums, means, arg max, sorting and top-k."""

from __future__ import annotations

import numpy as np

from ggmlb.backends.common.rules import FLOATS, I32, has_elements, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, SortOrder
from ggmlb.core.tensor import Tensor


@RULES.rule(Op.SUM, operands(FLOATS))
def sum_all(lw: NodeLowering, t: Tensor) -> None:
    """The sum of all elements."""
    y = lw.out_f32(t)
    lw.emit(lambda y, x: np.sum(x, keepdims=True, out=y), y, lw.f32(lw.view(t.sources[0])))
    lw.store(t, y)


@RULES.rule(Op.SUM_ROWS, operands(FLOATS))
def sum_rows(lw: NodeLowering, t: Tensor) -> None:
    """The sum of each row."""
    lw.rowwise(lambda y, x: np.sum(x, axis=-1, keepdims=True, out=y), t, *t.sources)


@RULES.rule(Op.MEAN, operands(FLOATS))
def mean(lw: NodeLowering, t: Tensor) -> None:
    """The mean of each row."""

    def kernel(y: Array, x: Array) -> None:
        np.sum(x, axis=-1, keepdims=True, out=y)
        np.divide(y, x.shape[-1], out=y)

    lw.rowwise(kernel, t, *t.sources)


@RULES.rule(Op.CUMSUM, operands(FLOATS))
def cumsum(lw: NodeLowering, t: Tensor) -> None:
    """Each element plus all before it in its row."""
    lw.rowwise(lambda y, x: np.cumsum(x, axis=-1, out=y), t, *t.sources)


@RULES.rule(Op.COUNT_EQUAL, operands(I32, I32, out=frozenset({DType.I64})))
def count_equal(lw: NodeLowering, t: Tensor) -> None:
    """How many elements of `a` and `b` are equal."""

    def kernel(y: Array, a: Array, b: Array) -> None:
        y[...] = np.count_nonzero(a == b)

    lw.emit(kernel, *(lw.view(x) for x in (t, *t.sources)))


@RULES.rule(Op.ARGMAX, operands(FLOATS, out=I32), has_elements)
def argmax(lw: NodeLowering, t: Tensor) -> None:
    """The index of the largest element of each row; of the first, if there are several."""

    def kernel(y: Array, x: Array) -> None:
        np.copyto(y, np.argmax(x, axis=-1), casting="same_kind")

    x = lw.f32(lw.view(t.sources[0]))
    lw.emit(kernel, lw.view(t)[0, 0, 0], x[0, 0])


@RULES.rule(Op.ARGSORT, operands(FLOATS, out=I32))
def argsort(lw: NodeLowering, t: Tensor) -> None:
    """The indices that sort each row."""
    descending = t.params["order"] == SortOrder.DESC

    def kernel(y: Array, x: Array) -> None:
        order = np.argsort(x, axis=-1)
        np.copyto(y, order[..., ::-1] if descending else order, casting="same_kind")

    lw.emit(kernel, lw.view(t), lw.f32(lw.view(t.sources[0])))


@RULES.rule(Op.TOP_K, operands(FLOATS, out=I32))
def top_k(lw: NodeLowering, t: Tensor) -> None:
    """The indices of the `k` largest elements of each row, in no particular order."""
    (a,) = t.sources
    first = a.ne[0] - t.params["k"]

    def kernel(y: Array, x: Array) -> None:
        order = np.argpartition(x, min(first, x.shape[-1] - 1), axis=-1)
        np.copyto(y, order[..., first:], casting="same_kind")

    lw.emit(kernel, lw.view(t), lw.f32(lw.view(a)))
