"""Fused attention: products, soft_max and products again, some heads and some queries at a time."""

from __future__ import annotations

from functools import partial

import numpy as np

from ggmlb.backends.common.formulas import alibi_slopes
from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu import kernels
from ggmlb.backends.cpu.kernels import CAST
from ggmlb.backends.cpu.lowering import RULES, VALUES, Call, NodeLowering
from ggmlb.backends.cpu.ops.elementwise import EXP
from ggmlb.backends.cpu.views import View, broadcast, cuts
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

Cut = tuple[int, int]


def _same_heads(node: Tensor) -> str | None:
    k, v = node.sources[1:3]
    return None if k.ne[2] == v.ne[2] else f"k has {k.ne[2]} heads, v has {v.ne[2]}"


@RULES.rule(Op.FLASH_ATTN_EXT, operands(FLOATS, VALUES, VALUES, FLOATS, F32, out=F32), _same_heads)
def flash_attn_ext(lw: NodeLowering, t: Tensor) -> None:
    """`soft_max(q k^T scale + slope mask) v`, with capped logits and sinks; rows all masked give 0.

    Query heads share the keys and values of their group. A tile is some key heads, with all their query
    heads and some of the queries, so that logits and float32 copies of keys and values stay small.
    """
    q, k, v = t.operand(0), t.operand(1), t.operand(2)
    mask, sinks = t.optional(3), t.optional(4)
    attention = _Attention(lw, t, q, k, v)
    if mask is not None:
        attention.set_mask(lw.view(mask).cut(2, 0, q.ne[1]), t.params["max_bias"])
    if sinks is not None:
        attention.sinks = lw.view(sinks).reshape(*attention.by_head)
    attention.emit()


class _Attention:
    """The operands of a node as `[batch, key heads, group, rows, columns]`, and the steps over them."""

    def __init__(self, lw: NodeLowering, t: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.lw = lw
        self.group = q.ne[2] // k.ne[2]
        self.by_head = (1, k.ne[2], self.group, 1, 1)
        self.q = lw.view(q).split(1, self.group)
        self.k, self.v = lw.view(k), lw.view(v)
        self.y = lw.view(t).transposed(0, 2, 1, 3).split(1, self.group)
        self.scale, self.softcap = t.params["scale"], t.params["logit_softcap"]
        self.mask: View | None = None
        self.slopes: View | None = None
        self.sinks: View | None = None

    def set_mask(self, mask: View, max_bias: float) -> None:
        """Repeat the mask over batch and heads, by its strides if these can."""
        lw, (n3, n2, group) = self.lw, self.q.shape[:3]
        shape = (n3, n2 * group, *mask.shape[2:])
        repeated = broadcast([mask.reshaped(shape, (0, 0, 0, 0)), mask])[1]
        if len(repeated.shape) > 4:
            repeated = lw.scratch(shape)
            lw.copy(*broadcast([repeated, mask]))
        self.mask = repeated.split(1, group)
        if max_bias > 0:
            self.slopes = lw.constant(alibi_slopes(n2 * group, max_bias).reshape(self.by_head))

    def emit(self) -> None:
        """Emit the steps, tile by tile."""
        lw, limit = self.lw, self.lw.weight_tile
        n3, n2, group, n_q, dk = self.q.shape
        n_kv, dv = self.k.shape[2], self.y.shape[-1]
        n_rows = max(1, min(n_q, limit // max(1, group * n_kv)))
        work = n3 * n2 * n_kv * (EXP * group * n_q + CAST * (dk + dv))
        n = min(n3 * n2, lw.workers(work))
        per_head = n_kv * (dk + dv) + group * n_rows * n_kv
        pieces = list(cuts((n3, n2), per_head, min(limit, n3 * n2 * per_head // n)))
        lists: list[list[Call]] = [[] for _ in range(n)]
        n_heads = max(batch[1] * heads[1] for batch, heads in pieces)
        scratch = [_Scratch(self, n_heads, n_rows) for _ in range(n)]
        for i, (batch, heads) in enumerate(pieces):
            self._add_heads(lists[i % n], scratch[i % n], batch, heads, n_rows)
        lw.emit_parallel(lists)

    def _add_heads(self, calls: list[Call], scratch: _Scratch, batch: Cut, heads: Cut, n_rows: int) -> None:
        """Append the calls of some key heads: keys and values as float32, then the queries in tiles."""

        def matrices(view: View, values: View) -> View:
            part = view.cut(0, *batch).cut(1, *heads)
            return part if part.is_blas_matrix() else _load(calls, values, part)

        k, v = matrices(self.k, scratch.k), matrices(self.v, scratch.v)
        n_q = self.q.shape[3]
        for start in range(0, n_q, n_rows):
            self._add_tile(calls, scratch, k, v, batch, heads, (start, min(n_rows, n_q - start)))

    def _add_tile(
        self, calls: list[Call], scratch: _Scratch, k: View, v: View, batch: Cut, heads: Cut, rows: Cut
    ) -> None:
        def part(view: View) -> View:
            return view.cut(0, *batch).cut(1, *heads).cut(3, *rows)

        def of_heads(values: View | None) -> View | None:
            return None if values is None else values[:, heads[0] : heads[0] + heads[1]]

        grid, n_kv = (batch[1], heads[1], self.group, rows[1]), k.shape[-2]
        q = _load(calls, scratch.q, part(self.q))
        bias = None if self.mask is None else _load(calls, scratch.bias, _once(part(self.mask)))
        scaled = None if self.slopes is None else scratch.scaled.first((*grid, n_kv))
        logits, out = scratch.logits.first((*grid, n_kv)), scratch.out.first((*grid, v.shape[-1]))
        operands = (part(self.y), q, k, v, logits, out, bias, of_heads(self.slopes), scaled)
        factor = self.scale / (self.softcap or 1)
        calls.append((partial(_attend, factor, self.softcap), (*operands, of_heads(self.sinks))))


def _load(calls: list[Call], values: View, view: View) -> View:
    """Append the reading of a view into scratch, and return that."""
    values = values.first(view.value_shape())
    calls.append((kernels.loader(view.type) or kernels.copy, (values, view)))
    return values


def _attend(
    factor: float, softcap: float, y: Array, q: Array, k: Array, v: Array, logits: Array, out: Array,
    bias: Array | None, slopes: Array | None, scaled: Array | None, sinks: Array | None,
) -> None:  # fmt: skip
    flat = (*q.shape[:2], q.shape[2] * q.shape[3], -1)
    np.multiply(q, factor, out=q)
    np.matmul(q.reshape(flat), k.swapaxes(-1, -2), out=logits.reshape(flat))
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
    total = kernels.row_sum(logits)
    if sinks is not None:
        total += np.exp(sinks - peak)
    np.copyto(total, 1, where=total == 0)
    np.matmul(logits.reshape(flat), v, out=out.reshape(flat))
    np.divide(out, total, out=y)


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
