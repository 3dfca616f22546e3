"""Lowering of convolutions, with the nodes behind them, and of pools."""

from __future__ import annotations

from math import prod

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.rules import F32, FLOATS, RESULT, has_elements, in_rows, operands
from ggmlb.backends.llvm import prefetching
from ggmlb.backends.llvm.kernels import conv, float_tiles, matvec, tiles
from ggmlb.backends.llvm.kernels.conv import Tail, TailStep
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS
from ggmlb.backends.llvm.lowering.context import RULES, LoweringContext, name
from ggmlb.backends.llvm.lowering.elementwise import PARAMS, function_of
from ggmlb.backends.llvm.lowering.matmul import FEW_FLOATS, rows_at_once
from ggmlb.backends.llvm.lowering.rows import copied
from ggmlb.core.enums import Op, OpPool
from ggmlb.core.tensor import Tensor

MOST_TAPS = 64
"""Largest kernel of a depthwise convolution, unrolled."""

_MACS, _DEPTHWISE, _POOL = 25, 12, 4
"""Multiplications, and elements of windows, of one thread in a nanosecond."""

# -- the nodes behind a convolution ----------------------------------------------------------------


def _tail_of(group: Group) -> list[tuple[TailStep, Tensor, int, int]] | str:
    """Return the nodes after the group's convolution (its epilogue), or why no kernel computes them.

    Each comes with its other operand, and the operand's byte strides of channels and images; unary functions
    with themselves and zeros.
    """
    found, result, node = [], group.result, group["conv"]
    shape = _pixels(node), _channels(node)
    channel = next((d for d in (1, 2, 3) if (prod(result.ne[:d]), result.ne[d]) == shape), 0)
    same = result.n_elements == node.n_elements and all([view.op is Op.RESHAPE for view in group.views])
    if not (channel and same and result.is_contiguous()):
        return "the result is not in planes"
    for part, node in group.parts.items():
        if not part.startswith("tail"):
            continue
        fn, operand, kind, nb2, nb3 = function_of(node), node, None, 0, 0
        if node.op in (Op.ADD, Op.MUL):
            operand = group.other(part)
            one = tuple(n if d == channel else 1 for d, n in enumerate(result.ne))
            if operand.ne not in (one, result.ne) or operand.dtype not in F32:
                return "an operand of another shape or type"
            if operand.ne == result.ne and not operand.is_contiguous():
                return "an operand that is not in planes"
            kind = "channels" if operand.ne == one else "pixels"
            nb2, nb3 = (operand.nb[channel], 0) if operand.ne == one else (4 * shape[0], 4 * prod(shape))
        elif fn not in FUNCTIONS:
            return f"no kernel for {fn}"
        if node.ne != result.ne or node.dtype not in F32:
            return "a result of another shape or type"
        found.append((TailStep(fn, len(PARAMS.get(fn, ())), kind), operand, nb2, nb3))
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
    for step, node, nb2, nb3 in found:
        params = [float(node.params[p]) for p in PARAMS.get(step.function, ())]
        args += [ctx.address(node), nb2, nb3] if step.operand else params
    return tuple(step for step, *_ in found), args


# -- convolutions ----------------------------------------------------------------------------------


def _in_planes(node: Tensor) -> str | None:
    if node.op is not Op.POOL_2D and not node.operand(0).is_contiguous():
        return "the kernel is not contiguous"
    return None if node.is_contiguous() else "the result is not contiguous"


def _small_steps(node: Tensor) -> str | None:
    taps = prod(node.operand(0).ne[:2])
    if node.op is Op.CONV_2D_DW and taps > MOST_TAPS:
        return f"a kernel of {taps} elements: at most {MOST_TAPS}"
    step = "d0" if node.op is Op.CONV_2D and _by_patches(node) else "s0"
    n = node.params[step]
    return None if n <= conv.MOST_STRIDE else f"{step} is {n}: at most {conv.MOST_STRIDE}"


_CONV = operands(FLOATS, F32, out=F32), in_rows(1, RESULT), _in_planes, has_elements, _small_steps


def _planes(node: Tensor, x: Tensor, result: Tensor, ctx: LoweringContext) -> tuple[int, ...]:
    """Return the arguments `conv.PLANES` of a node with data `x`, written to `result`."""
    p, (w, h, c, _) = node.params, node.ne
    plane = w * h * 4
    return (
        ctx.address(x), *x.nb[1:], *x.ne[:2], ctx.address(result), plane, plane * c, w, h, c,
        p["p0"], p["p1"], p["s1"],
    )  # fmt: skip


def _by_patches(node: Tensor) -> bool:
    """Whether the windows of a convolution are copied to a matrix: of few pixels, or a large stride."""
    return node.params["s0"] > conv.MOST_STRIDE or _pixels(node) * node.ne[3] <= FEW_FLOATS


