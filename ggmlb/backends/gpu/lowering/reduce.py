"""Sums, running sums, sorting and choosing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import FLOATS, I32, has_elements, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import flattened, in_registers, launch, rowwise
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, SortOrder

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target
    from ggmlb.core.tensor import Tensor


def _mems(node: Tensor) -> list[Mem]:
    return [Mem.of(node.sources[0]), Mem.of(node)]


@RULES.rule((Op.SUM_ROWS, Op.MEAN), operands(FLOATS))
def _sum_rows(node: Tensor, target: Target) -> list[Launch]:
    a, d = _mems(node)
    factor = 1.0 if node.op is not Op.MEAN else 1 / a.ne[0] if a.ne[0] else math.nan
    return [in_registers(target, "sum_rows", [a, d], factor)]


@RULES.rule(Op.SUM, operands(FLOATS))
def _sum(node: Tensor, target: Target) -> list[Launch]:
    a, d = _mems(node)
    return [launch("sum", [*flattened(target, [a]), d], (1, 1, 1), target.wg)]


@RULES.rule(Op.COUNT_EQUAL, operands(I32, I32, out=frozenset({DType.I64})))
def _count_equal(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.src
    mems = flattened(target, [Mem.of(a), Mem.of(b)])  # type: ignore[arg-type]
    return [launch("count_equal", [*mems, Mem.of(node)], (1, 1, 1), target.wg)]


@RULES.rule(Op.CUMSUM, operands(FLOATS))
def _cumsum(node: Tensor, target: Target) -> list[Launch]:
    return [rowwise(target, "cumsum", _mems(node))]


@RULES.rule(Op.ARGMAX, operands(FLOATS, out=I32), has_elements)
def _argmax(node: Tensor, target: Target) -> list[Launch]:
    return [rowwise(target, "argmax", _mems(node), over=0)]


@RULES.rule(Op.ARGSORT, operands(FLOATS, out=I32))
def _argsort(node: Tensor, target: Target) -> list[Launch]:
    flags = {"DESCENDING": 1} if node.params["order"] is SortOrder.DESC else {}
    return [rowwise(target, "argsort", _mems(node), over=0, **flags)]


@RULES.rule(Op.TOP_K, operands(FLOATS, out=I32))
def _top_k(node: Tensor, target: Target) -> list[Launch]:
    return [rowwise(target, "top_k", _mems(node), over=0)]
