"""Cases, samples and timings: convolutions and pooling."""

from __future__ import annotations

from functools import partial
from typing import Any

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, OpPool
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import (
    ANY,
    BF16,
    F16,
    F32,
    LOPSIDED,
    PADDED,
    PLAIN,
    POSITIVE,
    Extents,
    Program,
    tolerance,
)
from ggmlb.testing.ops.record import Perf, cases, f32, main, on_main


def conv_values(kernel: DType) -> Any:
    """Return a range of mostly positive values, so that sums do not cancel, for a `kernel` of this type."""
    return LOPSIDED if kernel is F32 else POSITIVE


def geometry(p: Program, rank: int) -> tuple[Extents, Extents, Extents, Extents, Extents]:
    """Draw extents of data and kernel, strides, paddings and dilations, of `rank` axes; the kernel fits."""
    kernel = tuple(p.int(1, 4) for _ in range(rank))
    dilation = tuple(p.extra(1, 2) for _ in range(rank))
    padding = tuple(p.extra(0, 2) for _ in range(rank))
    stride = tuple(p.extra(1, 3) for _ in range(rank))
    least = [max(1, (k - 1) * d + 1 - 2 * q) for k, d, q in zip(kernel, dilation, padding, strict=True)]
    data = tuple(n + p.int(0, 9) for n in least)
    return data, kernel, stride, padding, dilation


