"""Lowering of ops on rows: normalisation, soft max, rope, copies, get_rows and set_rows."""

from __future__ import annotations

from math import log, prod
from typing import Any

from ggmlb.backends.common.formulas import alibi_slopes, pair_angles
from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.rules import (
    ANY,
    F32,
    FLOATS,
    I32,
    INDEX,
    RESULT,
    converts,
    in_rows,
    operands,
    same_shape_of_blocks,
    same_types,
)
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm.kernels import convert, norm, rope
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.backends.llvm.kernels.convert import WRITERS, can_convert
from ggmlb.backends.llvm.lowering.context import RULES, LoweringContext, name
from ggmlb.backends.llvm.lowering.elementwise import elementwise
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, RopeType
from ggmlb.core.tensor import Ne, Tensor, contiguous_nb

_NORM, _SOFT_MAX, _ROPE = 0.2, 0.6, 0.4
_COPY, _TRANSPOSE, _STRIDED, _BLOCKS = 0.1, 0.3, 1.0, 0.3
"""Time of an element on one thread [ns]."""

VECTOR_WORDS = 16
"""32-bit lanes of the widest vector."""

# -- normalisation and soft max --------------------------------------------------------------------


@RULES.rule((Op.NORM, Op.RMS_NORM, Op.L2_NORM), operands(FLOATS), in_rows(0, RESULT))
def _norm(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    params = (node.op.value.lower(), (name(node), name(a)), 0)
    ctx.launch_rows(norm.normalise, params, [float(node.params["eps"])], node.ne, [node, a], _NORM)


def _of_rows(group: Group) -> str | None:
    if any(node is not group.parts.get("add") for node in group.kept):
        return "a result other than the sum is kept"
    first = group.parts.get("add", group["norm"])
    tensors = [group.result, *(s for s in first.src if s is not None)]
    tensors += [group.other(part) for part in ("mul", "shift") if part in group]
    n = group.result.ne[0]
    in_rows = all(t.dtype is DType.F32 and t.is_contiguous_rows() and t.ne[0] == n for t in tensors)
    return None if in_rows else "not in rows of f32"


@RULES.rule("norm", _of_rows)
def _norm_group(group: Group, ctx: LoweringContext) -> None:
    node, result = group["norm"], group.result
    first = group.parts.get("add", node)
    added, kept = "add" in group, bool(group.kept)
    tensors = [result, first.operand(0)]
    if added:
        tensors.append(first.operand(1))
    if kept:
        tensors.append(first)
    factors = [group.other(part) for part in ("mul", "shift") if part in group]
    params = (node.op.value.lower(), ("f32", "f32"), len(factors), added, kept)
    eps = float(node.params["eps"])
    ctx.launch_rows(norm.normalise, params, [eps], result.ne, [*tensors, *factors], _NORM)


@RULES.rule(Op.SOFT_MAX, operands(F32, FLOATS, F32, out=F32), in_rows(0, RESULT))
def _soft_max(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    mask, sinks = node.optional(1), node.optional(2)
    slopes = ctx.constant(alibi_slopes(node.ne[2], node.params["max_bias"]))
    of_mask = (0, 0, 0, 0, 1, 1)
    if mask is not None:
        of_mask = (ctx.address(mask), *mask.nb[1:], mask.ne[2], mask.ne[3])
    sink = ctx.address(sinks) if sinks is not None else 0
    params = (name(mask) if mask is not None else None, sinks is not None)
    args = (float(node.params["scale"]), slopes, sink, *of_mask)
    ctx.launch_rows(norm.soft_max, params, args, node.ne, [node, a], _SOFT_MAX)


# -- rotary positions ------------------------------------------------------------------------------


def _few_dimensions(node: Tensor) -> str | None:
    if node.params["n_dims"] > rope.MOST_PAIRS:
        return f"{node.params['n_dims']} dimensions are turned: at most {rope.MOST_PAIRS}"
    return None


@RULES.rule((Op.ROPE, Op.ROPE_BACK), operands(FLOATS, I32, F32), in_rows(0, 1, 2, RESULT), _few_dimensions)
def _rope(node: Tensor, ctx: LoweringContext) -> None:
    _rotate(node, None, ctx)


def _rotate(node: Tensor, cache: Tensor | None, ctx: LoweringContext) -> None:
    """Emit the step of a rope; if `cache` (a set_rows) is given, write tokens to its rows by index."""
    a, positions = node.operand(0), node.operand(1)
    factors = node.optional(2)
    p = node.params
    mode = p["mode"]
    n_pairs = p["n_dims"] if mode == RopeType.VISION else p["n_dims"] // 2
    magnitude = float(p["attn_factor"])
    if p["ext_factor"]:
        magnitude *= 1 + 0.1 * log(1 / p["freq_scale"])
    direction = 1.0 if node.op is Op.ROPE else -1.0
    angle, channel = pair_angles(n_pairs, p)
    width = next(w for w in (16, 8, 4, 2, 1) if n_pairs % w == 0)
    result: tuple[int, ...] = (ctx.address(node), *node.nb[1:])
    of_index: tuple[int, ...] = ()
    index = None
    if cache is not None:
        ids = cache.operand(1)
        result = (ctx.address(cache), cache.dtype.row_size(node.ne[0]), *cache.nb[1:3])
        of_index = (ctx.address(ids), *ids.nb[:2], ids.ne[1], cache.ne[1], *ctx.report)
        index = name(ids)
    args = (
        magnitude, direction, *result, ctx.address(a), *a.nb[1:],
        node.ne[0], *node.ne[1:], ctx.address(positions), ctx.constant(angle), ctx.constant(channel),
        ctx.address(factors) if factors is not None else 0, n_pairs, p["offset"], *of_index,
    )  # fmt: skip
    types, multi = (name(cache or node), name(a)), bool(mode & RopeType.MROPE)
    params = (types, width, mode == RopeType.NORMAL, factors is not None, multi, index)
    ctx.launch(rope.rope, params, args, ctx.chunks(node.n_elements * _ROPE, node.ne[2] * node.ne[3]))


def _to_cache(group: Group) -> str | None:
    cache, n = group.result, group["rope"].ne[0]
    if cache.dtype in FLOATS or (name(cache) in WRITERS and n % 32 == 0 and n <= 2 * rope.MOST_PAIRS):
        return None
    return "no kernel writes such rows"


@RULES.rule("rope_set_rows", _to_cache)
def _rope_set_rows(group: Group, ctx: LoweringContext) -> None:
    _rotate(group["rope"], group.result, ctx)


# -- copies ----------------------------------------------------------------------------------------


def _work(src: DType, out: DType) -> float:
    return _BLOCKS if src.is_quantized or out.is_quantized else _COPY


_converts = converts(lambda src, out: can_convert(src.name.lower(), out.name.lower()))


def _same_order(node: Tensor) -> str | None:
    a = node.operand(0)
    if a.ne != node.ne and not (a.is_contiguous() or node.is_contiguous()):
        return "the shapes differ, and neither src0 nor the result is contiguous"
    return None


@RULES.rule((Op.DUP, Op.CPY, Op.CONT), _converts, same_shape_of_blocks, _same_order)
def _copy(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    x, y = ctx.mem(a), ctx.mem(node)
    if a.ne != node.ne and node.is_contiguous():
        y = y.window(a.ne, contiguous_nb(y.dtype, a.ne))
    elif a.ne != node.ne:
        x = x.window(node.ne, contiguous_nb(x.dtype, node.ne))
    copied(y, x, ctx)


_INTS = {(DType.I32, DType.F32): "of_int", (DType.F32, DType.I32): "to_int"}


def _is_number(node: Tensor) -> str | None:
    a = node.operand(0)
    if (a.dtype, node.dtype) not in _INTS:
        return _converts(node)
    return None if a.ne == node.ne else "the shapes differ"


@RULES.rule((Op.DUP, Op.CPY, Op.CONT), _is_number, in_rows(0, RESULT))
def _cast(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    words = [ctx.mem(t).window(t.ne, dtype=DType.F32) for t in (node, a)]  # integers as the bits of floats
    elementwise(_INTS[a.dtype, node.dtype], (), words, _COPY, ctx)


def _is_movable(node: Tensor) -> str | None:
    return None if can_convert(name(node), name(node)) else f"no kernel copies {name(node)}"


@RULES.rule(Op.CONCAT, same_types, _is_movable)
def _concat(node: Tensor, ctx: LoweringContext) -> None:
    dim, start, y = node.params["dim"], 0, ctx.mem(node)
    for a in node.sources:
        copied(y.window(a.ne, offset=start), ctx.mem(a), ctx)
        start += a.dtype.row_size(a.ne[0]) if dim == 0 else a.ne[dim] * node.nb[dim]


def _is_within_zeros(node: Tensor) -> str | None:
    return "circular padding" if node.params["circular"] else None


@RULES.rule(Op.PAD, operands(FLOATS), same_types, in_rows(0, RESULT), _is_within_zeros)
def _pad(node: Tensor, ctx: LoweringContext) -> None:
    a, left = node.operand(0), node.params["left"]
    elementwise("fill", (0.0,), [node, node], _COPY, ctx)
    start = sum(n * nb for n, nb in zip(left, node.nb, strict=True))
    if not a.is_empty:
        copied(ctx.mem(node).window(a.ne, offset=start), ctx.mem(a), ctx)


def copied(y: Mem, x: Mem, ctx: LoweringContext) -> None:
    """Append the step that copies `x` to `y`, of the same shape."""
    blocks, ne, work = x.dtype.is_quantized or y.dtype.is_quantized, y.ne, _work(x.dtype, y.dtype)
    types = (name(y), name(x))
    if all(m.ne[0] == m.dtype.block_size or m.nb[0] == m.dtype.type_size for m in (x, y)):
        ctx.launch_rows(convert.copy, types, (), ne, [y, x], work, join=not blocks, cut=not blocks)
        return
    along = _transposed_dimension(y, x)
    if along is not None:
        others = [d for d in (1, 2, 3) if d != along]
        args = [
            ctx.address(y), *(y.nb[d] for d in (along, *others)),
            ctx.address(x), *(x.nb[d] for d in (0, *others)), ne[0], *(ne[d] for d in (along, *others)),
        ]  # fmt: skip
        most = -(-ne[along] // VECTOR_WORDS) * ne[others[0]] * ne[others[1]]
        ctx.launch(convert.transpose, (), args, ctx.chunks(prod(ne) * _TRANSPOSE, most))
        return
    ne, y, x = _longest_first(ne, y, x)
    ctx.launch_rows(convert.copy_strided, types, (y.nb[0], x.nb[0]), ne, [y, x], _STRIDED, cut=True)


def _transposed_dimension(y: Mem, x: Mem) -> int | None:
    """The dimension along which 32-bit elements of `x` are contiguous, if it is not 0; else `None`."""
    if y.dtype != x.dtype or x.dtype.is_quantized or x.dtype.type_size != 4 or y.nb[0] != 4:
        return None
    return next((d for d in (1, 2, 3) if x.nb[d] == 4 and x.ne[d] > 1 and x.ne[0] > 1), None)


def _longest_first(ne: Ne, y: Mem, x: Mem) -> tuple[Ne, Mem, Mem]:
    """Permute a long dimension to the front where rows are short, for fewer and longer inner loops."""
    if ne[0] >= 16 or max(ne) == ne[0]:
        return ne, y, x
    i = max(range(4), key=lambda d: ne[d])
    order = [i, *(d for d in range(4) if d != i)]
    permuted: list[Any] = [tuple(v[d] for d in order) for v in (ne, y.nb, x.nb)]
    return permuted[0], y.window(permuted[0], permuted[1]), x.window(permuted[0], permuted[2])


# -- rows by index ---------------------------------------------------------------------------------

_ROWS = _converts, in_rows(0, RESULT), operands(ANY, INDEX, out=ANY)


@RULES.rule(Op.GET_ROWS, *_ROWS)
def _get_rows(node: Tensor, ctx: LoweringContext) -> None:
    a, ids = node.operand(0), node.operand(1)
    args = (ctx.address(a), *a.nb[1:], ctx.address(ids), *ids.nb[:3], a.ne[1], *ctx.report)
    params, cut = (name(node), name(a), name(ids)), name(a) not in FORMATS
    ctx.launch_rows(convert.get_rows, params, args, node.ne, [node], _work(a.dtype, node.dtype), cut=cut)


@RULES.rule(Op.SET_ROWS, *_ROWS)
def _set_rows(node: Tensor, ctx: LoweringContext) -> None:
    a, ids = node.operand(0), node.operand(1)
    if a.is_empty:
        return
    args = (
        ctx.address(node), *node.nb[1:], ctx.address(ids), *ids.nb[:3], ids.ne[1], ids.ne[2],
        node.ne[1], *ctx.report,
    )  # fmt: skip
    params, cut = (name(node), name(a), name(ids)), not node.dtype.is_quantized
    ctx.launch_rows(convert.set_rows, params, args, a.ne, [a], _work(a.dtype, node.dtype), cut=cut)


@RULES.rule(Op.ADD_ID, operands(FLOATS, FLOATS, I32), in_rows(0, 1, RESULT))
def _add_id(node: Tensor, ctx: LoweringContext) -> None:
    a, b, ids = (node.operand(i) for i in range(3))
    args = (ctx.address(b), b.nb[1], ctx.address(ids), *ids.nb[:2], b.ne[1], *ctx.report)
    params = ((name(node), name(a), name(b)),)
    ctx.launch_rows(convert.add_id, params, args, node.ne, [node, a], _COPY, cut=True)
