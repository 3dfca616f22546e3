"""Arithmetic of two operands; the second repeats over the first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.rules import VALUE, operands, rule
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.casts import Casts
    from ggmlb.backends.cpu.array.lowering import Lowering


def _whole_rows(node: Tensor, casts: Casts) -> str | None:
    a, b = node.sources
    if b.ne[0] == node.ne[0] or not (a.dtype.is_quantized or b.dtype.is_quantized or node.dtype.is_quantized):
        return None
    return "blocks and rows of src1 that repeat do not go together"


def _binary(ufunc: str, lw: Lowering, t: Tensor) -> None:
    fn = getattr(lw.xp, ufunc)

    def kernel(y: Array, a: Array, b: Array) -> None:
        fn(a, b, out=y)

    lw.elementwise(kernel, t, *t.sources)


for _op, _ufunc in (
    (Op.ADD, "add"),
    (Op.ADD1, "add"),
    (Op.SUB, "subtract"),
    (Op.MUL, "multiply"),
    (Op.DIV, "divide"),
):
    rule(_op, operands(VALUE, VALUE, out=VALUE), _whole_rows)(partial(_binary, _ufunc))