@RULES.rule(Op.CONV_2D, *_CONV)
def _conv_2d(node: Tensor, ctx: LoweringContext) -> None:
    if not _by_patches(node):
        _convolve(node, ctx)
        return
    kernel, x, p = node.operand(0), node.operand(1), node.params
    (kw, kh, ic), (w, h, c, images) = kernel.ne[:3], node.ne
    depth, n, plane = kw * kh * ic, w * h * images, 4 * w * h
    row = 4 * depth
    patches = ctx.scratch(row * n)
    planes = list(_planes(node, x, node, ctx))
    planes[6:8] = patches, row
    args = (*planes, kw, kh, ic, p["d1"], p["s0"], n)
    ctx.launch(conv.im2col, (name(x), p["d0"]), args, ctx.chunks(depth * n / 2, n))
    if n > FEW_FLOATS:  # the windows are the rows of the weight
        nbytes = float_tiles.scratch_nbytes(ctx.level, "f32", depth)
        parts = ctx.chunks(depth * n * c / _MACS, -(-w * h // float_tiles.tile_rows(ctx.level)))
        matrices = (
            patches, row, row * w * h, 0, ctx.address(kernel), kernel.nb[3], 0, 0,
            ctx.address(node), plane, plane * c, 0, depth, w * h, c, images, 1, 1, 1,
            parts, 0, ctx.scratch(nbytes * ctx.n_threads), nbytes,
        )  # fmt: skip
        columns = float_tiles.columns(ctx.level, "f32", c)
        params = ("f32", name(kernel), False, columns, tiles.Epilogue())
        ctx.launch(float_tiles.many, params, matrices, parts * images)
        return
    rows = rows_at_once(kernel, n)
    rows = rows if c >= rows else 1
    parts = ctx.chunks(depth * c * (n + 1) / 40, -(-c // rows))
    y = ctx.mem(node)
    found = y.window((w * h, c, images, 1), (4 * c, 4, 4 * c * w * h, 0))
    if w * h > 1:  # by channels, to be transposed
        found.offset = ctx.scratch(4 * c * n)
    ahead = prefetching.ahead(ctx.library, name(kernel), is_interleaved=False)
    product = (
        ctx.address(kernel), kernel.nb[3], 0, 0, patches, row, 0, 0, found.offset, 4 * c, 0, 0,
        depth, c, n, 1, 1, 1, 1, parts, ahead.nbytes,
    )  # fmt: skip
    ctx.launch(matvec.few, (name(kernel), rows, n, "f32", ahead.hint), product, parts)
    if w * h > 1:
        copied(y.window((w * h, c, images, 1), (4, plane, plane * c, 0)), found, ctx)


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


RULES.rule(Op.CONV_2D_DW, *_CONV)(_each_channel)


def _computes(group: Group) -> str | None:
    """Return why no kernel computes the group, or `None`."""
    node = group["conv"]
    if node.op is Op.CONV_2D:
        if _by_patches(node):
            return "the windows are copied"
        if prod(node.operand(0).ne[:3]) > float_tiles.STRIP_DEPTH:
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


# -- transposed convolutions -----------------------------------------------------------------------


def _known_stride(node: Tensor) -> str | None:
    s = node.params["stride"]
    return None if s in (1, 2, 4) else f"stride {s}: only 1, 2 and 4"


@RULES.rule(
    Op.CONV_TRANSPOSE_2D, operands(F32, F32, out=F32), in_rows(1), _in_planes, has_elements, _known_stride
)
def _conv_transpose_2d(node: Tensor, ctx: LoweringContext) -> None:
    """Products of the pixels with the transposed kernel, whose overlapping windows are added up."""
    kernel, x = node.operand(0), node.operand(1)
    (kw, kh, oc, ic), (w, h, _, images) = kernel.ne, x.ne
    m, pixels, (ow, oh) = kw * kh * oc, w * h, node.ne[:2]
    a = ctx.mem(kernel).window((ic, m, 1, 1), (4 * m, 4, 0, 0))
    rows = a.window(a.ne, (4, 4 * ic, 0, 0))
    rows.offset = ctx.scratch(4 * ic * m)
    copied(rows, a, ctx)
    windows = ctx.scratch(4 * pixels * m * images)
    planes = (
        ctx.address(x), *x.nb[1:], w, h, windows, 4 * pixels, 4 * pixels * m, w, h, m, 0, 0, 1,
        rows.offset, 4 * ic, 1, 1, ic, 1, 1,
    )  # fmt: skip
    _multiply(ctx, ("f32", "f32", 1), planes, images, None)
    args = (
        windows, 4 * w, 4 * pixels * kw * kh, 4 * pixels * m, w, h,
        ctx.address(node), 4 * ow * oh, 4 * ow * oh * oc, ow, oh, oc, 0, 0, 1, kw, kh, oc * images,
    )  # fmt: skip
    chunks = ctx.chunks(node.n_elements / 2, oc * images * oh)
    ctx.launch(conv.overlap_add, (node.params["stride"],), args, chunks)


# -- pools -----------------------------------------------------------------------------------------


@RULES.rule(Op.POOL_2D, operands(FLOATS, out=F32), in_rows(0, RESULT), _in_planes, has_elements, _small_steps)
def _pool_2d(node: Tensor, ctx: LoweringContext) -> None:
    x, p, n_planes = node.operand(0), node.params, node.ne[2] * node.ne[3]
    lanes = conv.width_lanes(ctx.level, node.ne[0])
    args = (*_planes(node, x, node, ctx), p["k0"], p["k1"], n_planes)
    work = node.n_elements * p["k0"] * p["k1"] / _POOL
    params = name(x), lanes, p["s0"], p["op"] is OpPool.MAX
    ctx.launch(conv.pool_2d, params, args, ctx.chunks(work, n_planes * node.ne[1]))
