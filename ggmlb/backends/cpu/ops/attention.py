"""Fused attention (FLASH_ATTN_EXT), in tiles of heads and queries."""

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


def _same_heads(node: Tensor) -> str | None:
    k, v = node.sources[1:3]
    return None if k.ne[2] == v.ne[2] else f"k has {k.ne[2]} heads, v has {v.ne[2]}"


@RULES.rule(Op.FLASH_ATTN_EXT, operands(FLOATS, VALUES, VALUES, FLOATS, F32, out=F32), _same_heads)
def flash_attn_ext(lw: NodeLowering, t: Tensor) -> None:
    """`soft_max(q k^T scale + slope mask) v`, with capped logits and sinks; fully masked rows give 0.

    Query heads share the keys and values of their group. A tile is some key heads, with all their query
    heads and some of the queries, so that logits and float32 copies of keys and values stay small.
    """
    q, k, v = (lw.view(t.operand(i)) for i in range(3))
    mask, sinks, params = t.optional(3), t.optional(4), t.params
    group = q.shape[1] // k.shape[1]
    q, y = q.split(1, group), lw.view(t).transposed(0, 2, 1, 3).split(1, group)  # batch, head, group, row
    (n3, n2, _, n_q, dk), n_kv, dv = q.shape, k.shape[2], y.shape[4]
    by_head = (1, n2, group, 1, 1)
    bias = None if mask is None else _repeated(lw, lw.view(mask).cut(2, 0, n_q), q.shape)
    slopes = None
    if bias is not None and params["max_bias"] > 0:
        slopes = lw.constant(alibi_slopes(n2 * group, params["max_bias"]).reshape(by_head))
    sink = None if sinks is None else lw.view(sinks).reshape(*by_head)
    softcap = params["logit_softcap"]
    attend = partial(_attend, params["scale"] / (softcap or 1), softcap)

    n_rows = max(1, min(n_q, lw.weight_tile // max(1, group * n_kv)))
    n = min(n3 * n2, lw.workers(n3 * n2 * n_kv * (EXP * group * n_q + CAST * (dk + dv))))
    per_head = n_kv * (dk + dv) + group * n_rows * n_kv
    pieces = list(cuts((n3, n2), per_head, min(lw.weight_tile, n3 * n2 * per_head // n)))
    n_heads = max(batch[1] * heads[1] for batch, heads in pieces)
    n_queries = n_heads * group * n_rows
    sizes = [n_heads * n_kv * dk, n_heads * n_kv * dv, n_queries * dk, n_queries * dv]
    sizes += [n_queries * n_kv * is_used for is_used in (True, bias is not None, slopes is not None)]
    scratch = [[lw.scratch((size,)) for size in sizes] for _ in range(n)]
    lists: list[list[Call]] = [[] for _ in range(n)]
    for i, (batch, heads) in enumerate(pieces):
        calls, (k32, v32, q32, out, logits, bias32, scaled) = lists[i % n], scratch[i % n]
        here = slice(heads[0], heads[0] + heads[1])
        keys = _for_blas(calls, k32, k.cut(0, *batch)[:, here])
        values = _for_blas(calls, v32, v.cut(0, *batch)[:, here])
        for start in range(0, n_q, n_rows):
            rows = slice(start, min(start + n_rows, n_q))
            q_part, y_part = (x.cut(0, *batch)[:, here, :, rows] for x in (q, y))
            grid = y_part.shape[:4]
            operands = (
                y_part,
                _load(calls, q32, q_part),
                keys,
                values,
                logits.first((*grid, n_kv)),
                out.first((*grid, dv)),
                bias and _load(calls, bias32, _once(bias.cut(0, *batch)[:, here, :, rows])),
                slopes and slopes[:, here],
                slopes and scaled.first((*grid, n_kv)),
                sink and sink[:, here],
            )
            calls.append((attend, operands))
    lw.emit_parallel(lists)


def _repeated(lw: NodeLowering, mask: View, heads: tuple[int, ...]) -> View:
    """Broadcast a mask to batch and heads, by strides of 0 or, if impossible, a copy."""
    n3, n2, group = heads[:3]
    shape = (n3, n2 * group, *mask.shape[2:])
    repeated = broadcast([mask.reshaped(shape, (0, 0, 0, 0)), mask])[1]
    if len(repeated.shape) > 4:
        repeated = lw.scratch(shape)
        lw.copy(*broadcast([repeated, mask]))
    return repeated.split(1, group)


def _load(calls: list[Call], values: View, view: View) -> View:
    """Append the conversion of a view into scratch, and return that."""
    values = values.first(view.value_shape())
    calls.append((kernels.loader(view.type) or kernels.copy, (values, view)))
    return values


def _for_blas(calls: list[Call], values: View, view: View) -> View:
    """Return the view if BLAS can read its matrices in place; else as `_load`."""
    return view if view.is_blas_matrix() else _load(calls, values, view)


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


def _once(view: View) -> View:
    """The view with extent 1 in place of strides of 0: NumPy broadcasts it again."""
    shape = tuple(1 if stride == 0 else n for n, stride in zip(view.shape, view.strides, strict=True))
    return view.reshaped(shape, view.strides)
