"""Triangular systems of equations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import F32, operands
from ggmlb.backends.cpu.rules import RULES
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.SOLVE_TRI, operands(F32, F32, out=F32))
def solve_tri(lw: CpuLowering, t: Tensor) -> None:
    """`x` of `a x = b`, by forward substitution; `a` is lower triangular, what is above is not read."""
    a, b, x = *(lw.array(s) for s in t.sources), lw.array(t)
    n = t.ne[1]
    known = lw.scratch((*x.shape[:2], 1, x.shape[3]))

    def step() -> None:
        for i in range(n):
            row = x[:, :, i : i + 1]
            np.matmul(a[:, :, i : i + 1, :i], x[:, :, :i], out=known)
            np.subtract(b[:, :, i : i + 1], known, out=row)
            np.divide(row, a[:, :, i : i + 1, i : i + 1], out=row)

    lw.emit(step)
