"""Lowering of flash attention: queries per unit of work, and splitting of keys among threads."""

from __future__ import annotations

from ggmlb.backends.common.formulas import alibi_slopes
from ggmlb.backends.common.rules import F32, FLOATS, RESULT, in_rows, operands
from ggmlb.backends.llvm.kernels import attention
from ggmlb.backends.llvm.kernels.attention import MANY_ROWS, HeadParams, record_nbytes, scratch_nbytes
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.backends.llvm.kernels.tiles import columns
from ggmlb.backends.llvm.lowering.context import LEAST_WORK, READ, RULES, LoweringContext, name
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

FEW = 64
"""Largest number of queries per KV head for which keys and values are read in place."""

FEW_ROWS = 4
"""Largest number of queries of a unit that reads in place."""

MAX_HEAD_SIZE = 1024

UNITS_PER_THREAD = 4
"""Least units, or parts of units, per thread, if there are enough keys."""

LEAST_KEYS = 256
"""Least number of keys in a part."""

_MERGE_WORK = 0.1
"""Time to merge one value of a part [ns]."""


_CACHED = frozenset(d for d in READ if d in FLOATS or FORMATS[d.name.lower()].block == 32)


def _head_sizes(node: Tensor) -> str | None:
    k, v = node.sources[1:3]
    for t in (k, v):
        if t.ne[0] % 4 or t.ne[0] > MAX_HEAD_SIZE:
            return f"a head size of {t.ne[0]}: only multiples of 4 up to {MAX_HEAD_SIZE}"
    if k.ne[2] != v.ne[2]:
        return f"keys have {k.ne[2]} heads and values {v.ne[2]}"
    return None


@RULES.rule(
    Op.FLASH_ATTN_EXT,
    operands(FLOATS, _CACHED, _CACHED, FLOATS, F32, out=F32),
    in_rows(0, 1, 2, 3, RESULT),
    _head_sizes,
)
def _flash_attn(node: Tensor, ctx: LoweringContext) -> None:
    q, k, v = node.operand(0), node.operand(1), node.operand(2)
    mask, sinks = node.optional(3), node.optional(4)
    p = node.params
    softcap = float(p["logit_softcap"])
    shape = HeadParams(
        k.ne[0], v.ne[0], name(q), name(k), name(v), mask is not None, sinks is not None, softcap != 0
    )
    group = q.ne[2] // k.ne[2]
    n_queries = q.ne[1] * group
    rows = columns(n_queries, FEW_ROWS) if n_queries <= FEW else MANY_ROWS
    n_units = -(-n_queries // rows) * k.ne[2] * q.ne[3]
    work = k.ne[1] * (k.ne[0] + v.ne[0]) * q.ne[1] * q.ne[2] * q.ne[3] * 0.05
    n_parts = _parts(ctx, work, n_units, k.ne[1])
    scratch = stride = 0
    if n_queries > FEW:
        stride = -(-scratch_nbytes(shape) // 64) * 64
        scratch = ctx.scratch(stride * ctx.n_threads)
    of_mask = (0, 0, 0, 0, 1, 1) if mask is None else (ctx.address(mask), *mask.nb[1:], *mask.ne[2:])
    args: tuple[int | float, ...] = (
        float(p["scale"]) / (softcap or 1.0), softcap,
        *(x for t in (q, k, v, node) for x in (ctx.address(t), *t.nb[1:])),
        *of_mask, ctx.constant(alibi_slopes(q.ne[2], p["max_bias"])),
        ctx.address(sinks) if sinks is not None else 0,
        k.ne[1], q.ne[1], k.ne[2], group, q.ne[3], q.ne[3] // k.ne[3], q.ne[3] // v.ne[3], scratch, stride,
    )  # fmt: skip
    split = n_parts > 1
    if split:
        args += (n_parts, ctx.scratch(n_units * n_parts * rows * record_nbytes(shape.d_v)))
    chunks = ctx.chunks(work, n_units * n_parts)
    if n_queries > FEW:
        ctx.launch(attention.many, (tuple(shape), split), args, chunks)
    else:
        ctx.launch(attention.few, (tuple(shape), rows, split), args, chunks)
    if split:
        merging = n_units * rows * n_parts * shape.d_v * _MERGE_WORK
        ctx.launch(attention.merge, (tuple(shape), rows), args, ctx.chunks(merging, n_units))


def _parts(ctx: LoweringContext, work: float, n_units: int, n_kv: int) -> int:
    """Return the number of parts to split the keys into, so that all threads have work."""
    if ctx.n_threads == 1 or work < LEAST_WORK:
        return 1
    return max(1, min(-(-UNITS_PER_THREAD * ctx.n_threads // n_units), n_kv // LEAST_KEYS))
