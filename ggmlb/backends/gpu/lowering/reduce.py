"""Sums, cumulative sums, sorting and top-k; losses, and optimiser steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import F32, FLOATS, I32, has_elements, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import (
    MIN_GROUP_WORK,
    Launch,
    Scratch,
    Target,
    elementwise,
    flattened,
    in_registers,
    launch,
    row_length,
    rowwise,
)
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, SortOrder

if TYPE_CHECKING:
    from ggmlb.core.tensor import Tensor


def _mems(node: Tensor) -> list[Mem]:
    return [Mem.of(node.sources[0]), Mem.of(node)]


@RULES.rule((Op.SUM_ROWS, Op.MEAN), operands(FLOATS))
def _sum_rows(node: Tensor, target: Target) -> list[Launch]:
    a, d = _mems(node)
    factor = 1.0 if node.op is not Op.MEAN else 1 / a.ne[0] if a.ne[0] else math.nan
    return [in_registers(target, "sum_rows", [a, d], factor)]


def in_two_passes(target: Target, name: str, mems: list[Mem], d: Mem, *, cut: bool = False) -> list[Launch]:
    """Return the launches that reduce all rows (if `cut`, in parts) to a number per work-group, then to one.

    The number of groups depends on the shape and the device only, so that every run gives the same bits.

    Args:
        target: Parameters of the work split.
        name: A kernel whose groups write a result each.
        mems: Its operands.
        d: Where the result goes.
        cut: Whether a single row may be cut into several.
    """
    ne = mems[0].ne
    n_rows, rest = ne[1] * ne[2] * ne[3], 0
    stretches = [mems]
    if cut and n_rows == 1 and ne[0] > MIN_GROUP_WORK:
        n_rows, rest = divmod(ne[0], MIN_GROUP_WORK)
        stretches = [[_rows(m, 0, n_rows, MIN_GROUP_WORK) for m in mems]]
        stretches += [[_rows(m, ne[0] - rest, 1, rest) for m in mems]] if rest else []
    n = min(n_rows, math.prod(ne) // MIN_GROUP_WORK, 8 * target.n_units)
    if n <= 1:
        return [launch(name, [*mems, d], (1, 1, 1), target.wg)]
    n_results = n + len(stretches) - 1
    results = Scratch(4 * n_results).mem(
        DType.I32 if name == "count_equal" else DType.F32, (n_results, 1, 1, 1)
    )
    launches = [
        launch(
            name, [*stretch, results.window((groups, 1, 1, 1), offset=4 * start)], (groups, 1, 1), target.wg
        )
        for stretch, groups, start in zip(stretches, (n, 1), (0, n), strict=False)
    ]
    if name == "count_equal":
        last = launch(name, [results, results, d], (1, 1, 1), target.wg, SUM_COUNTS=1)
    else:
        last = launch("sum", [results, d], (1, 1, 1), target.wg)
    return [*launches, last]


def _rows(row: Mem, first: int, n: int, length: int) -> Mem:
    """Return `n` rows of a length, consecutive in one row from element `first` on."""
    nb0 = row.nb[0]
    return row.window((length, n, 1, 1), (nb0, length * nb0, 0, 0), first * nb0)


@RULES.rule(Op.SUM, operands(FLOATS))
def _sum(node: Tensor, target: Target) -> list[Launch]:
    a, d = _mems(node)
    return in_two_passes(target, "sum", flattened(target, [a]), d, cut=True)


@RULES.rule(Op.COUNT_EQUAL, operands(I32, I32, out=frozenset({DType.I64})))
def _count_equal(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.src
    mems = flattened(target, [Mem.of(a), Mem.of(b)])  # type: ignore[arg-type]
    return in_two_passes(target, "count_equal", mems, Mem.of(node), cut=True)


@RULES.rule(Op.CUMSUM, operands(FLOATS))
def _cumsum(node: Tensor, target: Target) -> list[Launch]:
    return [rowwise(target, "cumsum", _mems(node))]


def _largest(target: Target, name: str, a: Mem, d: Mem) -> list[Launch]:
    """Return the launches of the kernel `name`, which writes the numbers of the largest elements of rows.

    A GPU's many groups find those of each segment of a long row; another pass finds the largest of these.
    """
    k, more, length = d.ne[0], a.ne[1:3], row_length(a.ne[0])
    n = a.ne[0] // max(length, 1)
    if target.on_cpu or n < 2 or a.ne[3] > 1 or 2 * k > length:
        return [in_registers(target, name, [a, d, d, d], over=0)]
    segments = a.window((length, n, *more), (a.nb[0], length * a.nb[0], *a.nb[1:3]))
    found = [Scratch(4 * k * n * math.prod(more)) for _ in range(2)]
    values, ids = (x.mem(t, (k, n, *more)) for x, t in zip(found, (DType.F32, DType.I32), strict=True))
    rows, numbers = (x.mem(t.dtype, (k * n, *more, 1)) for x, t in zip(found, (values, ids), strict=True))
    return [
        in_registers(target, name, [segments, ids, values, ids], over=0, SEGMENTS=1),
        in_registers(target, name, [rows, numbers, numbers, d], over=0, IDS=1),
    ]


@RULES.rule(Op.ARGMAX, operands(FLOATS, out=I32), has_elements)
def _argmax(node: Tensor, target: Target) -> list[Launch]:
    a, d = _mems(node)
    return _largest(target, "argmax", a, d.window((1, *d.ne[:3]), (4, *d.nb[:3])))


@RULES.rule(Op.ARGSORT, operands(FLOATS, out=I32))
def _argsort(node: Tensor, target: Target) -> list[Launch]:
    flags = {"DESCENDING": 1} if node.params["order"] is SortOrder.DESC else {}
    return [rowwise(target, "argsort", _mems(node), over=0, **flags)]


@RULES.rule(Op.TOP_K, operands(FLOATS, out=I32))
def _top_k(node: Tensor, target: Target) -> list[Launch]:
    return _largest(target, "top_k", *_mems(node))


@RULES.rule(Op.CROSS_ENTROPY_LOSS, operands(FLOATS, FLOATS), has_elements)
def _loss(node: Tensor, target: Target) -> list[Launch]:
    *mems, d = Mem.all_of(node)
    return in_two_passes(target, "cross_entropy_loss", mems, d)


@RULES.rule(Op.CROSS_ENTROPY_LOSS_BACK, operands(FLOATS, FLOATS, FLOATS))
def _loss_back(node: Tensor, target: Target) -> list[Launch]:
    gradient, logits, shares = map(Mem.of, node.sources)
    return [in_registers(target, "cross_entropy_loss_back", [logits, shares, gradient, Mem.of(node)])]


@RULES.rule((Op.OPT_STEP_SGD, Op.OPT_STEP_ADAMW), operands(F32, FLOATS, F32, F32, F32, out=F32))
def _step(node: Tensor, target: Target) -> list[Launch]:
    *sources, numbers = map(Mem.of, node.sources)
    *mems, d = flattened(target, [*sources, Mem.of(node)])
    (row,) = flattened(target, [numbers])
    return [elementwise(target, node.op.lower(), [*mems, row, d])]
