"""Fused attention on tensor cores: warps split many queries by rows, and few queries by keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.formulas import alibi
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.kernels.base import PACKAGE, RULES
from ggmlb.backends.gpu import Scratch
from ggmlb.backends.gpu.launch import launch
from ggmlb.backends.gpu.lowering.attention import ATTENTION
from ggmlb.backends.gpu.lowering.matmul import too_many_groups
from ggmlb.backends.gpu.source import kernels
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu import Launch, Target

CACHED = frozenset({DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1})
"""Types of keys and values within the range of the tensor cores' f16 or bf16; the portable kernel computes
others."""

ROWS = 16
"""Query rows of a warp."""

MAX_HEAD_SIZE = 256
"""Largest head of which a warp holds all sums; of larger ones, WARPS_OF_HEAD warps hold a part each."""

WARPS_OF_HEAD = 4

BIG_HEAD = 128
"""Beyond this, queries are kept in shared memory, and tiles have fewer keys."""


def _for_tensor_cores(node: Tensor) -> str | None:
    k, v = node.operand(1), node.operand(2)
    d_k, d_v = k.ne[0], v.ne[0]
    step = 16 if d_k <= MAX_HEAD_SIZE else 16 * WARPS_OF_HEAD
    if d_k % step or d_v % step or d_v > d_k or k.ne[2] != v.ne[2]:
        return f"head sizes of {d_k} and {d_v}: only multiples of {step}, values not larger"
    return None if {k.dtype, v.dtype} <= CACHED else "keys or values not of f16, bf16, q8_0, q4 or q5"


def _sets_fit(node: Tensor, target: Target) -> str | None:
    return too_many_groups(target, 1, node.operand(1).ne[2] * node.operand(0).ne[3])


@RULES.rule(Op.FLASH_ATTN_EXT, *ATTENTION, _for_tensor_cores, on=_sets_fit)
def _flash_attn(node: Tensor, target: Target) -> list[Launch]:
    q, k, v = node.operand(0), node.operand(1), node.operand(2)
    mask, sinks = node.optional(3), node.optional(4)
    d_k, d_v = k.ne[0], v.ne[0]
    per_kv, big, large = q.ne[2] // k.ne[2], d_k > BIG_HEAD, d_k > MAX_HEAD_SIZE
    n_rows, n_sets = q.ne[1] * per_kv, k.ne[2] * q.ne[3]
    few = n_rows <= ROWS
    warps_m, warps_n = (1, 2 if big else 4) if few else (2 if big else 4, 1)
    keys = (32 if few else 16) if big else 64
    if large:
        warps_n, keys = 1, 16
    # Groups per multiprocessor, limited by registers.
    resident = (2 if large else 3 if d_k > 64 else 4) if few else (1 if large else 2)
    n_blocks, tiles = -(-n_rows // (ROWS * warps_m)), -(-k.ne[1] // keys)
    # One wave of groups, without a partial second one; each with two tiles or more, and four keys per row, as
    # parts are written and read again.
    most = tiles * keys // max(2 * keys, 4 * ROWS * warps_m)
    splits = max(1, min(resident * target.n_units // (n_sets * n_blocks), most))
    per_split = -(-tiles // splits)
    splits = -(-tiles // per_split)
    in_parts = warps_n > 1 or splits > 1
    flags: dict[str, str | int] = {
        "D_K": d_k, "D_V": d_v, "KEYS": keys, "WARPS_M": warps_m, "WARPS_N": warps_n,
        "WARPS_D": WARPS_OF_HEAD if large else 1, "PARTS": int(in_parts), "Q_SHARED": int(big and not large),
        "K_ASYNC": int(_in_vectors(k)), "V_ASYNC": int(_in_vectors(v)),
        "K_TILE": _tile(k), "V_TILE": _tile(v),
    }  # fmt: skip
    extra = {"MASK": _mask_words(mask)} if mask is not None else {}
    if node.params["logit_softcap"]:
        extra["SOFTCAP"] = 1
    sink_flag: dict[str, str | int] = {"SINKS": 1} if sinks is not None else {}
    parts = Scratch(4 * n_sets * splits * n_rows * d_v).mem(DType.F32, (d_v, n_rows, splits, n_sets))
    facts = Scratch(8 * n_sets * splits * n_rows).mem(DType.F32, (2, n_rows, splits, n_sets))
    out, absent = Mem.of(node), Mem.of(q)  # absent operands are not read
    given = [Mem.of(t) if t is not None else absent for t in (q, k, v, mask, sinks)]
    p = node.params
    numbers = p["scale"], p["logit_softcap"], p["max_bias"], *alibi(q.ne[2], p["max_bias"]), per_split * keys
    found = kernels(PACKAGE)
    held = [parts, facts] if in_parts else [out, out]
    wg = 32 * warps_m * warps_n * (WARPS_OF_HEAD if large else 1)
    steps = [
        launch(
            found["flash_mma"], [*given, out, *held, *numbers], (n_blocks, splits, n_sets), wg,
            **flags, **extra, **sink_flag,
        )
    ]  # fmt: skip
    if in_parts:
        combine: list[Mem | int] = [parts, facts, given[4], out, splits, per_kv]
        steps.append(
            launch(found["flash_combine"], combine, (n_rows, k.ne[2], q.ne[3]), 128, D_V=d_v, **sink_flag)
        )
    return steps


def _mask_words(mask: Tensor) -> int:
    """Return 3 if rows of f16 consist of aligned 16-byte vectors, 2 for 4-byte words, else 1."""
    starts = (2 * mask.ne[0], mask.offset, *mask.nb[1:])
    return next((n for n, size in ((3, 16), (2, 4)) if not any(x % size for x in starts)), 1)


def _in_vectors(t: Tensor) -> bool:
    """Whether rows of f16 or bf16 consist of aligned 16-byte vectors."""
    return t.dtype in (DType.F16, DType.BF16) and not any(x % 16 for x in (t.offset, *t.nb[1:]))


def _tile(t: Tensor) -> str:
    """Return the type of the tiles of keys or values in shared memory."""
    return "bf16" if t.dtype is DType.BF16 else "f16"
