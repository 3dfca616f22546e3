"""Sums, running sums, sorting and choosing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggmlb.backends.gpu.launch import Mem, flattened, in_registers, launch, rowwise
from ggmlb.backends.gpu.lowering.base import Rule, no_elements, not_floats
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, SortOrder

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target
    from ggmlb.core.tensor import Tensor


def _floats(node: Tensor) -> str | None:
    return not_floats(*node.src, node)


def _of_floats(node: Tensor) -> str | None:
    return not_floats(*node.src)


def _argmax_declines(node: Tensor) -> str | None:
    return not_floats(*node.src) or no_elements(node)


def _mems(node: Tensor) -> list[Mem]:
    return [Mem.of(node.sources[0]), Mem.of(node)]


def _sum_rows(node: Tensor, target: Target) -> list[Launch]:
    a, d = _mems(node)
    factor = 1.0 if node.op is not Op.MEAN else 1 / a.ne[0] if a.ne[0] else math.nan
    return [in_registers(target, "sum_rows", [a, d], factor)]


def _sum(node: Tensor, target: Target) -> list[Launch]:
    a, d = _mems(node)
    return [launch("sum", [*flattened(target, [a]), d], (1, 1, 1), target.wg)]


def _count_declines(node: Tensor) -> str | None:
    a, b = node.sources
    return None if a.dtype is b.dtype is DType.I32 else "only i32 elements are counted"


def _count_equal(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.src
    mems = flattened(target, [Mem.of(a), Mem.of(b)])  # type: ignore[arg-type]
    return [launch("count_equal", [*mems, Mem.of(node)], (1, 1, 1), target.wg)]


def _cumsum(node: Tensor, target: Target) -> list[Launch]:
    return [rowwise(target, "cumsum", _mems(node))]


def _argmax(node: Tensor, target: Target) -> list[Launch]:
    return [rowwise(target, "argmax", _mems(node), over=0)]


def _argsort(node: Tensor, target: Target) -> list[Launch]:
    flags = {"DESCENDING": 1} if node.params["order"] is SortOrder.DESC else {}
    return [rowwise(target, "argsort", _mems(node), over=0, **flags)]


def _top_k(node: Tensor, target: Target) -> list[Launch]:
    return [rowwise(target, "top_k", _mems(node), over=0)]


RULES = {
    **dict.fromkeys((Op.SUM_ROWS, Op.MEAN), Rule(_floats, _sum_rows)),
    Op.SUM: Rule(_floats, _sum),
    Op.COUNT_EQUAL: Rule(_count_declines, _count_equal),
    Op.CUMSUM: Rule(_floats, _cumsum),
    Op.ARGMAX: Rule(_argmax_declines, _argmax),
    Op.ARGSORT: Rule(_of_floats, _argsort),
    Op.TOP_K: Rule(_of_floats, _top_k),
}
