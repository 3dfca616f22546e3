"""Products of matrices, on several threads, each calling BLAS for its part; triangular systems.

BLAS itself is limited to one thread (see `CpuBackend`), because its threads wait by spinning and
synchronize after every product.
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, I32, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu import kernels
from ggmlb.backends.cpu.lowering import RULES, VALUES, Call, NodeLowering
from ggmlb.backends.cpu.views import View, cuts, grouped
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

FUSED_ADDS = 8
"""Multiply-adds by BLAS in the time of one addition by NumPy."""

LEAST_ROWS = 64
"""Fewest rows of activations for BLAS' full speed: it packs the weights once per call."""

FEW_ROWS = range(2, 32)
"""Numbers of rows for which the transposed product is faster, transposing the result included."""

BLAS_ROWS = 16
"""Rows of a weight that BLAS processes at a time; tiles have a multiple of them."""

READ_WORK = 12
"""Cost of converting an element of a weight to float32, in additions."""

WEIGHT_TILE = 1 << 21
"""Values of a weight that a thread converts to float32 at a time, for many rows of activations."""

WEIGHT_TILE_FEW = 1 << 20
"""The same for few rows."""


@RULES.rule(Op.MUL_MAT, operands(VALUES, FLOATS, out=F32))
def mul_mat(lw: NodeLowering, t: Tensor) -> None:
    """`y[.., n, m] = sum_k b[.., n, k] a[.., m, k]`; `a` is broadcast over the batch."""
    y, a, b = (lw.view(x) for x in (t, *t.sources))
    _product(lw, y, a, lw.blas_f32(b))


@RULES.rule(Op.OUT_PROD, operands(VALUES, FLOATS, out=F32))
def out_prod(lw: NodeLowering, t: Tensor) -> None:
    """`y[.., m, n] = sum_k b[.., k, m] a[.., k, n]`."""
    a, b = (lw.blas_f32(lw.view(s)).swapaxes(2, 3) for s in t.sources)
    _product(lw, lw.view(t), a, b)


