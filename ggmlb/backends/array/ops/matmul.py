"""Products of matrices: float32 BLAS, over weights that other types reach through tiles of scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.array.rules import F32, FLOAT, I32, VALUE, operands, rule, sources
from ggmlb.backends.array.views import View, cuts, is_blas_matrix, merged
from ggmlb.dtypes import DType
from ggmlb.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.tensor import Tensor


def f32_view(lw: Lowering, t: Tensor) -> View:
    """View the values as float32 in a layout for BLAS: the memory, or scratch that a step fills."""
    view = View.of(t)
    if t.dtype == DType.F32 and is_blas_matrix(view):
        return view
    values = lw.view(lw.scratch(t.ne[::-1]))
    lw.copy(values, view)
    return values


def grouped(weight: View, *views: View) -> tuple[View, ...]:
    """Make one matrix of all rows that meet the same weights: dimensions that `weight` does not have.

    `weight` is `[n3, n2, m, k]`; it repeats over `views`, `[n3 r3, n2 r2, rows, columns]`. Returned are
    the weight as `[n3, n2, 1.., m, k]` and the views as `[n3, n2, .., rows, columns]`.
    """
    n3, n2 = weight.shape[:2]
    # n3, n2 | r3, r2, rows, columns
    split = [
        v.split(1, v.shape[1] // n2).split(0, v.shape[0] // n3).transposed(0, 2, 1, 3, 4, 5) for v in views
    ]
    rows = merged([v.reshaped(v.shape[2:], v.strides[2:]) for v in split], 1)
    n_extra = len(rows[0].shape) - 2
    joined = (
        v.reshaped((n3, n2, *r.shape), (*v.strides[:2], *r.strides)) for v, r in zip(split, rows, strict=True)
    )
    shape, strides = weight.shape, weight.strides
    ones, zeros = (1,) * n_extra, (0,) * n_extra
    return weight.reshaped((n3, n2, *ones, *shape[2:]), (*strides[:2], *zeros, *strides[2:])), *joined


@rule(Op.MUL_MAT, operands(VALUE, FLOAT, out=F32))
def mul_mat(lw: Lowering, t: Tensor) -> None:
    """Rows of `b` times rows of `a`: `y[.., n, m] = sum_k b[.., n, k] a[.., m, k]`."""
    a, b = sources(t)
    product(lw, View.of(t), View.of(a), f32_view(lw, b))


def product(lw: Lowering, y: View, a: View, b: View) -> None:
    """Emit `y = b @ a.T` with float32 `b` and `y`, `a` of any type, repeating over the batch.

    `a` that is not float32, or that BLAS cannot take, goes through scratch a tile of rows at a time.
    """
    if 0 in y.shape:
        return
    a, b, y = grouped(a, b, y)
    if a.type == DType.F32 and is_blas_matrix(a):
        lw.emit(lw.xp.matmul, lw.bind(b), lw.bind(a).swapaxes(-1, -2), out=lw.bind(y))
        return
    k = b.shape[-1]
    n3, n2, m = *a.shape[:2], a.shape[-2]
    extra = a.shape[2:-2]
    pieces = list(cuts((n3, n2, m), k, lw.weight_tile))
    largest = max(c3[1] * c2[1] * cm[1] for c3, c2, cm in pieces)
    scratch = lw.scratch((largest, k))
    for c3, c2, cm in pieces:
        part = a.cut(0, *c3).cut(1, *c2).cut(len(a.shape) - 2, *cm)
        values = scratch[: c3[1] * c2[1] * cm[1]].reshape(c3[1], c2[1], *extra, cm[1], k)
        lw.copy(lw.view(values), part)
        lw.emit(
            lw.xp.matmul,
            lw.bind(b.cut(0, *c3).cut(1, *c2)),
            values.swapaxes(-1, -2),
            out=lw.bind(y.cut(0, *c3).cut(1, *c2).cut(len(y.shape) - 1, *cm)),
        )


@rule(Op.OUT_PROD, operands(VALUE, FLOAT, out=F32))
def out_prod(lw: Lowering, t: Tensor) -> None:
    """`y[.., m, n] = sum_k b[.., k, m] a[.., k, n]`."""
    a, b = sources(t)
    transposed = (0, 1, 3, 2)
    product(lw, View.of(t), f32_view(lw, a).transposed(*transposed), f32_view(lw, b).transposed(*transposed))


@rule(Op.MUL_MAT_ID, operands(VALUE, FLOAT, I32, out=F32))
def mul_mat_id(lw: Lowering, t: Tensor) -> None:
    """`y[token, i] = a[ids[token, i]] b[token, i]`: each row through the matrix of its expert."""
    a, b, ids = sources(t)
    n_experts, n_used, k = a.ne[2], ids.ne[0], a.ne[0]
    x, y, chosen = lw.f32(b)[0], lw.array(t)[0], lw.array(ids)[0, 0]
    load = lw.casts.load(a.dtype)
    pieces = [piece for (piece,) in cuts((a.ne[1],), k, None if load is None else lw.weight_tile)]
    scratch = lw.scratch((max(n for _, n in pieces), k)) if load is not None else None
    weights = View.of(a)
    tiles = [[lw.bind(weights.cut(1, e, 1).cut(2, *p))[0, 0] for p in pieces] for e in range(n_experts)]

    def step() -> None:
        expert = lw.to_host(chosen).reshape(-1)
        lw.check_index(expert, n_experts)
        order = expert.argsort(kind="stable")
        start = 0
        for e, end in enumerate(expert[order].searchsorted(range(n_experts), side="right")):
            if end == start:
                continue
            token, slot = divmod(order[start:end], n_used)
            start = end
            rows = x[token, slot % x.shape[1]]
            for tile, (first, n) in zip(tiles[e], pieces, strict=True):
                values = tile
                if load is not None:
                    load(scratch[:n], tile)
                    values = scratch[:n]
                y[token, slot, first : first + n] = rows @ values.T

    lw.emit(step)
