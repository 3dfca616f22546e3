"""Lowering of convolutions, with the nodes behind them, and of pools."""

from __future__ import annotations

from math import prod

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.rules import F32, FLOATS, RESULT, has_elements, in_rows, operands
from ggmlb.backends.llvm.kernels import conv, float_tiles, tiles
from ggmlb.backends.llvm.kernels.conv import Tail, TailStep
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS
from ggmlb.backends.llvm.lowering.context import RULES, LoweringContext, name
from ggmlb.backends.llvm.lowering.elementwise import PARAMS, function_of
from ggmlb.core.enums import Op, OpPool
from ggmlb.core.tensor import Tensor

MOST_TAPS = 64
"""Largest kernel of a depthwise convolution, unrolled."""

_MACS, _DEPTHWISE, _POOL = 25, 12, 4
"""Multiplications, and elements of windows, of one thread in a nanosecond."""

# -- the nodes behind a convolution ----------------------------------------------------------------


def _tail_of(group: Group) -> list[tuple[TailStep, Tensor]] | str:
    """Return the nodes behind the group's convolution, each with its operand or itself; or a reason."""
    found, result = [], group.result
    n_pixels, channel = _pixels(group["conv"]), 0
    while prod(result.ne[:channel]) < n_pixels:
        channel += 1
    if not result.is_contiguous() or result.ne[channel] != _channels(group["conv"]):
        return "the result is not in planes"
    for part, node in group.parts.items():
        if not part.startswith("tail"):
            continue
        fn, operand = function_of(node), node
        if node.op in (Op.ADD, Op.MUL):
            operand = group.other(part)
            one = tuple(n if d == channel else 1 for d, n in enumerate(result.ne))
            if operand.ne not in (one, result.ne) or operand.dtype not in F32:
                return "an operand of another shape or type"
            if operand.ne == result.ne and not operand.is_contiguous():
                return "an operand that is not in planes"
            found.append((TailStep(fn, 0, "channels" if operand.ne == one else "pixels"), operand))
        elif fn in FUNCTIONS:
            found.append((TailStep(fn, len(PARAMS.get(fn, ()))), node))
        else:
            return f"no kernel for {fn}"
        if node.ne != result.ne or node.dtype not in F32:
            return "a result of another shape or type"
    return found


def _channels(node: Tensor) -> int:
    return node.ne[1 if node.op is Op.MUL_MAT else 2]


def _pixels(node: Tensor) -> int:
    return node.ne[0] * (1 if node.op is Op.MUL_MAT else node.ne[1])