def _product(lw: NodeLowering, y: View, a: View, b: View) -> None:
    """Emit `y = b @ a.T` for each matrix of a batch.

    Args:
        lw: Collects the calls.
        y: Float32, `[n3 r3, n2 r2, n, m]`.
        a: Of any type, `[n3, n2, m, k]`; repeats over the batch. If BLAS cannot read it in place, it is
            converted in scratch, some rows at a time.
        b: Float32 in a layout that BLAS accepts, `[n3 r3, n2 r2, n, k]`.
    """
    if 0 in y.shape:
        return
    a, b, y = grouped(a, b, y)
    rows, k, m = b.shape[-2], b.shape[-1], a.shape[-2]
    if not a.is_blas_matrix():
        _through_tiles(lw, y, a, b)
        return
    if prod(b.shape[:-2]) > 1:
        a = a.reshaped((*b.shape[:-2], m, k), a.strides)
        work = max(1, rows * k * m // FUSED_ADDS // max(rows * m, rows * k, m * k))
        lw.tiled(_multiply, y, b, a, inner=2, work=work, one_call=True, convert=False)
        return
    y, b, a = (v.reshaped(v.shape[-2:], v.strides[-2:]) for v in (y, b, a))
    if rows >= 2 * LEAST_ROWS:
        work = max(1, k * m // FUSED_ADDS // max(k, m))
        lw.tiled(
            _multiply, y, b, whole=[a], inner=1, work=work, least=LEAST_ROWS, one_call=True, convert=False
        )
    else:
        _by_columns(lw, y, a, b)


def _multiply(y: Array, b: Array, a: Array) -> None:
    np.matmul(b, a.swapaxes(-1, -2), out=y)


def _multiply_transposed(y: Array, b: Array, a: Array, transposed: Array) -> None:
    np.matmul(a, b.T, out=transposed)
    np.copyto(y, transposed.T)


def _by_columns(lw: NodeLowering, y: View, a: View, b: View) -> None:
    """For few rows: each thread computes some columns of the result from some rows of the weight."""
    rows, m = y.shape
    n = lw.workers(prod(a.shape) * (rows + 1) // FUSED_ADDS)
    is_transposed = rows in FEW_ROWS and a.strides[1] == a.item.itemsize
    lists: list[list[Call]] = []
    for i in range(n):
        part = slice(m * i // n, m * (i + 1) // n)
        columns, weights = y[:, part], a[part]
        if is_transposed:
            lists.append([(_multiply_transposed, (columns, b, weights, lw.scratch(columns.shape[::-1])))])
        else:
            lists.append([(_multiply, (columns, b, weights))])
    lw.emit_parallel(lists)


def _through_tiles(lw: NodeLowering, y: View, a: View, b: View) -> None:
    """Each thread converts tiles of the weight to float32, and multiplies by each while it is in cache."""
    rows, k, m = b.shape[-2], b.shape[-1], a.shape[-2]
    n_weights = prod(a.shape[:-1]) * k
    n = lw.workers(n_weights * (READ_WORK + rows // FUSED_ADDS))
    limit = min(WEIGHT_TILE_FEW if rows < LEAST_ROWS else WEIGHT_TILE, n_weights // n)
    per_tile = max(BLAS_ROWS, limit // k // BLAS_ROWS * BLAS_ROWS)
    pieces = list(cuts((*a.shape[:2], m), k, per_tile * k))
    scratch = [lw.scratch((max(prod(n for _, n in cut) for cut in pieces) * k,)) for _ in range(n)]
    load = kernels.loader(a.type) or kernels.copy
    lists: list[list[Call]] = [[] for _ in range(n)]
    for i, (c3, c2, cm) in enumerate(pieces):
        part = a.cut(0, *c3).cut(1, *c2).cut(-2, *cm)
        values = scratch[i % n].first((*part.shape[:-1], k))
        x, out = (v.cut(0, *c3).cut(1, *c2) for v in (b, y.cut(-1, *cm)))
        lists[i % n] += [(load, (values, part)), (_multiply, (out, x, values))]
    lw.emit_parallel(lists)


@RULES.rule(Op.MUL_MAT_ID, operands(VALUES, FLOATS, I32, out=F32))
def mul_mat_id(lw: NodeLowering, t: Tensor) -> None:
    """`y[token, i] = a[ids[token, i]] b[token, i]`: each row through the matrix of its expert."""
    y, weights, x, ids = (lw.view(s) for s in (t, *t.sources))
    x, chosen = lw.f32(x)[0], ids[0, 0]
    n_experts, (m, k), n_rows = weights.shape[1], t.sources[0].ne[1::-1], prod(chosen.shape)
    load = kernels.loader(weights.type)
    pieces = [piece for (piece,) in cuts((m,), k, None if load is None else lw.weight_tile)]
    n = lw.workers(n_rows * m * k)
    values = [lw.scratch((max(count for _, count in pieces) if load else 0, k)) for _ in range(n)]
    order, ends = (lw.scratch((size,), np.dtype(np.int64)) for size in (n_rows, n_experts + 1))

    def group_by_expert(order: Array, ends: Array, chosen: Array) -> None:
        expert = chosen.reshape(-1)
        kernels.check_index(expert, n_experts)
        order[:] = expert.argsort(kind="stable")
        ends[0] = 0
        ends[1:] = expert[order].searchsorted(range(n_experts), side="right")

    def compute(
        worker: int, y: Array, x: Array, weights: Array, order: Array, ends: Array, values: Array
    ) -> None:
        for e in np.flatnonzero(np.diff(ends))[worker::n]:
            token, slot = divmod(order[ends[e] : ends[e + 1]], y.shape[1])
            rows = x[token, slot % x.shape[1]]
            for first, count in pieces:
                tile = weights[e, first : first + count]
                if load is not None:
                    load(values[:count], tile)
                    tile = values[:count]
                y[token, slot, first : first + count] = rows @ tile.T

    lw.emit(group_by_expert, order, ends, chosen)
    operands = (y[0], x, weights[0], order, ends)
    lw.emit_parallel([[(partial(compute, i), (*operands, values[i]))] for i in range(n)])


@RULES.rule(Op.SOLVE_TRI, operands(F32, F32, out=F32))
def solve_tri(lw: NodeLowering, t: Tensor) -> None:
    """Solve `a x = b` by forward substitution; only the lower triangle of `a` is read."""

    def kernel(x: Array, a: Array, b: Array, known: Array) -> None:
        for i in range(x.shape[2]):
            row = x[:, :, i : i + 1]
            np.matmul(a[:, :, i : i + 1, :i], x[:, :, :i], out=known)
            np.subtract(b[:, :, i : i + 1], known, out=row)
            np.divide(row, a[:, :, i : i + 1, i : i + 1], out=row)

    x, a, b = (lw.view(s) for s in (t, *t.sources))
    lw.emit(kernel, x, a, b, lw.scratch((*x.shape[:2], 1, x.shape[3])))
