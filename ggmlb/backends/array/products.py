"""Products of views: float32 BLAS, over weights that other types reach through tiles of scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.array.views import View, cuts, is_blas_matrix, merged
from ggmlb.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.tensor import Tensor


def is_ready(view: View) -> bool:
    """Whether BLAS takes the matrices of the view as they lie."""
    return view.type == DType.F32 and is_blas_matrix(view)


def f32_view(lw: Lowering, t: Tensor) -> View:
    """View the values as float32 in a layout for BLAS: the memory, or scratch that a step fills."""
    view = View.of(t)
    if is_ready(view):
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


def product(lw: Lowering, y: View, a: View, b: View) -> None:
    """Emit `y = b @ a.T`; see `Lowering.product`."""
    a, b, y = grouped(a, b, y)
    if is_ready(a):
        lw.emit(lw.xp.matmul, lw.bind(b), lw.bind(a).swapaxes(-1, -2), out=lw.bind(y))
        return
    k, m = b.shape[-1], a.shape[-2]
    pieces = list(cuts((*a.shape[:2], m), k, lw.weight_tile))
    scratch = lw.scratch((max(c3[1] * c2[1] * cm[1] for c3, c2, cm in pieces), k))
    for c3, c2, cm in pieces:
        part = a.cut(0, *c3).cut(1, *c2).cut(-2, *cm)
        values = scratch[: c3[1] * c2[1] * cm[1]].reshape(*part.shape[:-1], k)
        lw.copy(lw.view(values), part)
        x, out = (lw.bind(v.cut(0, *c3).cut(1, *c2)) for v in (b, y.cut(-1, *cm)))
        lw.emit(lw.xp.matmul, x, values.swapaxes(-1, -2), out=out)
