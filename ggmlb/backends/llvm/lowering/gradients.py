"""Lowering of training ops: sums, repeats, gradients of norms and soft max, losses, optimizer steps."""

from __future__ import annotations

from typing import Any

from ggmlb.backends.common.rules import F32, FLOATS, I32, RESULT, has_elements, in_rows, in_window, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm.kernels import gradients
from ggmlb.backends.llvm.kernels.convert import repeat_each
from ggmlb.backends.llvm.lowering.context import RULES, LoweringContext, name
from ggmlb.backends.llvm.lowering.elementwise import elementwise, repeats_one
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

_CHEAP, _DEAR = 0.1, 0.6
"""Time of an element on one thread [ns]."""

MOST_TIMES = 8
"""Largest number of repeats of single elements in a row for which the result is shuffled in registers."""

LEAST_COLUMNS = 64
"""Least number of columns in a chunk."""


@RULES.rule((Op.SUM_ROWS, Op.MEAN), operands(FLOATS), in_rows(0))
def _sum_rows(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    factor = 1.0 / a.ne[0] if node.op is Op.MEAN and a.ne[0] else 1.0
    _row_sums(a, node, factor, ctx)


def _row_sums(a: Tensor | Mem, y: Tensor | Mem, factor: float, ctx: LoweringContext) -> None:
    ctx.launch_rows(gradients.row_sums, (name(y), name(a)), [factor], a.ne, [y, a], _CHEAP)


def _row(ctx: LoweringContext, n: int, address: int | None = None) -> Mem:
    """A row of float32 at an address, or in scratch memory."""
    at = ctx.scratch(4 * n) if address is None else address
    return Mem(None, at, DType.F32, (n, 1, 1, 1), (4, 4 * n, 4 * n, 4 * n))


def _by_row(ne: tuple[int, ...], row: Mem) -> Mem:
    """View a row as a column: one element per row of a tensor with extents `ne`."""
    n1, n2 = ne[1:3]
    return row.window((1, *ne[1:]), (4, 4, 4 * n1, 4 * n1 * n2))  # type: ignore[arg-type]


@RULES.rule(Op.SUM, operands(FLOATS), in_rows(0))
def _sum(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    sums = _row(ctx, 0 if a.is_empty else a.n_rows)
    if not a.is_empty:
        _row_sums(a, _by_row(a.ne, sums), 1.0, ctx)
    _row_sums(sums, node, 1.0, ctx)


@RULES.rule(Op.REPEAT, operands(FLOATS), in_rows(0, RESULT), repeats_one(0))
def _repeat(node: Tensor, ctx: LoweringContext) -> None:
    a, times = node.operand(0), node.ne[0]
    one = a.ne[0] == 1 < times
    if one and times <= MOST_TIMES and a.ne[1] == node.ne[1] and a.is_contiguous() and node.is_contiguous():
        x, y = (ctx.mem(t).window((*t.ne[1:], 1), (*t.nb[1:], 0)) for t in (a, node))
        params = (name(node), name(a), times)
        ctx.launch_rows(repeat_each, params, (), y.ne, [y, x], _CHEAP * times, cut=True)
    else:
        elementwise("copy", (), [node, a], _CHEAP, ctx, one)


def _whole_rows(node: Tensor) -> str | None:
    if node.ne[0] != node.operand(0).ne[0]:
        return "elements of rows were repeated: only whole rows are summed"
    return None


@RULES.rule(Op.REPEAT_BACK, operands(FLOATS), in_rows(0, RESULT), _whole_rows)
def _repeat_back(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    times = [n // m if m else 0 for n, m in zip(a.ne[1:], node.ne[1:], strict=True)]
    chunks = ctx.chunks(a.n_elements * _CHEAP)
    groups = min(chunks, max(node.n_rows, 1))
    parts = max(1, min(-(-chunks // groups), node.ne[0] // LEAST_COLUMNS))
    args = (
        ctx.address(a), *a.nb[1:], *times, *node.ne[1:],
        *node.ne, parts, ctx.address(node), *node.nb[1:],
    )  # fmt: skip
    ctx.launch(gradients.repeat_back, (name(node), name(a)), args, groups * parts)


@RULES.rule(Op.GET_ROWS_BACK, operands(FLOATS, I32, out=F32), in_rows(0, RESULT))
def _get_rows_back(node: Tensor, ctx: LoweringContext) -> None:
    a, ids = node.operand(0), node.operand(1)
    work = (node.n_elements + a.n_elements) * _CHEAP
    args = (
        ctx.address(a), a.nb[1], ctx.address(ids), ids.nb[0], ids.ne[0], ctx.address(node), node.nb[1],
        node.ne[0], node.ne[1], *ctx.report,
    )  # fmt: skip
    chunks = ctx.chunks(work, max(1, node.ne[0] // LEAST_COLUMNS))
    ctx.launch(gradients.get_rows_back, (name(a),), args, chunks)


@RULES.rule(Op.RMS_NORM_BACK, operands(FLOATS, FLOATS), in_rows(0, 1, RESULT))
def _rms_norm_back(node: Tensor, ctx: LoweringContext) -> None:
    _of_rows(gradients.rms_norm_back, float(node.params["eps"]), node, ctx)


@RULES.rule(Op.SOFT_MAX_BACK, operands(FLOATS, FLOATS), in_rows(0, 1, RESULT))
def _soft_max_back(node: Tensor, ctx: LoweringContext) -> None:
    _of_rows(gradients.soft_max_back, float(node.params["scale"]), node, ctx)


def _of_rows(kernel: Any, number: float, node: Tensor, ctx: LoweringContext) -> None:
    a, b = node.operand(0), node.operand(1)
    params = ((name(node), name(a), name(b)),)
    ctx.launch_rows(kernel, params, [number], node.ne, [node, a, b], 2 * _CHEAP)


@RULES.rule(Op.CROSS_ENTROPY_LOSS, operands(FLOATS, FLOATS), has_elements, in_rows(0, 1))
def _cross_entropy_loss(node: Tensor, ctx: LoweringContext) -> None:
    a, b = node.operand(0), node.operand(1)
    losses = _row(ctx, a.n_rows)
    params = (("f32", name(a), name(b)),)
    ctx.launch_rows(gradients.cross_entropy, params, (), a.ne, [_by_row(a.ne, losses), a, b], _DEAR)
    _row_sums(losses, node, -1.0 / a.n_rows, ctx)


@RULES.rule(Op.CROSS_ENTROPY_LOSS_BACK, operands(FLOATS, FLOATS, FLOATS, out=F32), in_rows(1, 2, RESULT))
def _cross_entropy_loss_back(node: Tensor, ctx: LoweringContext) -> None:
    grad, a, b = (node.operand(i) for i in range(3))
    args = (1.0 / max(a.n_rows, 1), ctx.address(grad))
    params = (("f32", name(a), name(b)), name(grad))
    ctx.launch_rows(gradients.cross_entropy_back, params, args, node.ne, [node, a, b], _DEAR)


@RULES.rule(Op.ACC, operands(F32, F32, out=F32), in_rows(0, 1, RESULT), in_window)
def _acc(node: Tensor, ctx: LoweringContext) -> None:
    a, b, p = node.operand(0), node.operand(1), node.params
    if not p["inplace"]:
        elementwise("copy", (), [node, a], _CHEAP, ctx)
    if b.is_empty:
        return
    window = ctx.mem(node).window(b.ne, (4, p["nb1"], p["nb2"], p["nb3"]), p["offset"])
    elementwise("add", (), [window, window, b], _CHEAP, ctx)


@RULES.rule(Op.OPT_STEP_ADAMW, operands(F32, FLOATS, F32, F32, F32, out=F32), in_rows(0, 1, 2, 3, RESULT))
def _adamw(node: Tensor, ctx: LoweringContext) -> None:
    w, g, m, v, numbers = (node.operand(i) for i in range(5))
    args, work = [ctx.address(numbers)], 4 * _CHEAP
    ctx.launch_rows(gradients.adamw, (name(g),), args, node.ne, [w, g, m, v], work, join=True, cut=True)


@RULES.rule(Op.OPT_STEP_SGD, operands(F32, FLOATS, F32, out=F32), in_rows(0, 1, RESULT))
def _sgd(node: Tensor, ctx: LoweringContext) -> None:
    w, g, numbers = (node.operand(i) for i in range(3))
    args, work = [ctx.address(numbers)], 2 * _CHEAP
    ctx.launch_rows(gradients.sgd, (name(g),), args, node.ne, [w, g], work, join=True, cut=True)
