"""Convolution as ggml composes it: im2col patches times the kernel.

`a` is the kernel, `b` the data; `s`, `p` and `d` are stride, padding and dilation, and the digit after them
is the dimension: `s0` is the stride along the width. Params: IM2COL and IM2COL_BACK have `s0, s1, p0, p1, d0,
d1, is_2d`; IM2COL_3D `s0..s2, p0..p2, d0..d2, ic`; COL2IM_1D `s0, oc, p0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import fail_arg, fail_shape, full_ne, require_contiguous, require_type
from ggmlb.core.ops.conv_direct import draw_conv_2d, draw_conv_3d, places
from ggmlb.core.ops.copy import CopyOps
from ggmlb.core.ops.matmul import MatmulOps
from ggmlb.core.ops.spec import (
    BF16,
    F16,
    F32,
    PADDED,
    PLAIN,
    POSITIVE,
    OpSpec,
    Perf,
    f32,
    geometry,
    main,
    tolerance,
    unchanged,
    window_places,
)
from ggmlb.core.ops.views import ViewOps
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.testing.draw import Program


class ConvOps(CopyOps, MatmulOps, ViewOps):
    """im2col, im2col_back, im2col_3d, col2im_1d, conv_1d, conv_2d, conv_3d and their variants."""

    def im2col(
        self,
        a: Tensor,
        b: Tensor,
        s0: int,
        s1: int,
        p0: int,
        p1: int,
        d0: int,
        d1: int,
        is_2D: bool,
        dst_type: DType | str = DType.F16,
    ) -> Tensor:
        """Return the patch of `b` under each position of the kernel `a` (ggml_im2col).

        With `is_2D`, the kernel has ne `[KW, KH, IC, OC]` and the data `[W, H, IC, N]`; without, there is one
        spatial dimension: `[K, IC, OC]` and `[L, IC, N]`. Only the shape of the kernel is read.

        Returns:
            Of type `dst_type`, ne `[KW * KH * IC, OW, OH, N]` or `[K * IC, OL, N]`.

        Raises:
            ShapeError: The channels differ, or the kernel is larger than the padded data.
            ArgumentError: A stride or dilation is not positive, or a padding is negative.
        """
        ne, params = _patches("im2col", a, b, (s0, s1), (p0, p1), (d0, d1), is_2D)
        return self._op(Op.IM2COL, DType.parse(dst_type), ne, (a, b), params)

    def im2col_back(
        self,
        a: Tensor,
        b: Tensor,
        ne: Sequence[int],
        s0: int,
        s1: int,
        p0: int,
        p1: int,
        d0: int,
        d1: int,
        is_2D: bool,
    ) -> Tensor:
        """Return the gradient of the data of `im2col`: f32, of extents `ne` (ggml_im2col_back).

        `a` is the gradient of the result of `im2col`, `b` the kernel, `ne` the four extents of the data;
        the other arguments are those of `im2col`.

        Raises:
            ShapeError: `a` does not have the shape of the result of `im2col`.
            ArgumentError: A stride or dilation is not positive, or a padding is negative.
        """
        data = Tensor(DType.F32, full_ne(ne, "im2col_back"))
        patches, params = _patches("im2col_back", b, data, (s0, s1), (p0, p1), (d0, d1), is_2D)
        if a.ne != patches:
            fail_shape("im2col_back", f"a must have ne {list(patches)}, as im2col returns", a, b)
        return self._op(Op.IM2COL_BACK, DType.F32, data.ne, (a, b), params)

    def conv_1d(self, a: Tensor, b: Tensor, s0: int = 1, p0: int = 0, d0: int = 1) -> Tensor:
        """Return the convolution of `b` with `a` through f16 patches: ne `[OL, OC, N]` (ggml_conv_1d).

        ggml returns the dimensions of a batch in the wrong order; here they are in order.

        Args:
            a: Kernel, ne `[K, IC, OC]`.
            b: Data, ne `[L, IC, N]`.
            s0: Stride.
            p0: Padding at both ends.
            d0: Dilation.

        Raises:
            ShapeError: The channels differ, or the kernel is larger than the padded data.
        """
        patches = self.im2col(a, b, s0, 0, p0, 0, d0, 0, False, DType.F16)
        ic_k, length, batch = patches.ne[:3]
        flat = self.mul_mat(
            self.reshape_2d(patches, ic_k, length * batch), self.reshape_2d(a, a.ne[0] * a.ne[1], a.ne[2])
        )
        if batch == 1:
            return self.reshape_3d(flat, length, a.ne[2], 1)
        return self.cont(self.permute(self.reshape_3d(flat, length, batch, a.ne[2]), 0, 2, 1, 3))

    def conv_1d_ph(self, a: Tensor, b: Tensor, s: int = 1, d: int = 1) -> Tensor:
        """Return `conv_1d` with half the kernel as padding (ggml_conv_1d_ph)."""
        return self.conv_1d(a, b, s, a.ne[0] // 2, d)

    def conv_1d_dw(self, a: Tensor, b: Tensor, s0: int = 1, p0: int = 0, d0: int = 1) -> Tensor:
        """Return the convolution of each channel with its own kernel: ne `[OL, C]` (ggml_conv_1d_dw).

        Args:
            a: Kernels, ne `[K, 1, C]`.
            b: Data, ne `[L, C]`.
            s0: Stride.
            p0: Padding at both ends.
            d0: Dilation.
        """
        rows = self.reshape_4d(b, b.ne[0], 1, b.ne[1], b.ne[2])
        result = self.mul_mat(self.im2col(a, rows, s0, 0, p0, 0, d0, 0, False, DType.F16), a)
        return self.reshape_3d(result, result.ne[0], result.ne[2], 1)

    def conv_1d_dw_ph(self, a: Tensor, b: Tensor, s0: int = 1, d0: int = 1) -> Tensor:
        """Return `conv_1d_dw` with half the kernel as padding (ggml_conv_1d_dw_ph)."""
        return self.conv_1d_dw(a, b, s0, a.ne[0] // 2, d0)

    def conv_2d(
        self,
        a: Tensor,
        b: Tensor,
        s0: int = 1,
        s1: int = 1,
        p0: int = 0,
        p1: int = 0,
        d0: int = 1,
        d1: int = 1,
    ) -> Tensor:
        """Return the convolution of `b` with `a` through patches of a's type (ggml_conv_2d).

        The kernel `a` has ne `[KW, KH, IC, OC]`, the data `b` `[W, H, IC, N]`.

        Returns:
            f32, ne `[OW, OH, OC, N]`.

        Raises:
            ShapeError: The channels differ, or the kernel is larger than the padded data.
        """
        patches = self.im2col(a, b, s0, s1, p0, p1, d0, d1, True, a.dtype)
        n, w, h, batch = patches.ne
        flat = self.mul_mat(self.reshape_2d(patches, n, batch * h * w), self.reshape_2d(a, n, a.ne[3]))
        return self.cont(self.permute(self.reshape_4d(flat, w, h, batch, a.ne[3]), 0, 1, 3, 2))

    def conv_2d_sk_p0(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `conv_2d` with the kernel's size as stride and no padding (ggml_conv_2d_sk_p0)."""
        return self.conv_2d(a, b, a.ne[0], a.ne[1], 0, 0, 1, 1)

    def conv_2d_s1_ph(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `conv_2d` with stride 1 and half the kernel as padding (ggml_conv_2d_s1_ph)."""
        return self.conv_2d(a, b, 1, 1, a.ne[0] // 2, a.ne[1] // 2, 1, 1)

    def conv_2d_dw(
        self,
        a: Tensor,
        b: Tensor,
        s0: int = 1,
        s1: int = 1,
        p0: int = 0,
        p1: int = 0,
        d0: int = 1,
        d1: int = 1,
    ) -> Tensor:
        """Return the convolution of each channel with its own kernel, through f16 patches (ggml_conv_2d_dw).

        The kernels `a` have ne `[KW, KH, 1, C]`, the data `b` `[W, H, C, N]`.

        Returns:
            f32, ne `[OW, OH, C, N]`.
        """
        k, n = a.ne, b.ne
        kernels = self.reshape_4d(a, k[0], k[1], 1, k[2] * k[3])
        planes = self.reshape_4d(b, n[0], n[1], 1, n[2] * n[3])
        patches = self.im2col(kernels, planes, s0, s1, p0, p1, d0, d1, True, DType.F16)
        size, w, h, _ = patches.ne
        result = self.mul_mat(
            self.reshape_4d(kernels, size, 1, k[2] * k[3], 1),
            self.reshape_4d(patches, size, h * w, n[2], n[3]),
        )
        return self.reshape_4d(result, w, h, n[2], n[3])

    def im2col_3d(
        self,
        a: Tensor,
        b: Tensor,
        IC: int,
        s0: int,
        s1: int,
        s2: int,
        p0: int,
        p1: int,
        p2: int,
        d0: int,
        d1: int,
        d2: int,
        dst_type: DType | str = DType.F16,
    ) -> Tensor:
        """Return the patch of `b` under each position of the kernel `a` (ggml_im2col_3d).

        The kernel `a` has ne `[KW, KH, KD, IC * OC]`, and only its shape is read; the data `b` has ne
        `[W, H, D, IC * N]`, of `IC` channels.

        Returns:
            Of type `dst_type`, ne `[KW * KH * KD * IC, OW, OH, OD * N]`.

        Raises:
            ShapeError: `IC` does not divide ne[3], or the kernel is larger than the padded data.
            ArgumentError: A stride or dilation is not positive, or a padding is negative.
        """
        fn = "im2col_3d"
        if IC < 1 or a.ne[3] % IC or b.ne[3] % IC:
            fail_shape(fn, f"IC = {IC} must divide ne[3] of a and of b", a, b)
        (w, h, d), params = places(fn, a, b, (s0, s1, s2), (p0, p1, p2), (d0, d1, d2))
        params["ic"] = IC
        ne = (a.ne[0] * a.ne[1] * a.ne[2] * IC, w, h, d * (b.ne[3] // IC))
        return self._op(Op.IM2COL_3D, DType.parse(dst_type), ne, (a, b), params)

    def conv_3d(
        self,
        a: Tensor,
        b: Tensor,
        IC: int,
        s0: int = 1,
        s1: int = 1,
        s2: int = 1,
        p0: int = 0,
        p1: int = 0,
        p2: int = 0,
        d0: int = 1,
        d1: int = 1,
        d2: int = 1,
    ) -> Tensor:
        """Return the convolution of `b` with `a` through patches of a's type (ggml_conv_3d).

        The arguments are those of `im2col_3d`.

        Returns:
            f32, ne `[OW, OH, OD, OC * N]`.
        """
        patches = self.im2col_3d(a, b, IC, s0, s1, s2, p0, p1, p2, d0, d1, d2, a.dtype)
        n, w, h, depth_batch = patches.ne
        oc, batch = a.ne[3] // IC, b.ne[3] // IC
        depth = depth_batch // batch
        flat = self.mul_mat(self.reshape_2d(patches, n, depth_batch * h * w), self.reshape_2d(a, n, oc))
        result = self.cont(self.permute(self.reshape_4d(flat, w * h, depth, batch, oc), 0, 1, 3, 2))
        return self.reshape_4d(result, w, h, depth, oc * batch)

    def col2im_1d(self, a: Tensor, s0: int, oc: int, p0: int = 0) -> Tensor:
        """Return the sum of overlapping columns: ne `[(T - 1) * s0 + K - 2 * p0, oc]` (ggml_col2im_1d).

        Args:
            a: Contiguous f32, f16 or bf16, ne `[K * oc, T]`.
            s0: Stride.
            oc: Channels of the result.
            p0: Elements to cut off at both ends.

        Raises:
            ShapeError: `a` is no contiguous matrix, or its rows are not `oc` columns.
            DTypeError: `a` is of another type.
            ArgumentError: `s0` or `oc` is not positive, or `p0` is negative or too large.
        """
        fn = "col2im_1d"
        if a.ne[2] != 1 or a.ne[3] != 1:
            fail_shape(fn, "a must be a matrix", a)
        require_contiguous(fn, "a", a)
        require_type(fn, "a", a, DType.F32, DType.F16, DType.BF16)
        if s0 < 1 or oc < 1 or p0 < 0:
            fail_arg(fn, f"s0 = {s0} and oc = {oc} must be positive, and p0 = {p0} not negative")
        if a.ne[0] % oc:
            fail_shape(fn, f"the row length must be a multiple of oc = {oc}", a)
        length = (a.ne[1] - 1) * s0 + a.ne[0] // oc - 2 * p0
        if length < 1 or a.ne[0] == 0:
            fail_arg(fn, f"p0 = {p0} leaves no element of {a.describe()}")
        return self._op(Op.COL2IM_1D, a.dtype, (length, oc, 1, 1), (a,), {"s0": s0, "oc": oc, "p0": p0})


def _patches(
    fn: str, a: Tensor, b: Tensor, s: tuple[int, int], p: tuple[int, int], d: tuple[int, int], is_2d: bool
) -> tuple[Ne, dict[str, Any]]:
    """Return the extents and the params of the patches of the data `b` under the kernel `a`."""
    k, n = a.ne, b.ne
    if is_2d:
        if k[2] != n[2]:
            fail_shape(fn, f"a has {k[2]} channels, ne[2], and b {n[2]}; they must be equal", a, b)
        (width, height), params = places(fn, a, b, s, p, d)
        return (k[0] * k[1] * k[2], width, height, n[3]), {**params, "is_2d": True}
    if k[1] != n[1] or n[3] != 1:
        fail_shape(fn, "a and b must have equal ne[1], the channels, and b an ne[3] of 1", a, b)
    (width,), params = places(fn, a, b, s[:1], p[:1], d[:1])
    return (k[0] * k[1], width, n[2], 1), {**params, "s1": s[1], "p1": p[1], "d1": d[1], "is_2d": False}


# -- gradients ---


def _back_im2col(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    p = node.params
    kernel, data = node.operand(0), node.operand(1)
    s0, s1, p0, p1, d0, d1 = (p[name] for name in ("s0", "s1", "p0", "p1", "d0", "d1"))
    return c.im2col_back(grad, kernel, data.ne, s0, s1, p0, p1, d0, d1, p["is_2d"])


# -- cases ---


def _draw_im2col_2d(p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels, dtype = p.int(1, 4), p.one_of(F32, F16)
    p.nmse = 0
    kernel = p.leaf(dtype, (*k, channels, p.extra(1, 3)))
    p.out("im2col", kernel, p.leaf(F32, (*n, channels, p.extra(1, 2))), *s, *q, *d, True, dtype)


def _draw_im2col_1d(p: Program) -> None:
    n, k, s, q, d = geometry(p, 1)
    channels, dtype = p.int(1, 4), p.one_of(F32, F16)
    p.nmse = 0
    kernel, data = p.leaf(dtype, (*k, channels, p.extra(1, 3))), p.leaf(F32, (*n, channels, p.extra(1, 3)))
    p.out("im2col", kernel, data, *s, 0, *q, 0, *d, 0, False, dtype)


def _draw_im2col_back(p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels, batch = p.int(1, 4), p.extra(1, 2)
    grad = p.leaf(F32, (k[0] * k[1] * channels, *window_places(n, k, s, q, d), batch))
    kernel = p.leaf(F32, (*k, channels, 1))
    p.nmse = 1e-6
    p.out("im2col_back", grad, kernel, [*n, channels, batch], *s, *q, *d, True)


def _draw_im2col_3d(p: Program) -> None:
    n, k, s, q, d = geometry(p, 3)
    channels, dtype = p.int(1, 3), p.one_of(F32, F16)
    p.nmse = 0
    kernel = p.leaf(dtype, (*k, channels * p.int(1, 2)))
    data = p.operand(F32, (*n, channels * p.int(1, 2)), PLAIN, PADDED)
    p.out("im2col_3d", kernel, data, channels, *s, *q, *d, dtype)


def _draw_col2im_1d(p: Program) -> None:
    channels, taps, places, stride = p.int(1, 4), p.int(1, 5), p.int(1, 9), p.int(1, 3)
    padding = p.int(0, min(2, ((places - 1) * stride + taps - 1) // 2))
    dtype = p.one_of(F32, F16, BF16)
    p.nmse = tolerance(dtype)
    p.out("col2im_1d", p.leaf(dtype, (taps * channels, places)), stride, channels, padding)


def _draw_conv_1d(name: str, p: Program) -> None:
    n, k, s, q, d = geometry(p, 1)
    channels = p.int(1, 4)
    p.nmse = 1e-5
    depthwise = "dw" in name
    kernel = p.leaf(
        F16, (*k, 1 if depthwise else channels, channels if depthwise else p.int(1, 4)), **POSITIVE
    )
    # ggml's conv_1d returns a batch with its dimensions in the wrong order.
    p.out(name, kernel, p.leaf(F32, (*n, channels), **POSITIVE), *s, *q, *d)


def _draw_conv_2d_dw(p: Program) -> None:
    n, k, s, q, d = geometry(p, 2)
    channels = p.int(1, 5)
    p.nmse = 1e-5
    kernel = p.leaf(F16, (*k, 1, channels), **POSITIVE)
    p.out("conv_2d_dw", kernel, p.leaf(F32, (*n, channels, p.extra(1, 3)), **POSITIVE), *s, *q, *d)


SPECS = (
    OpSpec(
        Op.IM2COL,
        backward={0: unchanged, 1: _back_im2col},
        params=("s0", "s1", "p0", "p1", "d0", "d1", "is_2d"),
        samples={
            "im2col": lambda c, t: c.im2col(main(c, t, 3, 3, 2, 4), f32(c, 16, 16, 2), 1, 1, 1, 1, 1, 1, True)
        },
        cases={
            "im2col of two dimensions": _draw_im2col_2d,
            "im2col of one dimension": _draw_im2col_1d,
            "conv_1d": partial(_draw_conv_1d, "conv_1d"),
            "conv_1d_dw": partial(_draw_conv_1d, "conv_1d_dw"),
            "conv_2d": partial(draw_conv_2d, "conv_2d"),
            "conv_2d_dw": _draw_conv_2d_dw,
        },
        perf=(
            Perf(
                "im2col",
                "f16,f32",
                lambda c, s: c.im2col(
                    c.new_tensor(F16, (3, 3, 64, 1)),
                    c.new_tensor(F32, (32 * s, 32 * s, 64)),
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    True,
                    F16,
                ),
            ),
        ),
    ),
    OpSpec(
        Op.IM2COL_BACK,
        backward={1: unchanged},
        params=("s0", "s1", "p0", "p1", "d0", "d1", "is_2d"),
        samples={
            "im2col_back": lambda c, t: c.im2col_back(
                main(c, t, 18, 8, 7, 2), f32(c, 3, 3, 2, 3), (8, 7, 2, 2), 1, 1, 1, 1, 1, 1, True
            )
        },
        cases={"im2col_back": _draw_im2col_back},
    ),
    OpSpec(
        Op.IM2COL_3D,
        params=("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2", "ic"),
        samples={
            "im2col_3d": lambda c, t: c.im2col_3d(
                main(c, t, 3, 3, 3, 2), f32(c, 8, 8, 8, 1), 1, 1, 1, 1, 0, 0, 0, 1, 1, 1
            )
        },
        cases={"im2col_3d": _draw_im2col_3d, "conv_3d": partial(draw_conv_3d, "conv_3d")},
    ),
    OpSpec(
        Op.COL2IM_1D,
        params=("s0", "oc", "p0"),
        samples={"col2im_1d": lambda c, t: c.col2im_1d(main(c, t, 12, 7), 2, 3)},
        cases={"col2im_1d": _draw_col2im_1d},
    ),
)
