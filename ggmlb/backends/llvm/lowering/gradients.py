"""Training: sums, repeats, gradients of norms and soft max, losses, and steps of optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.backends.common.rules import F32, FLOATS, I32, RESULT, has_elements, in_rows, in_window, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm.kernels import convert, elementwise, gradients
from ggmlb.backends.llvm.lowering.elementwise import repeats_one
from ggmlb.backends.llvm.lowering.rules import RULES, name
from ggmlb.backends.llvm.lowering.walks import walk
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

_CHEAP, _DEAR = 0.1, 0.6
"""Work of an element on one thread [ns]."""

LEAST_COLUMNS = 64
"""Columns of a chunk, at least."""


@RULES.rule((Op.SUM_ROWS, Op.MEAN), operands(FLOATS), in_rows(0))
def _sum_rows(node: Tensor, steps: Steps) -> None:
    a = node.operand(0)
    factor = 1.0 / a.ne[0] if node.op is Op.MEAN and a.ne[0] else 1.0
    _row_sums(a, node, factor, steps)


def _row_sums(a: Tensor | Mem, y: Tensor | Mem, factor: float, steps: Steps) -> None:
    args, n = walk(a.ne, [y, a], steps, _CHEAP, join=False, cut=False)
    steps.emit(gradients.row_sums, (_name(y), _name(a)), (factor, *args), n)


def _name(mem: Tensor | Mem) -> str:
    return mem.dtype.name.lower()


def _row(steps: Steps, n: int, address: int | None = None) -> Mem:
    """A row of float32, in scratch memory unless it lies somewhere."""
    at = steps.scratch(4 * n) if address is None else address
    return Mem(None, at, DType.F32, (n, 1, 1, 1), (4, 4 * n, 4 * n, 4 * n))


def _by_row(ne: tuple[int, ...], row: Mem) -> Mem:
    """An element of a row for each row of a tensor."""
    n1, n2 = ne[1:3]
    return row.window((1, *ne[1:]), (4, 4, 4 * n1, 4 * n1 * n2))  # type: ignore[arg-type]


@RULES.rule(Op.SUM, operands(FLOATS), in_rows(0))
def _sum(node: Tensor, steps: Steps) -> None:
    a = node.operand(0)
    sums = _row(steps, 0 if a.is_empty else a.n_rows)
    if not a.is_empty:
        _row_sums(a, _by_row(a.ne, sums), 1.0, steps)
    _row_sums(sums, node, 1.0, steps)


@RULES.rule(Op.REPEAT, operands(FLOATS), in_rows(0, RESULT), repeats_one(0))
def _repeat(node: Tensor, steps: Steps) -> None:
    a = node.operand(0)
    one = a.ne[0] == 1 and node.ne[0] > 1
    args, n = walk(node.ne, [node, a], steps, _CHEAP)
    steps.emit(gradients.repeat, (name(node), name(a), one), args, n)


def _whole_rows(node: Tensor) -> str | None:
    if node.ne[0] != node.operand(0).ne[0]:
        return "elements of rows were repeated: only whole rows are summed"
    return None


@RULES.rule(Op.REPEAT_BACK, operands(FLOATS), in_rows(0, RESULT), _whole_rows)
def _repeat_back(node: Tensor, steps: Steps) -> None:
    a = node.operand(0)
    times = [n // m if m else 0 for n, m in zip(a.ne[1:], node.ne[1:], strict=True)]
    chunks = steps.chunks(a.n_elements * _CHEAP)
    groups = min(chunks, max(node.n_rows, 1))
    parts = max(1, min(-(-chunks // groups), node.ne[0] // LEAST_COLUMNS))
    args = (
        steps.address(a), *a.nb[1:], *times, *node.ne[1:],
        *node.ne, parts, steps.address(node), *node.nb[1:],
    )  # fmt: skip
    steps.emit(gradients.repeat_back, (name(node), name(a)), args, groups * parts)


@RULES.rule(Op.GET_ROWS_BACK, operands(FLOATS, I32, out=F32), in_rows(0, RESULT))
def _get_rows_back(node: Tensor, steps: Steps) -> None:
    a, ids = node.operand(0), node.operand(1)
    work = (node.n_elements + a.n_elements) * _CHEAP
    args = (
        steps.address(a), a.nb[1], steps.address(ids), ids.nb[0], ids.ne[0], steps.address(node), node.nb[1],
        node.ne[0], node.ne[1], *steps.report,
    )  # fmt: skip
    chunks = steps.chunks(work, max(1, node.ne[0] // LEAST_COLUMNS))
    steps.emit(gradients.get_rows_back, (name(a),), args, chunks)


@RULES.rule(Op.RMS_NORM_BACK, operands(FLOATS, FLOATS), in_rows(0, 1, RESULT))
def _rms_norm_back(node: Tensor, steps: Steps) -> None:
    _of_rows(gradients.rms_norm_back, float(node.params["eps"]), node, steps)


@RULES.rule(Op.SOFT_MAX_BACK, operands(FLOATS, FLOATS), in_rows(0, 1, RESULT))
def _soft_max_back(node: Tensor, steps: Steps) -> None:
    _of_rows(gradients.soft_max_back, float(node.params["scale"]), node, steps)


def _of_rows(kernel: Any, number: float, node: Tensor, steps: Steps) -> None:
    a, b = node.operand(0), node.operand(1)
    args, n = walk(node.ne, [node, a, b], steps, 2 * _CHEAP, join=False, cut=False)
    steps.emit(kernel, ((name(node), name(a), name(b)),), (number, *args), n)


@RULES.rule(Op.CROSS_ENTROPY_LOSS, operands(FLOATS, FLOATS), has_elements, in_rows(0, 1))
def _cross_entropy_loss(node: Tensor, steps: Steps) -> None:
    a, b = node.operand(0), node.operand(1)
    losses = _row(steps, a.n_rows)
    args, n = walk(a.ne, [_by_row(a.ne, losses), a, b], steps, _DEAR, join=False, cut=False)
    steps.emit(gradients.cross_entropy, (("f32", name(a), name(b)),), args, n)
    _row_sums(losses, node, -1.0 / a.n_rows, steps)


@RULES.rule(Op.CROSS_ENTROPY_LOSS_BACK, operands(FLOATS, FLOATS, FLOATS, out=F32), in_rows(1, 2, RESULT))
def _cross_entropy_loss_back(node: Tensor, steps: Steps) -> None:
    grad, a, b = (node.operand(i) for i in range(3))
    args, n = walk(node.ne, [node, a, b], steps, _DEAR, join=False, cut=False)
    front = (1.0 / max(a.n_rows, 1), steps.address(grad))
    params = (("f32", name(a), name(b)), name(grad))
    steps.emit(gradients.cross_entropy_back, params, (*front, *args), n)


@RULES.rule(Op.ACC, operands(F32, F32, out=F32), in_rows(0, 1, RESULT), in_window)
def _acc(node: Tensor, steps: Steps) -> None:
    a, b, p = node.operand(0), node.operand(1), node.params
    if not p["inplace"]:
        args, n = walk(node.ne, [node, a], steps, _CHEAP)
        steps.emit(convert.copy, ("f32", "f32"), args, n)
    if b.is_empty:
        return
    window = steps.mem(node).window(b.ne, (4, p["nb1"], p["nb2"], p["nb3"]), p["offset"])
    args, n = walk(b.ne, [window, window, b], steps, _CHEAP)
    steps.emit(elementwise.binary, ("add", False, ("f32", "f32", "f32"), False), args, n)


@RULES.rule(Op.OPT_STEP_ADAMW, operands(F32, FLOATS, F32, F32, F32, out=F32), in_rows(0, 1, 2, 3, RESULT))
def _adamw(node: Tensor, steps: Steps) -> None:
    w, g, m, v, numbers = (node.operand(i) for i in range(5))
    args, n = walk(node.ne, [w, g, m, v], steps, 4 * _CHEAP)
    steps.emit(gradients.adamw, (name(g),), (steps.address(numbers), *args), n)


@RULES.rule(Op.OPT_STEP_SGD, operands(F32, FLOATS, F32, out=F32), in_rows(0, 1, RESULT))
def _sgd(node: Tensor, steps: Steps) -> None:
    w, g, numbers = (node.operand(i) for i in range(3))
    args, n = walk(node.ne, [w, g], steps, 2 * _CHEAP)
    steps.emit(gradients.sgd, (name(g),), (steps.address(numbers), *args), n)
