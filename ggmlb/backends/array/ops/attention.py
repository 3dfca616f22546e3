"""Fused attention: products, soft_max and products again, some heads and some queries at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.array.ops.softmax import alibi_slopes
from ggmlb.backends.array.rules import F32, FLOAT, VALUE, operands, rule
from ggmlb.backends.array.views import View, broadcast, cuts, is_blas_matrix
from ggmlb.dtypes import DType
from ggmlb.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.array.casts import Casts
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.backends.array.workspace import Array
    from ggmlb.tensor import Tensor


def _same_heads(node: Tensor, casts: Casts) -> str | None:
    k, v = node.src[1:3]
    assert k is not None and v is not None
    return None if k.ne[2] == v.ne[2] else f"k has {k.ne[2]} heads, v has {v.ne[2]}"


@rule(Op.FLASH_ATTN_EXT, operands(FLOAT, VALUE, VALUE, FLOAT, F32, out=F32), _same_heads)
def flash_attn_ext(lw: Lowering, t: Tensor) -> None:
    """`soft_max(q k^T scale + slope mask) v`, with capped logits and sinks; rows all masked give 0.

    Query heads share the keys and values of their group. A tile is some key heads, with all their query
    heads and some of the queries, so that logits and float32 copies of keys and values stay small.
    """
    q, k, v, mask, sinks = (*t.src, None, None)[:5]
    assert q is not None and k is not None and v is not None
    attention = _Attention(lw, t, q, k, v)
    if mask is not None:
        attention.set_mask(View.of(mask).cut(2, 0, q.ne[1]), t.params["max_bias"])
    if sinks is not None:
        attention.sinks = lw.array(sinks).reshape(attention.by_head)
    attention.emit()


class _Attention:
    """The operands of a node as `[batch, key heads, group, rows, columns]`, and the steps over them."""

    def __init__(self, lw: Lowering, t: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.lw = lw
        self.group = q.ne[2] // k.ne[2]
        self.by_head = (1, k.ne[2], self.group, 1, 1)
        self.q = View.of(q).split(1, self.group)
        self.k, self.v = View.of(k), View.of(v)
        self.y = View.of(t).transposed(0, 2, 1, 3).split(1, self.group)
        self.scale, self.softcap = t.params["scale"], t.params["logit_softcap"]
        self.mask: View | None = None
        self.slopes: Array | None = None
        self.sinks: Array | None = None

    def set_mask(self, mask: View, max_bias: float) -> None:
        """Repeat the mask over batch and heads, by its strides if these can."""
        lw, (n3, n2, group) = self.lw, self.q.shape[:3]
        shape = (n3, n2 * group, *mask.shape[2:])
        repeated = broadcast([mask.reshaped(shape, (0, 0, 0, 0)), mask])[1]
        if len(repeated.shape) > 4:
            repeated = lw.view(lw.scratch(shape))
            lw.copy(*broadcast([repeated, mask]))
        self.mask = repeated.split(1, group)
        if max_bias > 0:
            self.slopes = lw.xp.asarray(alibi_slopes(n2 * group, max_bias)).reshape(self.by_head)

    def emit(self) -> None:
        """Emit the steps, tile by tile."""
        lw, limit = self.lw, self.lw.weight_tile
        n3, n2, group, n_q, dk = self.q.shape
        n_kv, dv = self.k.shape[2], self.y.shape[-1]
        n_rows = n_q if limit is None else max(1, min(n_q, limit // max(1, group * n_kv)))
        pieces = list(cuts((n3, n2), n_kv * (dk + dv) + group * n_rows * n_kv, limit))
        n_heads = max(b[1] * h[1] for b, h in pieces)
        n_all = n_heads * group * n_rows
        self.k_scratch, self.v_scratch = (
            lw.scratch((n_heads * n_kv * dk,)),
            lw.scratch((n_heads * n_kv * dv,)),
        )
        self.q_scratch, self.o_scratch = lw.scratch((n_all * dk,)), lw.scratch((n_all * dv,))
        self.logits = lw.scratch((n_all * n_kv,))
        needs_bias = self.mask is not None and (self.mask.type != DType.F32 or self.slopes is not None)
        self.bias = lw.scratch((n_all * n_kv if needs_bias else 0,))
        for batch, heads in pieces:
            k = self._matrices(self.k, self.k_scratch, batch, heads, dk)
            v = self._matrices(self.v, self.v_scratch, batch, heads, dv)
            for start in range(0, n_q, n_rows):
                self._emit_tile(k, v, batch, heads, (start, min(n_rows, n_q - start)))

    def _matrices(
        self, view: View, scratch: Array, batch: tuple[int, int], heads: tuple[int, int], d: int
    ) -> Array:
        """Keys or values of some heads, float32 and fit for BLAS."""
        part = view.cut(0, *batch).cut(1, *heads)
        if part.type == DType.F32 and is_blas_matrix(part):
            return self.lw.bind(part)
        values = _shaped(scratch, (batch[1], heads[1], part.shape[2], d))
        self.lw.copy(self.lw.view(values), part)
        return values

    def _emit_tile(
        self, k: Array, v: Array, batch: tuple[int, int], heads: tuple[int, int], rows: tuple[int, int]
    ) -> None:
        lw, xp = self.lw, self.lw.xp

        def part(view: View) -> View:
            return view.cut(0, *batch).cut(1, *heads).cut(3, *rows)

        def of_heads(values: Array | None) -> Array | None:
            return None if values is None else values[:, heads[0] : heads[0] + heads[1]]

        outer = (batch[1], heads[1])
        grid, flat = (*outer, self.group, rows[1]), (*outer, self.group * rows[1])
        n_kv, dk, dv = k.shape[-2], k.shape[-1], v.shape[-1]
        q = _shaped(self.q_scratch, (*grid, dk))
        lw.copy(lw.view(q), part(self.q))
        logits, out = _shaped(self.logits, (*grid, n_kv)), _shaped(self.o_scratch, (*grid, dv))
        bias = None
        if self.mask is not None:
            mask = part(self.mask)
            bias = lw.bind(mask)
            if mask.type != DType.F32:
                bias = _shaped(self.bias, (*grid, n_kv))
                lw.copy(lw.view(bias), mask)
        scaled = _shaped(self.bias, (*grid, n_kv)) if self.slopes is not None else None
        slopes, sinks, y = of_heads(self.slopes), of_heads(self.sinks), lw.bind(part(self.y))
        factor, softcap = self.scale / (self.softcap or 1), self.softcap

        def logits_of() -> None:
            xp.multiply(q, factor, out=q)
            xp.matmul(q.reshape(*flat, dk), k.swapaxes(-1, -2), out=logits.reshape(*flat, n_kv))
            if softcap:
                xp.tanh(logits, out=logits)
                xp.multiply(logits, softcap, out=logits)
            if bias is not None:
                if scaled is not None:
                    xp.multiply(bias, slopes, out=scaled)
                xp.add(logits, bias if scaled is None else scaled, out=logits)

        def average() -> None:
            peak = logits.max(axis=-1, keepdims=True)
            if sinks is not None:
                peak = xp.maximum(peak, sinks)
            xp.copyto(peak, 0, where=peak == -np.inf)
            xp.subtract(logits, peak, out=logits)
            xp.exp(logits, out=logits)
            total = logits.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total += xp.exp(sinks - peak)
            xp.copyto(total, 1, where=total == 0)
            xp.matmul(logits.reshape(*flat, n_kv), v, out=out.reshape(*flat, dv))
            xp.divide(out, total, out=y)

        lw.emit(logits_of)
        lw.emit(average)


def _shaped(scratch: Array, shape: tuple[int, ...]) -> Array:
    """The first elements of flat scratch, in that shape."""
    return scratch[: int(np.prod(shape))].reshape(shape)
