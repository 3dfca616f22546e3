"""Lowering of arg max, sorting and top-k."""

from __future__ import annotations

from ggmlb.backends.common.rules import FLOATS, I32, RESULT, has_elements, in_rows, operands
from ggmlb.backends.llvm.kernels import select
from ggmlb.backends.llvm.lowering.context import RULES, LoweringContext, name
from ggmlb.core.enums import Op, SortOrder
from ggmlb.core.tensor import Tensor

_READ, _EXCHANGE = 0.15, 0.1
"""Time of an element on one thread, and of an element in a pass of the sort [ns]."""

LEAST_SORTED = 64
"""Least number of elements sorted at a time, of rows of which only the first are asked for."""


@RULES.rule(Op.ARGMAX, operands(FLOATS, out=I32), has_elements, in_rows(0))
def _argmax(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    to = ctx.mem(node).window((1, *a.ne[1:]), (4, 4, 4 * a.ne[1], 4 * a.ne[1] * a.ne[2]))
    ctx.launch_rows(select.argmax, (name(a),), (), a.ne, [to, a], _READ)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is `n` or more."""
    return 1 << (n - 1).bit_length()


@RULES.rule((Op.ARGSORT, Op.TOP_K), operands(FLOATS, out=I32), in_rows(0, RESULT))
def _sort(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    (n, count), lanes = (a.ne[0], node.ne[0]), select.sort_lanes(ctx.level)
    descending = node.op is Op.TOP_K or node.params["order"] == SortOrder.DESC
    size = min(_power_of_two(max(count, lanes, LEAST_SORTED)), _power_of_two(max(n, lanes)))
    log, whole = size.bit_length() - 1, size >= n
    nbytes = 8 * size * (1 if whole else 2)
    args = (count, size, log, ctx.scratch(nbytes * ctx.n_threads), nbytes)
    params = (name(a), descending, whole)
    ctx.launch_rows(select.sort, params, args, a.ne, [node, a], _EXCHANGE * log * log)
