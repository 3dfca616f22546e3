"""Lowering of attention: the size of units, and their distribution over threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.formulas import alibi_slopes
from ggmlb.backends.common.rules import F32, FLOATS, RESULT, in_rows, operands
from ggmlb.backends.llvm.kernels import attention
from ggmlb.backends.llvm.kernels.attention_units import MANY_ROWS, HeadParams, record_nbytes, scratch_nbytes
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.backends.llvm.kernels.tiles import columns
from ggmlb.backends.llvm.lowering.rules import READ, RULES, name
from ggmlb.backends.llvm.lowering.steps import LEAST_WORK
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

FEW = 8
"""Queries of a head of keys up to which keys and values are read as they lie."""

FEW_ROWS = 4
"""Queries of a unit at most, with few."""

MAX_HEAD_SIZE = 1024

UNITS_PER_THREAD = 4
"""Units, or parts of units, that each thread gets at least, if there are keys enough."""

LEAST_KEYS = 256
"""Keys of a part at least."""

_MERGE_WORK = 0.1
"""Work of a value of a part that is taken in [ns]."""


_CACHED = frozenset(d for d in READ if d in FLOATS or FORMS[d.name.lower()].block == 32)


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
def _flash_attn(node: Tensor, steps: Steps) -> None:
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
    n_parts = _parts(steps, work, n_units, k.ne[1])
    scratch = stride = 0
    if n_queries > FEW:
        stride = -(-scratch_nbytes(shape) // 64) * 64
        scratch = steps.scratch(stride * steps.n_threads)
    place = (0, 0, 0, 0, 1, 1) if mask is None else (steps.address(mask), *mask.nb[1:], *mask.ne[2:])
    args: tuple[int | float, ...] = (
        float(p["scale"]) / (softcap or 1.0), softcap,
        *(x for t in (q, k, v, node) for x in (steps.address(t), *t.nb[1:])),
        *place, steps.constant(alibi_slopes(q.ne[2], p["max_bias"])),
        steps.address(sinks) if sinks is not None else 0,
        k.ne[1], q.ne[1], k.ne[2], group, q.ne[3], q.ne[3] // k.ne[3], q.ne[3] // v.ne[3], scratch, stride,
    )  # fmt: skip
    split = n_parts > 1
    if split:
        args += (n_parts, steps.scratch(n_units * n_parts * rows * record_nbytes(shape.d_v)))
    chunks = steps.chunks(work, n_units * n_parts)
    if n_queries > FEW:
        steps.emit(attention.many, (tuple(shape), split), args, chunks)
    else:
        steps.emit(attention.few, (tuple(shape), rows, split), args, chunks)
    if split:
        merging = n_units * rows * n_parts * shape.d_v * _MERGE_WORK
        steps.emit(attention.merge, (tuple(shape), rows), args, steps.chunks(merging, n_units))


def _parts(steps: Steps, work: float, n_units: int, n_kv: int) -> int:
    """Into how many parts keys are cut, so that there is work for all threads."""
    if steps.n_threads == 1 or work < LEAST_WORK:
        return 1
    return max(1, min(-(-UNITS_PER_THREAD * steps.n_threads // n_units), n_kv // LEAST_KEYS))
