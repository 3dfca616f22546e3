"""Rotary position embedding."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

from ggmlb.backends.common.formulas import yarn_range
from ggmlb.backends.common.rules import F32, FLOATS, I32, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import BadIndex, Launch, Target, launch, rowwise, vector_width
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, RopeType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ggmlb.backends.common.fusion import Group
    from ggmlb.core.tensor import Tensor


@RULES.rule((Op.ROPE, Op.ROPE_BACK), operands(FLOATS, I32, F32))
def _rope(node: Tensor, target: Target) -> list[Launch]:
    return [_launch(node, target, Mem.of(node), None)]


def _launch(node: Tensor, target: Target, d: Mem, put: Tensor | None) -> Launch:
    """Return the launch that writes to `d`, or to the rows of a cache given by `put`."""
    a, positions = node.operand(0), node.operand(1)
    factors = node.optional(2)
    p = node.params
    n_pairs = p["n_dims"] if p["mode"] == RopeType.VISION else p["n_dims"] // 2
    vec = _vector_width(Mem.of(a), d, p["mode"] == RopeType.NORMAL, n_pairs, p["offset"])
    pieces = (2 if p["mode"] == RopeType.NORMAL else 1) * n_pairs // vec
    n_heads = _heads_of_group(node, pieces, target)
    d = d.window((d.ne[0], d.ne[1] // n_heads, d.ne[2], d.ne[3]))
    flags: dict[str, int] = {} if target.on_cpu else {"PER_LANE": 16 if vec > 1 else 4, "VEC": vec}
    flags |= {name: 1 for name, there in (("FACTORS", factors), ("PUT", put)) if there is not None}
    mems = [Mem.of(a), Mem.of(positions), Mem.of(factors or positions)]
    mems += (
        [Mem.of(positions), d, d]
        if put is None
        else [Mem.of(put.sources[1]), BadIndex(put, put.ne[1]).mem, d]
    )
    numbers = (
        0 if put is None else put.ne[1], n_heads, n_pairs, p["n_dims"], p["offset"], *p["sections"],
        *_frequencies(p), 1.0 if node.op is Op.ROPE else -1.0,
    )  # fmt: skip
    return rowwise(target, "rope", mems, *numbers, MODE=int(p["mode"]), **flags)


def _frequencies(p: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the numbers from which a kernel computes angles, and the factor of sines and cosines."""
    ext, scale = p["ext_factor"], p["freq_scale"]
    magnitude = p["attn_factor"] * (1 + 0.1 * log(1 / scale) if ext else 1)
    return p["freq_base"], scale, ext, magnitude, *yarn_range(p)


def _vector_width(a: Mem, d: Mem, side_by_side: bool, n_pairs: int, first: int) -> int:
    """Return the vector width along rows [elements]; 1 if pairs or the offset are not whole vectors."""
    vec = vector_width([a, d])
    is_whole = (2 * n_pairs if side_by_side else n_pairs) % vec == first % vec == 0
    return vec if is_whole else 1


def _heads_of_group(node: Tensor, n_pieces: int, target: Target) -> int:
    """Return the number of heads that a group rotates by the same angles: all, or enough for its work-items.

    With far more tokens than multiprocessors, four times as many.
    """
    heads = node.ne[1]
    if target.on_cpu:
        return heads
    most = max(1, target.wg // max(n_pieces, 1))
    if heads * node.ne[2] * node.ne[3] >= 4 * most * 8 * target.n_units:
        most *= 4
    return next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)


def _to_floats(group: Group) -> str | None:
    return None if group.result.dtype in FLOATS else "the cache is not f32, f16 or bf16"


@RULES.rule("rope_set_rows", _to_floats)
def _put(group: Group, target: Target) -> list[Launch]:
    """Write all heads of a token to the row of the cache that the index selects."""
    node, cache = group["rope"], group.result
    size = cache.dtype.type_size
    d = Mem.of(cache).window(node.ne, (size, size * node.ne[0], cache.nb[1], cache.nb[2]))
    return [_launch(node, target, d, cache)]


LANES = 32
"""Work-items of a head where few tokens are rotated."""


def _whole_heads(group: Group) -> str | None:
    query, key, value = group["q_rope"], group["k_rope"], group["v_rows"].operand(0)
    p, size = query.params, query.ne[0]
    if p["mode"] not in (RopeType.NORMAL, RopeType.NEOX) or (p["n_dims"], p["offset"]) != (size, 0):
        return "rope of parts of heads, or of several positions"
    if "q_norm" in group and group["q_norm"].params != group["k_norm"].params:
        return "norms of queries and keys differ"
    parts = ("q_norm", "k_norm") if "q_norm" in group else ("q_rope", "k_rope")
    rows = [group[part].operand(0) for part in parts]
    rows += [group.other(part) for part in ("q_mul", "k_mul") if part in group]
    if any(t.dtype is not DType.F32 or t.nb[0] != 4 for t in (*rows, value)):
        return "heads that are not in rows of f32"
    if any(t.ne[3] != 1 for t in (query, key)) or value.ne[2:] != (1, 1) or query.ne[2] != value.ne[1]:
        return "several batches of tokens"
    if any(t.ne != (size, 1, 1, 1) for t in rows[2:]):
        return "factors of norms that differ between heads"
    return _to_floats(group) or (None if group["k_rows"].dtype in FLOATS else "the cache is not of floats")


def _few_rows(group: Group, target: Target) -> str | None:
    """Beyond one wave of groups, angles cost more than a launch: `rope` computes them for several heads."""
    query, key = group["q_rope"], group["k_rope"]
    if target.on_cpu or target.wg % LANES:
        return "no groups of lanes"
    few = (query.ne[1] + key.ne[1]) * query.ne[2] <= 64 * target.n_units
    return None if few else "many tokens"


@RULES.rule("rope_kv", _whole_heads, on=_few_rows)
def _rope_kv(group: Group, target: Target) -> list[Launch]:
    query, key, keys, values = (group[part] for part in ("q_rope", "k_rope", "k_rows", "v_rows"))
    is_normed = "q_norm" in group
    a, k = (group[part].operand(0) for part in (("q_norm", "k_norm") if is_normed else ("q_rope", "k_rope")))
    w, x = (group.other("q_mul"), group.other("k_mul")) if is_normed else (a, k)
    v, positions, factors, ids = values.operand(0), query.operand(1), query.optional(2), values.operand(1)
    n, size = key.ne[0], keys.dtype.type_size
    c = Mem.of(keys).window((*key.ne[:2], keys.ne[1], 1), (size, size * n, *keys.nb[1:3]))
    flags: dict[str, int] = {"MODE": int(query.params["mode"]), "LANES": LANES, "PAIRS": -(-n // (2 * LANES))}
    flags |= {name: 1 for name, there in (("FACTORS", factors), ("NORMED", is_normed)) if there}
    mems = [Mem.of(t) for t in (a, k, v, w, x, positions, factors or positions, ids)]
    mems += [BadIndex(keys, keys.ne[1]).mem, Mem.of(query), c, Mem.of(values)]
    eps = group["q_norm"].params["eps"] if is_normed else 0.0
    heads = query.ne[1] + key.ne[1] + -(-v.ne[0] // n)
    groups = -(-heads * LANES // target.wg), v.ne[1], 1
    return [
        launch("rope_kv", [*mems, keys.ne[1], *_frequencies(query.params), eps], groups, target.wg, **flags)
    ]