def window_places(n: Extents, k: Extents, s: Extents, q: Extents, d: Extents) -> Extents:
    """Return a convolution's output extents; data `n`, kernel `k`, stride `s`, padding `q`, dilation `d`."""
    return tuple((n + 2 * q - d * (k - 1) - 1) // s + 1 for n, k, s, q, d in zip(n, k, s, q, d, strict=True))


def _windows(c: Context, s: int) -> Tensor:
    kernel = c.new_tensor(F16, (3, 3, 64, 1))
    return c.im2col(kernel, f32(c, 32 * s, 32 * s, 64), 1, 1, 1, 1, 1, 1, True, F16)


# -- by way of im2col ---


@cases(
    Op.IM2COL,
    lambda c, t: c.im2col(main(c, t, 3, 3, 2, 4), f32(c, 16, 16, 2), 1, 1, 1, 1, 1, 1, True),
    Perf("im2col", "f16,f32", _windows),
    name="im2col of two dimensions",
)
def im2col_2d(p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels, dtype = p.int(1, 4), p.one_of(F32, F16)
    p.nmse = 0
    kernel = p.leaf(dtype, (*k, channels, p.extra(1, 3)))
    p.out("im2col", kernel, p.leaf(F32, (*n, channels, p.extra(1, 2))), *s, *q, *d, True, dtype)


@cases(Op.IM2COL, name="im2col of one dimension")
def im2col_1d(p: Program) -> None:
    n, k, s, q, d = geometry(p, 1)
    channels, dtype = p.int(1, 4), p.one_of(F32, F16)
    p.nmse = 0
    kernel, data = p.leaf(dtype, (*k, channels, p.extra(1, 3))), p.leaf(F32, (*n, channels, p.extra(1, 3)))
    p.out("im2col", kernel, data, *s, 0, *q, 0, *d, 0, False, dtype)


@cases(
    Op.IM2COL_BACK,
    lambda c, t: c.im2col_back(main(c, t, 18, 8, 7, 2), f32(c, 3, 3, 2, 3), (8, 7, 2, 2), *(1,) * 6, True),
)
def im2col_back(p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels, batch = p.int(1, 4), p.extra(1, 2)
    grad = p.leaf(F32, (k[0] * k[1] * channels, *window_places(n, k, s, q, d), batch))
    kernel = p.leaf(F32, (*k, channels, 1))
    p.nmse = 1e-6
    p.out("im2col_back", grad, kernel, [*n, channels, batch], *s, *q, *d, True)


@cases(
    Op.IM2COL_3D,
    lambda c, t: c.im2col_3d(main(c, t, 3, 3, 3, 2), f32(c, 8, 8, 8, 1), 1, 1, 1, 1, 0, 0, 0, 1, 1, 1),
)
def im2col_3d(p: Program) -> None:
    n, k, s, q, d = geometry(p, 3)
    channels, dtype = p.int(1, 3), p.one_of(F32, F16)
    p.nmse = 0
    kernel = p.leaf(dtype, (*k, channels * p.int(1, 2)))
    data = p.operand(F32, (*n, channels * p.int(1, 2)), PLAIN, PADDED)
    p.out("im2col_3d", kernel, data, channels, *s, *q, *d, dtype)


@cases(Op.COL2IM_1D, lambda c, t: c.col2im_1d(main(c, t, 12, 7), 2, 3))
def col2im_1d(p: Program) -> None:
    channels, taps, places, stride = p.int(1, 4), p.int(1, 5), p.int(1, 9), p.int(1, 3)
    padding = p.int(0, min(2, ((places - 1) * stride + taps - 1) // 2))
    dtype = p.one_of(F32, F16, BF16)
    p.nmse = tolerance(dtype)
    p.out("col2im_1d", p.leaf(dtype, (taps * channels, places)), stride, channels, padding)


def draw_conv_1d(name: str, p: Program) -> None:
    n, k, s, q, d = geometry(p, 1)
    channels = p.int(1, 4)
    p.nmse = 1e-5
    kernel = p.leaf(F16, (*k, 1, channels) if "dw" in name else (*k, channels, p.int(1, 4)), **POSITIVE)
    # ggml's conv_1d returns a batch with its dimensions in the wrong order.
    p.out(name, kernel, p.leaf(F32, (*n, channels), **POSITIVE), *s, *q, *d)


@cases(Op.IM2COL)
def conv_2d_dw(p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels = p.int(1, 5)
    p.nmse = 1e-5
    kernel = p.leaf(F16, (*k, 1, channels), **POSITIVE)
    p.out("conv_2d_dw", kernel, p.leaf(F32, (*n, channels, p.extra(1, 3)), **POSITIVE), *s, *q, *d)


for name in ("conv_1d", "conv_1d_dw"):
    cases(Op.IM2COL, name=name)(partial(draw_conv_1d, name))


# -- direct, too ---


def _planes(c: Context, s: int) -> Tensor:
    return c.conv_2d_direct(c.new_tensor(F16, (3, 3, 64, 64)), f32(c, 32 * s, 32 * s, 64))


def draw_conv_2d(name: str, p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels, dtype = p.int(1, 5), p.one_of(F32, F16)
    p.nmse = 1e-5
    kernel = p.leaf(dtype, (*k, channels, p.int(1, 5)), **conv_values(dtype))
    layouts = ANY if name == "conv_2d_direct" else ()
    data = p.operand(F32, (*n, channels, p.extra(1, 3)), *layouts, **conv_values(dtype))
    p.out(name, kernel, data, *s, *q, *d)


cases(Op.IM2COL, name="conv_2d")(partial(draw_conv_2d, "conv_2d"))
cases(
    Op.CONV_2D,
    lambda c, t: c.conv_2d_direct(main(c, t, 3, 3, 2, 4), f32(c, 16, 16, 2)),
    Perf("conv_2d_direct", "f16,f32", _planes),
    name="conv_2d_direct",
)(partial(draw_conv_2d, "conv_2d_direct"))


def wide_geometry(p: Program) -> tuple[Extents, Extents, Extents, Extents, Extents]:
    """Draw as `geometry`, but with rows of more pixels than a vector or a tile has."""
    (width, height), *others = geometry(p, 2)
    k, s, q, d = others
    return (width + p.int(0, 50), height), k, s, q, d


@cases(Op.CONV_2D, name="conv_2d_direct of many channels")
def conv_2d_of_many_channels(p: Program) -> None:
    n, k, s, q, d = wide_geometry(p)
    channels, kernels = p.one_of(3, 24, 260), p.one_of(7, 13, 40)
    p.nmse = 1e-5
    kernel = p.leaf(F32, (*k, channels, kernels), **LOPSIDED)
    p.out("conv_2d_direct", kernel, p.leaf(F32, (*n, channels, p.extra(1, 2)), **LOPSIDED), *s, *q, *d)


def draw_conv_3d(name: str, p: Program) -> None:
    n, k, s, q, d = geometry(p, 3)
    channels, out, batch, dtype = p.int(1, 3), p.int(1, 3), p.int(1, 2), p.one_of(F32, F16)
    p.nmse = 1e-5
    kernel = p.leaf(dtype, (*k, channels * out), **conv_values(dtype))
    data = p.leaf(F32, (*n, channels * batch), **conv_values(dtype))
    if name == "conv_3d":
        p.out(name, kernel, data, channels, *s, *q, *d)
    else:
        p.out(name, kernel, data, *s, *q, *d, channels, batch, out)


def _volume(c: Context, t: DType) -> Tensor:
    return c.conv_3d_direct(main(c, t, 3, 3, 3, 8), f32(c, 8, 8, 8, 2), 1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 1, 4)


cases(Op.IM2COL_3D, name="conv_3d")(partial(draw_conv_3d, "conv_3d"))
cases(Op.CONV_3D, _volume, name="conv_3d_direct")(partial(draw_conv_3d, "conv_3d_direct"))


@cases(Op.CONV_2D_DW, lambda c, t: c.conv_2d_dw_direct(main(c, t, 3, 3, 1, 4), f32(c, 16, 16, 4)))
def conv_2d_dw_direct(p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels, batch = p.int(2, 9), p.extra(1, 3)
    p.nmse = 1e-6
    if p.bool() and n != (1, 1):  # channels innermost; ggml takes the kernel of one place to be packed
        kernel = p.step("permute", p.leaf(F32, (channels, 1, *k)), 3, 2, 0, 1)
        data = p.step("permute", p.leaf(F32, (channels, *n, batch)), 2, 0, 1, 3)
    else:
        kernel, data = p.leaf(F32, (*k, 1, channels)), p.leaf(F32, (*n, channels, batch))
    p.out("conv_2d_dw_direct", kernel, data, *s, *q, *d)


@cases(Op.CONV_2D_DW, name="conv_2d_dw_direct of wide planes")
def conv_2d_dw_of_wide_planes(p: Program) -> None:
    n, k, s, q, d = wide_geometry(p)
    channels, dtype = p.int(2, 5), p.one_of(F32, F16)
    p.nmse = 1e-5
    kernel = p.leaf(dtype, (*k, 1, channels), **conv_values(dtype))
    data = p.leaf(F32, (*n, channels, p.extra(1, 2)), **conv_values(dtype))
    p.out("conv_2d_dw_direct", kernel, data, *s, *q, *d)


@cases(Op.CONV_TRANSPOSE_1D, lambda c, t: c.conv_transpose_1d(main(c, t, 3, 4, 2), f32(c, 16, 2)))
def conv_transpose_1d(p: Program) -> None:
    channels, dtype = p.int(1, 6), p.one_of(F32, F16)
    p.nmse = 1e-6 if dtype is F32 else 1e-5
    kernel = p.operand(dtype, (p.int(1, 5), p.int(1, 5), channels), PLAIN, PADDED, **conv_values(dtype))
    data = p.operand(F32, (p.int(1, 12), channels), PLAIN, PADDED, **conv_values(dtype))
    p.out("conv_transpose_1d", kernel, data, p.int(1, 4), 0, 1)


@cases(Op.CONV_TRANSPOSE_2D, lambda c, t: c.conv_transpose_2d_p0(main(c, t, 2, 2, 4, 2), f32(c, 8, 8, 2), 2))
def conv_transpose_2d(p: Program) -> None:
    channels, dtype = p.int(1, 6), p.one_of(F32, F16)
    p.nmse = 1e-6 if dtype is F32 else 1e-5
    kernel = p.leaf(dtype, (p.int(1, 4), p.int(1, 4), p.int(1, 5), channels), **conv_values(dtype))
    data = p.leaf(F32, (p.int(1, 7), p.int(1, 7), channels), **conv_values(dtype))
    p.out("conv_transpose_2d_p0", kernel, data, p.int(1, 4))


# -- pooling ---


def _drawn_pooling(p: Program) -> tuple[int, int, int, int]:
    """Draw extent, window size, stride and padding such that each window covers some data."""
    k = p.int(1, 4)
    padding = p.extra(0, k - 1)
    return max(1, k - 2 * padding) + p.int(0, 12), k, p.extra(1, 3), padding


@cases(Op.POOL_1D, on_main("pool_1d", OpPool.MAX, 2, 2))
def pool_1d(p: Program) -> None:
    n, k, s, q = _drawn_pooling(p)
    p.nmse = 1e-6
    p.out("pool_1d", p.leaf(p.one_of(F32, F16), (n, *p.ne(5, 3, 2)[:3])), p.one_of(*OpPool), k, s, q)


def _drawn_planes(p: Program) -> tuple[Extents, tuple[int | float, ...]]:
    (n0, k0, s0, q0), (n1, k1, s1, q1) = _drawn_pooling(p), _drawn_pooling(p)
    return (n0, n1, p.int(1, 3), p.int(1, 2)), (k0, k1, s0, s1, float(q0), float(q1))


@cases(
    Op.POOL_2D,
    lambda c, t: c.pool_2d(main(c, t, 16, 16, 2), OpPool.AVG, 2, 2, 2, 2),
    Perf("pool_2d", "f32", lambda c, s: c.pool_2d(f32(c, 64 * s, 64 * s, 64), 0, 2, 2, 2, 2)),
)
def pool_2d(p: Program) -> None:
    ne, numbers = _drawn_planes(p)
    p.nmse = 1e-6
    p.out("pool_2d", p.leaf(p.one_of(F32, F16), ne), p.one_of(*OpPool), *numbers)


@cases(
    Op.POOL_2D_BACK,
    lambda c, t: c.pool_2d_back(main(c, t, 5, 4, 3, 2), f32(c, 10, 8, 3, 2), OpPool.MAX, 2, 2, 2, 2),
)
def pool_2d_back(p: Program) -> None:
    ne, numbers = _drawn_planes(p)
    k0, k1, s0, s1, q0, q1 = (int(n) for n in numbers)
    extents = window_places(ne[:2], (k0, k1), (s0, s1), (q0, q1), (1, 1))
    p.nmse = 1e-6
    p.out("pool_2d_back", p.leaf(F32, (*extents, *ne[2:])), p.leaf(F32, ne), p.one_of(*OpPool), *numbers)
