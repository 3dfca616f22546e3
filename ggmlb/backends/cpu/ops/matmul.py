"""Products of matrices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import F32, FLOATS, I32, operands
from ggmlb.backends.cpu import casts
from ggmlb.backends.cpu.products import f32_view
from ggmlb.backends.cpu.rules import RULES, VALUES
from ggmlb.backends.cpu.views import View, cuts
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.MUL_MAT, operands(VALUES, FLOATS, out=F32))
def mul_mat(lw: CpuLowering, t: Tensor) -> None:
    """Rows of `b` times rows of `a`: `y[.., n, m] = sum_k b[.., n, k] a[.., m, k]`."""
    a, b = t.sources
    lw.product(View.of(t), View.of(a), f32_view(lw, b))


@RULES.rule(Op.OUT_PROD, operands(VALUES, FLOATS, out=F32))
def out_prod(lw: CpuLowering, t: Tensor) -> None:
    """`y[.., m, n] = sum_k b[.., k, m] a[.., k, n]`."""
    a, b = t.sources
    a_t, b_t = (f32_view(lw, s).transposed(0, 1, 3, 2) for s in (a, b))
    lw.product(View.of(t), a_t, b_t)


@RULES.rule(Op.MUL_MAT_ID, operands(VALUES, FLOATS, I32, out=F32))
def mul_mat_id(lw: CpuLowering, t: Tensor) -> None:
    """`y[token, i] = a[ids[token, i]] b[token, i]`: each row through the matrix of its expert."""
    a, b, ids = t.sources
    n_experts, n_used, k, m = a.ne[2], ids.ne[0], a.ne[0], a.ne[1]
    x, y, chosen = lw.f32(b)[0], lw.array(t)[0], lw.array(ids)[0, 0]
    weights = View.of(a)
    load = casts.loader(weights.type)
    pieces = [piece for (piece,) in cuts((m,), k, None if load is None else lw.weight_tile)]
    n = lw.workers(chosen.size * m * k)
    scratch = [lw.scratch((max(count for _, count in pieces), k)) for _ in range(n if load else 0)]
    tiles = [[lw.bind(weights.cut(1, e, 1).cut(2, *p))[0, 0] for p in pieces] for e in range(n_experts)]

    def compute(worker: int, e: int, places: Array) -> None:
        token, slot = divmod(places, n_used)
        rows = x[token, slot % x.shape[1]]
        for tile, (first, count) in zip(tiles[e], pieces, strict=True):
            values = tile
            if load is not None:
                values = scratch[worker][:count]
                load(values, tile)
            y[token, slot, first : first + count] = rows @ values.T

    def step() -> None:
        expert = chosen.reshape(-1)
        lw.check_index(expert, n_experts)
        order = expert.argsort(kind="stable")
        ends = expert[order].searchsorted(range(n_experts), side="right")
        by_expert = [order[i:j] for i, j in zip((0, *ends), ends, strict=False)]
        used = [(e, places) for e, places in enumerate(by_expert) if places.size]
        lw.run_parallel([[partial(compute, i, *use) for use in used[i::n]] for i in range(n)])

    lw.emit(step)
