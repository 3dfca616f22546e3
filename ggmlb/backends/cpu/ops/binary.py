"""Arithmetic of two operands; the second repeats over the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import operands
from ggmlb.backends.cpu.rules import RULES, STORED, VALUES
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


def _whole_rows(node: Tensor) -> str | None:
    a, b = node.sources
    if b.ne[0] == node.ne[0] or not (a.dtype.is_quantized or b.dtype.is_quantized or node.dtype.is_quantized):
        return None
    return "blocks and rows of src1 that repeat do not go together"


_UFUNCS = {Op.ADD: np.add, Op.ADD1: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply, Op.DIV: np.divide}


@RULES.rule(_UFUNCS, operands(VALUES, VALUES, out=STORED & VALUES), _whole_rows)
def binary(lw: CpuLowering, t: Tensor) -> None:
    """`a + b`, `a - b`, `a b` or `a / b`."""
    fn = _UFUNCS[t.op]

    def kernel(y: Array, a: Array, b: Array) -> None:
        fn(a, b, out=y)

    lw.elementwise(kernel, t, *t.sources)
