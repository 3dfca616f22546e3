"""Products of views: float32 BLAS, over weights that other types reach through tiles of scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.views import View, cuts, grouped, is_blas_matrix
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.array.lowering import Lowering

_F32 = DType.F32  # looked up once: it is asked of every product


def is_ready(view: View) -> bool:
    """Whether BLAS takes the matrices of the view as they lie."""
    return view.type is _F32 and is_blas_matrix(view)


def f32_view(lw: Lowering, t: Tensor) -> View:
    """View the values as float32 in a layout for BLAS: the memory, or scratch that a step fills."""
    view = View.of(t)
    if is_ready(view):
        return view
    values = lw.view(lw.scratch(t.ne[::-1]))
    lw.copy(values, view)
    return values


def product(lw: Lowering, y: View, a: View, b: View) -> None:
    """Emit `y = b @ a.T`; see `Lowering.product`."""
    a, b, y = grouped((a, b, y))
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