def _tail_args(group: Group | None, ctx: LoweringContext) -> tuple[Tail, list[int | float]]:
    """Return the steps behind a convolution, and the kernel's arguments for them."""
    found = _tail_of(group) if group is not None else []
    assert not isinstance(found, str)
    args: list[int | float] = []
    for step, node in found:
        if step.operand is None:
            args += [float(node.params[p]) for p in PARAMS.get(step.function, ())]
        else:
            n = node.n_elements // max(node.ne[3], 1)
            plane = 4 * (n // _channels(group["conv"])) if group is not None else 0
            args += [ctx.address(node), plane, 4 * n if node.ne[3] > 1 else 0]
    return tuple(step for step, _ in found), args


# -- convolutions ----------------------------------------------------------------------------------


def _in_planes(node: Tensor) -> str | None:
    if not node.is_contiguous():
        return "the result is not contiguous"
    if "s0" in node.params and node.params["s0"] > conv.MOST_STRIDE:
        return f"stride {node.params['s0']} along the width: at most {conv.MOST_STRIDE}"
    return None


def _packed_kernel(node: Tensor) -> str | None:
    return None if node.operand(0).is_contiguous() else "the kernel is not contiguous"


def _few_taps(node: Tensor) -> str | None:
    taps = prod(node.operand(0).ne[:2])
    return None if taps <= MOST_TAPS else f"a kernel of {taps} elements: at most {MOST_TAPS}"


_CONV = operands(FLOATS, F32, out=F32), in_rows(1, RESULT), _packed_kernel, _in_planes, has_elements


def _planes(node: Tensor, x: Tensor, result: Tensor, ctx: LoweringContext) -> tuple[int, ...]:
    """Return the arguments `conv.PLANES` of a node with data `x`, written to `result`."""
    p, (w, h, c, _) = node.params, node.ne
    plane = w * h * 4
    return (
        ctx.address(x), *x.nb[1:], *x.ne[:2], ctx.address(result), plane, plane * c, w, h, c,
        p["p0"], p["p1"], p["s1"],
    )  # fmt: skip


@RULES.rule(Op.CONV_2D, *_CONV)
def _conv_2d(node: Tensor, ctx: LoweringContext) -> None:
    _convolve(node, ctx)


def _convolve(node: Tensor, ctx: LoweringContext, group: Group | None = None) -> None:
    kernel, x = node.operand(0), node.operand(1)
    result, p = node if group is None else group.result, node.params
    (kw, kh, ic), planes = kernel.ne[:3], _planes(node, x, result, ctx)
    one = (kw, kh, p["s0"], p["s1"], p["p0"], p["p1"]) == (1, 1, 1, 1, 0, 0)
    if one and x.nb[1] == x.ne[0] * 4:  # rows of pixels are one row
        n = _pixels(node)
        planes = (*planes[:4], n, 1, *planes[6:9], n, 1, *planes[11:])
    more = (ctx.address(kernel), kernel.nb[3], kw, kh, ic, p["d0"], p["d1"])
    _multiply(ctx, (name(x), name(kernel), p["s0"]), (*planes, *more), node.ne[3], group)


def _multiply(
    ctx: LoweringContext,
    params: tuple[str, str, int],
    args: tuple[int, ...],
    images: int,
    group: Group | None,
) -> None:
    """Append the step `conv.conv_2d`, with arguments up to the dilations."""
    w, h, c = args[9:12]
    depth = prod(args[17:20])
    n_columns = tiles.columns(c, float_tiles.columns_at_once(ctx.level))
    n_pixels = float_tiles.tile_rows(ctx.level)
    most_parts, groups = -(-w * h // n_pixels), -(-c // n_columns)
    chunks = ctx.chunks(w * h * c * depth * images / _MACS, most_parts * groups * images)
    each = -(-chunks // images)
    parts = min(most_parts, each)
    bands = min(groups, -(-each // parts))
    nbytes = n_pixels * 4 * min(depth, float_tiles.STRIP_DEPTH)
    tail, more = _tail_args(group, ctx)
    scratch = ctx.scratch(nbytes * ctx.n_threads)
    args = (*args, bands, parts, scratch, nbytes)
    ctx.launch(conv.conv_2d, (*params, n_columns, tail), (*args, *more), images * bands * parts)


@RULES.rule(Op.CONV_2D_DW, *_CONV, _few_taps)
def _conv_2d_dw(node: Tensor, ctx: LoweringContext) -> None:
    _each_channel(node, ctx)


def _each_channel(node: Tensor, ctx: LoweringContext, group: Group | None = None) -> None:
    kernel, x = node.operand(0), node.operand(1)
    result, p = node if group is None else group.result, node.params
    n_rows, n_planes = tiles.columns(node.ne[1], 5), node.ne[2] * node.ne[3]
    tail, more = _tail_args(group, ctx)
    steps = tuple(p[s] for s in ("s0", "s1", "d0", "d1"))
    lanes = conv.width_lanes(ctx.level, node.ne[0])
    params = ((name(x), name(kernel)), lanes, n_rows, kernel.ne[:2], steps, tail)
    args = (*_planes(node, x, result, ctx), ctx.address(kernel), kernel.nb[3], n_planes, *more)
    work = node.n_elements * prod(kernel.ne[:2]) / _DEPTHWISE
    ctx.launch(conv.conv_2d_dw, params, args, ctx.chunks(work, n_planes * -(-node.ne[1] // n_rows)))


def _computes(group: Group) -> str | None:
    """Return why no kernel computes the group, or `None`."""
    node = group["conv"]
    if node.op is Op.CONV_2D and prod(node.operand(0).ne[:3]) > float_tiles.STRIP_DEPTH:
        return "the sums are added up in several passes"
    if node.op is Op.MUL_MAT:
        source, x, kernel = group["cont"].operand(0), group["cont"], node.operand(1)
        in_planes = source.nb[1] == 4 and source.ne == x.ne and node.ne[2] * node.ne[3] == 1
        if not in_planes or {x.dtype, source.dtype} != F32 or kernel.dtype not in FLOATS:
            return "no product with planes of f32"
        if x.ne[0] > float_tiles.STRIP_DEPTH or not kernel.is_contiguous_rows():
            return "rows that are too long or not contiguous"
    found = _tail_of(group)
    return found if isinstance(found, str) else None


@RULES.rule("conv", _computes)
def _conv_group(group: Group, ctx: LoweringContext) -> None:
    node = group["conv"]
    if node.op is not Op.MUL_MAT:
        (_convolve if node.op is Op.CONV_2D else _each_channel)(node, ctx, group)
        return
    x, kernel, (n, c) = group["cont"].operand(0), node.operand(1), node.ne[:2]
    planes = (ctx.address(x), 0, x.nb[0], 0, n, 1, ctx.address(group.result), 4 * n, 0, n, 1, c, 0, 0, 1)
    more = (ctx.address(kernel), kernel.nb[1], 1, 1, x.ne[0], 1, 1)
    _multiply(ctx, ("f32", name(kernel), 1), (*planes, *more), 1, group)


# -- pools -----------------------------------------------------------------------------------------


@RULES.rule(Op.POOL_2D, operands(FLOATS, out=F32), in_rows(0, RESULT), _in_planes, has_elements)
def _pool_2d(node: Tensor, ctx: LoweringContext) -> None:
    x, p, n_planes = node.operand(0), node.params, node.ne[2] * node.ne[3]
    lanes = conv.width_lanes(ctx.level, node.ne[0])
    args = (*_planes(node, x, node, ctx), p["k0"], p["k1"], n_planes)
    work = node.n_elements * p["k0"] * p["k1"] / _POOL
    params = name(x), lanes, p["s0"], p["op"] is OpPool.MAX
    ctx.launch(conv.pool_2d, params, args, ctx.chunks(work, n_planes * node.ne[1]))
