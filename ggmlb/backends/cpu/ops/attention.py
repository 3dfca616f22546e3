"""Fused attention: products, soft_max and products again, some heads and some queries at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.formulas import alibi_slopes
from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.cpu import casts
from ggmlb.backends.cpu.casts import CAST
from ggmlb.backends.cpu.ops.unary import EXP
from ggmlb.backends.cpu.products import is_ready, row_sum
from ggmlb.backends.cpu.rules import RULES, VALUES
from ggmlb.backends.cpu.tiling import shaped, value_shape
from ggmlb.backends.cpu.views import View, broadcast, cuts
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering, Step

    Cut = tuple[int, int]


def _same_heads(node: Tensor) -> str | None:
    k, v = node.sources[1:3]
    return None if k.ne[2] == v.ne[2] else f"k has {k.ne[2]} heads, v has {v.ne[2]}"


@RULES.rule(Op.FLASH_ATTN_EXT, operands(FLOATS, VALUES, VALUES, FLOATS, F32, out=F32), _same_heads)
def flash_attn_ext(lw: CpuLowering, t: Tensor) -> None:
    """`soft_max(q k^T scale + slope mask) v`, with capped logits and sinks; rows all masked give 0.

    Query heads share the keys and values of their group. A tile is some key heads, with all their query
    heads and some of the queries, so that logits and float32 copies of keys and values stay small.
    """
    q, k, v = t.operand(0), t.operand(1), t.operand(2)
    mask, sinks = t.optional(3), t.optional(4)
    attention = _Attention(lw, t, q, k, v)
    if mask is not None:
        attention.set_mask(View.of(mask).cut(2, 0, q.ne[1]), t.params["max_bias"])
    if sinks is not None:
        attention.sinks = lw.array(sinks).reshape(attention.by_head)
    attention.emit()


class _Attention:
    """The operands of a node as `[batch, key heads, group, rows, columns]`, and the steps over them."""

    def __init__(self, lw: CpuLowering, t: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
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
            self.slopes = np.asarray(alibi_slopes(n2 * group, max_bias)).reshape(self.by_head)

    def emit(self) -> None:
        """Emit the steps, tile by tile."""
        lw, limit = self.lw, self.lw.weight_tile
        n3, n2, group, n_q, dk = self.q.shape
        n_kv, dv = self.k.shape[2], self.y.shape[-1]
        n_rows = n_q if limit is None else max(1, min(n_q, limit // max(1, group * n_kv)))
        work = n3 * n2 * n_kv * (EXP * group * n_q + CAST * (dk + dv))
        n = min(n3 * n2, lw.workers(work))
        per_head = n_kv * (dk + dv) + group * n_rows * n_kv
        if limit is not None:
            limit = min(limit, n3 * n2 * per_head // n)
        pieces = list(cuts((n3, n2), per_head, limit))
        lists: list[list[Step]] = [[] for _ in range(n)]
        n_heads = max(batch[1] * heads[1] for batch, heads in pieces)
        scratch = [_Scratch(self, n_heads, n_rows) for _ in range(n)]
        for i, (batch, heads) in enumerate(pieces):
            self._add_heads(lists[i % n], scratch[i % n], batch, heads, n_rows)
        lw.emit_parallel(lists)

    def _add_heads(self, steps: list[Step], scratch: _Scratch, batch: Cut, heads: Cut, n_rows: int) -> None:
        """Append the steps of some key heads: keys and values as float32, then the queries in tiles."""

        def matrices(view: View, values: Array) -> Array:
            part = view.cut(0, *batch).cut(1, *heads)
            return self.lw.bind(part) if is_ready(part) else self._load(steps, values, part)

        k, v = matrices(self.k, scratch.k), matrices(self.v, scratch.v)
        n_q = self.q.shape[3]
        for start in range(0, n_q, n_rows):
            self._add_tile(steps, scratch, k, v, batch, heads, (start, min(n_rows, n_q - start)))

    def _load(self, steps: list[Step], values: Array, view: View) -> Array:
        """Append the reading of a view into scratch, and return that."""
        values = shaped(values, value_shape(view))
        load = casts.loader(view.type) or casts.copy
        steps.append(partial(load, values, self.lw.bind(view)))
        return values

    def _add_tile(
        self, steps: list[Step], scratch: _Scratch, k: Array, v: Array, batch: Cut, heads: Cut, rows: Cut
    ) -> None:
        lw = self.lw

        def part(view: View) -> View:
            return view.cut(0, *batch).cut(1, *heads).cut(3, *rows)

        def of_heads(values: Array | None) -> Array | None:
            return None if values is None else values[:, heads[0] : heads[0] + heads[1]]

        outer = (batch[1], heads[1])
        grid, flat = (*outer, self.group, rows[1]), (*outer, self.group * rows[1])
        n_kv, dk, dv = k.shape[-2], k.shape[-1], v.shape[-1]
        q = self._load(steps, scratch.q, part(self.q))
        logits, out = shaped(scratch.logits, (*grid, n_kv)), shaped(scratch.out, (*grid, dv))
        bias = None if self.mask is None else self._load(steps, scratch.bias, _once(part(self.mask)))
        scaled = shaped(scratch.scaled, (*grid, n_kv)) if self.slopes is not None else None
        slopes, sinks, y = of_heads(self.slopes), of_heads(self.sinks), lw.bind(part(self.y))
        factor, softcap = self.scale / (self.softcap or 1), self.softcap

        def attend() -> None:
            np.multiply(q, factor, out=q)
            np.matmul(q.reshape(*flat, dk), k.swapaxes(-1, -2), out=logits.reshape(*flat, n_kv))
            if softcap:
                np.tanh(logits, out=logits)
                np.multiply(logits, softcap, out=logits)
            if bias is not None:
                np.add(logits, bias if slopes is None else np.multiply(bias, slopes, out=scaled), out=logits)
            peak = logits.max(axis=-1, keepdims=True)
            if sinks is not None:
                peak = np.maximum(peak, sinks)
            np.copyto(peak, 0, where=peak == -np.inf)
            np.subtract(logits, peak, out=logits)
            np.exp(logits, out=logits)
            total = row_sum(logits)
            if sinks is not None:
                total += np.exp(sinks - peak)
            np.copyto(total, 1, where=total == 0)
            np.matmul(logits.reshape(*flat, n_kv), v, out=out.reshape(*flat, dv))
            np.divide(out, total, out=y)

        steps.append(attend)


class _Scratch:
    """The scratch of one thread, flat, for the largest tile: some heads and `n_rows` queries of each."""

    def __init__(self, attention: _Attention, n_heads: int, n_rows: int) -> None:
        take = attention.lw.scratch
        n_kv, dk = attention.k.shape[2], attention.q.shape[4]
        dv = attention.y.shape[4]
        n_queries = n_heads * attention.group * n_rows
        n_logits = n_queries * n_kv
        self.k, self.v = take((n_heads * n_kv * dk,)), take((n_heads * n_kv * dv,))
        self.q, self.out, self.logits = take((n_queries * dk,)), take((n_queries * dv,)), take((n_logits,))
        self.bias = take((n_logits if attention.mask is not None else 0,))
        self.scaled = take((n_logits if attention.slopes is not None else 0,))


def _once(view: View) -> View:
    """The view without its repetitions, which broadcasting brings back."""
    shape = tuple(1 if stride == 0 else n for n, stride in zip(view.shape, view.strides, strict=True))
    return view.reshaped(shape, view.strides)
