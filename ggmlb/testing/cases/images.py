"""Convolution, pooling and interpolation."""

from __future__ import annotations

from functools import partial
from typing import Any

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import OpPool, ScaleFlag, ScaleMode
from ggmlb.testing.cases.draw import ANY, BF16, F16, F32, LOPSIDED, PADDED, PLAIN, Program, family
from ggmlb.testing.cases.elementwise import tolerance

Numbers = tuple[int, ...]

POSITIVE: Any = {"low": 0.1, "high": 1.0}
"""Values of which no result can cancel, however few it is the sum of."""


def _values(kernel: DType) -> Any:
    """Values for a convolution: ggml rounds the data to the kernel's type."""
    return LOPSIDED if kernel is F32 else POSITIVE


def _geometry(p: Program, rank: int) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Extents of data and kernel, strides, paddings and dilations, so that the kernel has a place."""
    kernel = tuple(p.int(1, 4) for _ in range(rank))
    dilation = tuple(p.extra(1, 2) for _ in range(rank))
    padding = tuple(p.extra(0, 2) for _ in range(rank))
    stride = tuple(p.extra(1, 3) for _ in range(rank))
    least = [max(1, (k - 1) * d + 1 - 2 * q) for k, d, q in zip(kernel, dilation, padding, strict=True)]
    data = tuple(n + p.int(0, 9) for n in least)
    return data, kernel, stride, padding, dilation


@family("im2col of two dimensions")
def im2col_2d(p: Program) -> None:
    n, k, s, q, d = _geometry(p, 2)
    channels, dtype = p.int(1, 4), p.one_of(F32, F16)
    p.nmse = 0
    kernel = p.leaf(dtype, (*k, channels, p.extra(1, 3)))
    p.out("im2col", kernel, p.leaf(F32, (*n, channels, p.extra(1, 2))), *s, *q, *d, True, dtype)


@family("im2col of one dimension")
def im2col_1d(p: Program) -> None:
    n, k, s, q, d = _geometry(p, 1)
    channels, dtype = p.int(1, 4), p.one_of(F32, F16)
    p.nmse = 0
    kernel, data = p.leaf(dtype, (*k, channels, p.extra(1, 3))), p.leaf(F32, (*n, channels, p.extra(1, 3)))
    p.out("im2col", kernel, data, *s, 0, *q, 0, *d, 0, False, dtype)


def _places(n: Numbers, k: Numbers, s: Numbers, q: Numbers, d: Numbers) -> Numbers:
    return tuple((n + 2 * q - d * (k - 1) - 1) // s + 1 for n, k, s, q, d in zip(n, k, s, q, d, strict=True))


@family("im2col_back")
def im2col_back(p: Program) -> None:
    n, k, s, q, d = _geometry(p, 2)
    channels, batch = p.int(1, 4), p.extra(1, 2)
    grad = p.leaf(F32, (k[0] * k[1] * channels, *_places(n, k, s, q, d), batch))
    kernel = p.leaf(F32, (*k, channels, 1))
    p.nmse = 1e-6
    p.out("im2col_back", grad, kernel, [*n, channels, batch], *s, *q, *d, True)


@family("im2col_3d")
def im2col_3d(p: Program) -> None:
    n, k, s, q, d = _geometry(p, 3)
    channels, dtype = p.int(1, 3), p.one_of(F32, F16)
    p.nmse = 0
    kernel = p.leaf(dtype, (*k, channels * p.int(1, 2)))
    data = p.operand(F32, (*n, channels * p.int(1, 2)), PLAIN, PADDED)
    p.out("im2col_3d", kernel, data, channels, *s, *q, *d, dtype)


@family("col2im_1d")
def col2im_1d(p: Program) -> None:
    channels, taps, places, stride = p.int(1, 4), p.int(1, 5), p.int(1, 9), p.int(1, 3)
    padding = p.int(0, min(2, ((places - 1) * stride + taps - 1) // 2))
    dtype = p.one_of(F32, F16, BF16)
    p.nmse = tolerance(dtype)
    p.out("col2im_1d", p.leaf(dtype, (taps * channels, places)), stride, channels, padding)


def _conv_1d(name: str, p: Program) -> None:
    n, k, s, q, d = _geometry(p, 1)
    channels = p.int(1, 4)
    p.nmse = 1e-5
    depthwise = "dw" in name
    kernel = p.leaf(
        F16, (*k, 1 if depthwise else channels, channels if depthwise else p.int(1, 4)), **POSITIVE
    )
    # A batch comes out of ggml's conv_1d in the wrong order.
    p.out(name, kernel, p.leaf(F32, (*n, channels), **POSITIVE), *s, *q, *d)


for _name in ("conv_1d", "conv_1d_dw"):
    family(_name)(partial(_conv_1d, _name))


def _conv_2d(name: str, p: Program) -> None:
    n, k, s, q, d = _geometry(p, 2)
    channels, dtype = p.int(1, 5), p.one_of(F32, F16)
    p.nmse = 1e-5
    kernel = p.leaf(dtype, (*k, channels, p.int(1, 5)), **_values(dtype))
    layouts = ANY if name == "conv_2d_direct" else ()
    p.out(name, kernel, p.operand(F32, (*n, channels, p.extra(1, 3)), *layouts, **_values(dtype)), *s, *q, *d)


for _name in ("conv_2d", "conv_2d_direct"):
    family(_name)(partial(_conv_2d, _name))


@family("conv_2d_dw")
def conv_2d_dw(p: Program) -> None:
    n, k, s, q, d = _geometry(p, 2)
    channels = p.int(1, 5)
    p.nmse = 1e-5
    kernel = p.leaf(F16, (*k, 1, channels), **POSITIVE)
    p.out("conv_2d_dw", kernel, p.leaf(F32, (*n, channels, p.extra(1, 3)), **POSITIVE), *s, *q, *d)


@family("conv_2d_dw_direct")
def conv_2d_dw_direct(p: Program) -> None:
    n, k, s, q, d = _geometry(p, 2)
    channels, batch = p.int(2, 9), p.extra(1, 3)
    p.nmse = 1e-6
    if p.bool() and n != (1, 1):  # channels innermost; ggml takes the kernel of one place to be packed
        kernel = p.step("permute", p.leaf(F32, (channels, 1, *k)), 3, 2, 0, 1)
        data = p.step("permute", p.leaf(F32, (channels, *n, batch)), 2, 0, 1, 3)
    else:
        kernel, data = p.leaf(F32, (*k, 1, channels)), p.leaf(F32, (*n, channels, batch))
    p.out("conv_2d_dw_direct", kernel, data, *s, *q, *d)


def _conv_3d(name: str, p: Program) -> None:
    n, k, s, q, d = _geometry(p, 3)
    channels, out, batch, dtype = p.int(1, 3), p.int(1, 3), p.int(1, 2), p.one_of(F32, F16)
    p.nmse = 1e-5
    kernel = p.leaf(dtype, (*k, channels * out), **_values(dtype))
    data = p.leaf(F32, (*n, channels * batch), **_values(dtype))
    if name == "conv_3d":
        p.out(name, kernel, data, channels, *s, *q, *d)
    else:
        p.out(name, kernel, data, *s, *q, *d, channels, batch, out)


for _name in ("conv_3d", "conv_3d_direct"):
    family(_name)(partial(_conv_3d, _name))


@family("conv_transpose_1d")
def conv_transpose_1d(p: Program) -> None:
    channels, dtype = p.int(1, 6), p.one_of(F32, F16)
    p.nmse = 1e-6 if dtype is F32 else 1e-5
    kernel = p.operand(dtype, (p.int(1, 5), p.int(1, 5), channels), PLAIN, PADDED, **_values(dtype))
    data = p.operand(F32, (p.int(1, 12), channels), PLAIN, PADDED, **_values(dtype))
    p.out("conv_transpose_1d", kernel, data, p.int(1, 4), 0, 1)


@family("conv_transpose_2d")
def conv_transpose_2d(p: Program) -> None:
    channels, dtype = p.int(1, 6), p.one_of(F32, F16)
    p.nmse = 1e-6 if dtype is F32 else 1e-5
    kernel = p.leaf(dtype, (p.int(1, 4), p.int(1, 4), p.int(1, 5), channels), **_values(dtype))
    data = p.leaf(F32, (p.int(1, 7), p.int(1, 7), channels), **_values(dtype))
    p.out("conv_transpose_2d_p0", kernel, data, p.int(1, 4))


# -- pooling ---------------------------------------------------------------------------------------


def _pooling(p: Program) -> tuple[int, int, int, int]:
    """Extent of the data, size of the window, stride and padding; each window meets some data."""
    k = p.int(1, 4)
    padding = p.extra(0, k - 1)
    return max(1, k - 2 * padding) + p.int(0, 12), k, p.extra(1, 3), padding


@family("pool_1d")
def pool_1d(p: Program) -> None:
    n, k, s, q = _pooling(p)
    p.nmse = 1e-6
    p.out("pool_1d", p.leaf(p.one_of(F32, F16), (n, *p.ne(5, 3, 2)[:3])), p.one_of(*OpPool), k, s, q)


def _planes(p: Program) -> tuple[Numbers, tuple[int | float, ...]]:
    (n0, k0, s0, q0), (n1, k1, s1, q1) = _pooling(p), _pooling(p)
    return (n0, n1, p.int(1, 3), p.int(1, 2)), (k0, k1, s0, s1, float(q0), float(q1))


@family("pool_2d")
def pool_2d(p: Program) -> None:
    ne, numbers = _planes(p)
    p.nmse = 1e-6
    p.out("pool_2d", p.leaf(p.one_of(F32, F16), ne), p.one_of(*OpPool), *numbers)


@family("pool_2d_back")
def pool_2d_back(p: Program) -> None:
    ne, numbers = _planes(p)
    k0, k1, s0, s1, q0, q1 = (int(n) for n in numbers)
    places = _places(ne[:2], (k0, k1), (s0, s1), (q0, q1), (1, 1))
    p.nmse = 1e-6
    p.out("pool_2d_back", p.leaf(F32, (*places, *ne[2:])), p.leaf(F32, ne), p.one_of(*OpPool), *numbers)


# -- interpolation ---------------------------------------------------------------------------------


@family("upscale")
def upscale(p: Program) -> None:
    p.nmse = 1e-7
    p.out("upscale", p.operand(F32, p.ne(8, 7, 3, 2), *ANY), p.int(2, 4), p.one_of(*ScaleMode))


@family("interpolate")
def interpolate(p: Program) -> None:
    ne = p.ne(12, 12, 4, 3)
    to = (p.int(1, 20), p.int(1, 20), ne[2] * p.int(1, 2), ne[3] * p.int(1, 2))
    mode = p.one_of(
        *ScaleMode,
        *(m | ScaleFlag.ALIGN_CORNERS for m in ScaleMode),
        ScaleMode.BILINEAR | ScaleFlag.ANTIALIAS,
        ScaleMode.BILINEAR | ScaleFlag.ANTIALIAS | ScaleFlag.ALIGN_CORNERS,
    )
    p.nmse = 1e-6
    p.out("interpolate", p.operand(F32, ne, *ANY), *to, mode)
