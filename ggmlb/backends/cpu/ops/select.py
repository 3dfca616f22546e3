"""Sorting and choosing by value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, I32, has_elements, operands
from ggmlb.backends.cpu.rules import RULES
from ggmlb.core.enums import Op, SortOrder
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.ARGMAX, operands(FLOATS, out=I32), has_elements)
def argmax(lw: CpuLowering, t: Tensor) -> None:
    """The index of the largest element of each row; of the first, if there are several."""
    (a,) = t.sources
    x, y = lw.f32(a), lw.array(t)[0, 0, 0]
    lw.emit(lambda: np.copyto(y, np.argmax(x[0, 0], axis=-1), casting="same_kind"))


@RULES.rule(Op.ARGSORT, operands(FLOATS, out=I32))
def argsort(lw: CpuLowering, t: Tensor) -> None:
    """The indices that sort each row."""
    (a,) = t.sources
    x, y = lw.f32(a), lw.array(t)
    descending = t.params["order"] == SortOrder.DESC

    def step() -> None:
        order = np.argsort(x, axis=-1)
        np.copyto(y, order[..., ::-1] if descending else order, casting="same_kind")

    lw.emit(step)


@RULES.rule(Op.TOP_K, operands(FLOATS, out=I32))
def top_k(lw: CpuLowering, t: Tensor) -> None:
    """The indices of the `k` largest elements of each row, in no particular order."""
    (a,) = t.sources
    x, y, first = lw.f32(a), lw.array(t), a.ne[0] - t.params["k"]

    def step() -> None:
        order = np.argpartition(x, min(first, x.shape[-1] - 1), axis=-1)
        np.copyto(y, order[..., first:], casting="same_kind")

    lw.emit(step)
