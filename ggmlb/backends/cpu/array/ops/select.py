"""Sorting and choosing by value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.rules import FLOAT, I32, has_elements, operands, rule
from ggmlb.core.enums import Op, SortOrder
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.array.lowering import Lowering


@rule(Op.ARGMAX, operands(FLOAT, out=I32), has_elements)
def argmax(lw: Lowering, t: Tensor) -> None:
    """The index of the largest element of each row; of the first, if there are several."""
    (a,) = t.sources
    xp, x, y = lw.xp, lw.f32(a), lw.array(t)[0, 0, 0]
    lw.emit(lambda: xp.copyto(y, xp.argmax(x[0, 0], axis=-1), casting="same_kind"))


@rule(Op.ARGSORT, operands(FLOAT, out=I32))
def argsort(lw: Lowering, t: Tensor) -> None:
    """The indices that sort each row."""
    (a,) = t.sources
    xp, x, y = lw.xp, lw.f32(a), lw.array(t)
    descending = t.params["order"] == SortOrder.DESC

    def step() -> None:
        order = xp.argsort(x, axis=-1)
        xp.copyto(y, order[..., ::-1] if descending else order, casting="same_kind")

    lw.emit(step)


@rule(Op.TOP_K, operands(FLOAT, out=I32))
def top_k(lw: Lowering, t: Tensor) -> None:
    """The indices of the `k` largest elements of each row, in no particular order."""
    (a,) = t.sources
    xp, x, y, first = lw.xp, lw.f32(a), lw.array(t), a.ne[0] - t.params["k"]

    def step() -> None:
        order = xp.argpartition(x, min(first, x.shape[-1] - 1), axis=-1)
        xp.copyto(y, order[..., first:], casting="same_kind")

    lw.emit(step)
