"""Products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.array.products import f32_view
from ggmlb.backends.array.rules import F32, FLOAT, I32, VALUE, operands, rule, sources
from ggmlb.backends.array.views import View, cuts
from ggmlb.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.tensor import Tensor


@rule(Op.MUL_MAT, operands(VALUE, FLOAT, out=F32))
def mul_mat(lw: Lowering, t: Tensor) -> None:
    """Rows of `b` times rows of `a`: `y[.., n, m] = sum_k b[.., n, k] a[.., m, k]`."""
    a, b = sources(t)
    lw.product(View.of(t), View.of(a), f32_view(lw, b))


@rule(Op.OUT_PROD, operands(VALUE, FLOAT, out=F32))
def out_prod(lw: Lowering, t: Tensor) -> None:
    """`y[.., m, n] = sum_k b[.., k, m] a[.., k, n]`."""
    a, b = sources(t)
    a_t, b_t = (f32_view(lw, s).transposed(0, 1, 3, 2) for s in (a, b))
    lw.product(View.of(t), a_t, b_t)


@rule(Op.MUL_MAT_ID, operands(VALUE, FLOAT, I32, out=F32))
def mul_mat_id(lw: Lowering, t: Tensor) -> None:
    """`y[token, i] = a[ids[token, i]] b[token, i]`: each row through the matrix of its expert."""
    a, b, ids = sources(t)
    n_experts, n_used, k = a.ne[2], ids.ne[0], a.ne[0]
    x, y, chosen = lw.f32(b)[0], lw.array(t)[0], lw.array(ids)[0, 0]
    weights = View.of(a)
    load = lw.casts.load(weights.type)
    pieces = [piece for (piece,) in cuts((a.ne[1],), k, None if load is None else lw.weight_tile)]
    scratch = lw.scratch((max(n for _, n in pieces), k)) if load is not None else None
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
