"""Matrix products on several threads, each calling BLAS for its part.

BLAS itself is limited to one thread (see `CpuBackend`), because its threads wait by spinning and
synchronize after every product.
"""

from __future__ import annotations

from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.cpu import casts
from ggmlb.backends.cpu.views import View, cuts, grouped, is_blas_matrix
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering, Step

FUSED_ADDS = 8
"""Products and sums of a matrix product that BLAS does in the time of one addition by NumPy."""

LEAST_ROWS = 64
"""Rows of activations for which BLAS runs at its full speed; it packs the weights once for them."""

FEW_ROWS = range(2, 32)
"""Rows of activations for which BLAS is faster at the transposed product, turning the result included."""

BLAS_ROWS = 16
"""Rows of a weight that BLAS takes at a time; a tile is a whole number of them."""

READ_WORK = 12
"""The work of reading a weight that is not float32, in additions."""

WEIGHT_TILE = 1 << 21
"""Values of a weight that a thread holds as float32 at a time, when there are many rows to multiply."""

WEIGHT_TILE_FEW = 1 << 20
"""The same when there are few rows."""


_F32 = DType.F32  # looked up once: it is asked of every product


def row_sum(x: Array) -> Array:
    """The sums along the last axis, which stays, with extent 1.

    As products with ones, by BLAS: half the time of a reduction where rows are short.
    """
    return row_dot(x, _ones(x.shape[-1]))


def row_dot(x: Array, y: Array) -> Array:
    """The sums of `x y` along the last axis, which stays; by BLAS, in one pass."""
    return np.vecdot(x, y)[..., np.newaxis]


@cache
def _ones(n: int) -> Array:
    return np.ones(n, np.float32)


def is_ready(view: View) -> bool:
    """Whether BLAS takes the matrices of the view as they lie."""
    return view.type is _F32 and is_blas_matrix(view)


def f32_view(lw: CpuLowering, t: Tensor) -> View:
    """View the values as float32 in a layout for BLAS: the memory, or scratch that a step fills."""
    view = View.of(t)
    if is_ready(view):
        return view
    values = lw.view(lw.scratch(t.ne[::-1]))
    lw.copy(values, view)
    return values


def product(lw: CpuLowering, y: View, a: View, b: View) -> None:
    """Emit `y = b @ a.T`; see `CpuLowering.product`."""
    a, b, y = grouped((a, b, y))
    rows, k, m = b.shape[-2], b.shape[-1], a.shape[-2]
    if not is_ready(a):
        _through_tiles(lw, y, a, b)
    elif prod(b.shape[:-2]) > 1:
        a = a.reshaped((*b.shape[:-2], m, k), a.strides)
        work = max(1, rows * k * m // FUSED_ADDS // max(rows * m, rows * k, m * k))
        lw.tiled(_multiply, y, b, a, inner=2, work=work, one_call=True, convert=False)
    elif rows >= 2 * LEAST_ROWS:
        work = max(1, k * m // FUSED_ADDS // max(k, m))
        y, b, a = (v.reshaped(v.shape[-2:], v.strides[-2:]) for v in (y, b, a))
        lw.tiled(
            _multiply, y, b, whole=[a], inner=1, work=work, least=LEAST_ROWS, one_call=True, convert=False
        )
    else:
        _by_columns(lw, *(lw.bind(v.reshaped(v.shape[-2:], v.strides[-2:])) for v in (y, a, b)))


def _multiply(y: Array, b: Array, a: Array) -> None:
    np.matmul(b, a.swapaxes(-1, -2), out=y)


def _multiply_turned(y: Array, b: Array, a: Array, turned: Array) -> None:
    np.matmul(a, b.T, out=turned)
    np.copyto(y, turned.T)


def _by_columns(lw: CpuLowering, y: Array, a: Array, b: Array) -> None:
    """Few rows: each thread makes some columns of the result, from some rows of the weight."""
    rows, m = y.shape
    n = lw.workers(a.size * (rows + 1) // FUSED_ADDS)
    turn = rows in FEW_ROWS and a.strides[1] == a.itemsize
    lists: list[list[Step]] = []
    for i in range(n):
        part = slice(m * i // n, m * (i + 1) // n)
        columns, weights = y[:, part], a[part]
        if turn:
            lists.append([partial(_multiply_turned, columns, b, weights, lw.scratch(columns.shape[::-1]))])
        else:
            lists.append([partial(_multiply, columns, b, weights)])
    lw.emit_parallel(lists)


def _through_tiles(lw: CpuLowering, y: View, a: View, b: View) -> None:
    """Each thread reads tiles of the weight, some rows as float32, and multiplies with them at once."""
    rows, k, m = b.shape[-2], b.shape[-1], a.shape[-2]
    n_weights = prod(a.shape[:-1]) * k
    n = lw.workers(n_weights * (READ_WORK + rows // FUSED_ADDS))
    limit = min(WEIGHT_TILE_FEW if rows < LEAST_ROWS else WEIGHT_TILE, n_weights // n)
    per_tile = max(BLAS_ROWS, limit // k // BLAS_ROWS * BLAS_ROWS)
    pieces = list(cuts((*a.shape[:2], m), k, per_tile * k))
    scratch = [lw.scratch((max(prod(n for _, n in cut) for cut in pieces), k)) for _ in range(n)]
    load = casts.loader(a.type) or casts.copy
    lists: list[list[Step]] = [[] for _ in range(n)]
    for i, (c3, c2, cm) in enumerate(pieces):
        part = a.cut(0, *c3).cut(1, *c2).cut(-2, *cm)
        values = scratch[i % n][: c3[1] * c2[1] * cm[1]].reshape(*part.shape[:-1], k)
        x, out = (lw.bind(v.cut(0, *c3).cut(1, *c2)) for v in (b, y.cut(-1, *cm)))
        lists[i % n] += [partial(load, values, lw.bind(part)), partial(_multiply, out, x, values)]
    lw.emit_parallel(lists)
