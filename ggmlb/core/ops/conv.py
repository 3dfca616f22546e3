"""Convolution as ggml composes it: im2col patches times the kernel.

`a` is the kernel, `b` the data; `s`, `p` and `d` are stride, padding and dilation, and the digit after them
is the dimension: `s0` is the stride along the width. Params: IM2COL and IM2COL_BACK have `s0, s1, p0, p1, d0,
d1, is_2d`; IM2COL_3D `s0..s2, p0..p2, d0..d2, ic`; COL2IM_1D `s0, oc, p0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import fail_arg, fail_shape, full_ne, require_contiguous, require_type
from ggmlb.core.ops.conv_direct import conv_extents
from ggmlb.core.ops.copy import CopyOps
from ggmlb.core.ops.matmul import MatmulOps
from ggmlb.core.ops.spec import OpSpec, zero_gradient
from ggmlb.core.ops.views import ViewOps
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context


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
        (w, h, d), params = conv_extents(fn, a, b, (s0, s1, s2), (p0, p1, p2), (d0, d1, d2))
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
        """Add up `T` overlapping columns of `K` elements: ne `[(T - 1) * s0 + K - 2 * p0, oc]`.

        Source: ggml_col2im_1d.

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
        (width, height), params = conv_extents(fn, a, b, s, p, d)
        return (k[0] * k[1] * k[2], width, height, n[3]), {**params, "is_2d": True}
    if k[1] != n[1] or n[3] != 1:
        fail_shape(fn, "a and b must have equal ne[1], the channels, and b an ne[3] of 1", a, b)
    (width,), params = conv_extents(fn, a, b, s[:1], p[:1], d[:1])
    return (k[0] * k[1], width, n[2], 1), {**params, "s1": s[1], "p1": p[1], "d1": d[1], "is_2d": False}


# -- gradients ---


def _back_im2col(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    p = node.params
    kernel, data = node.operand(0), node.operand(1)
    s0, s1, p0, p1, d0, d1 = (p[name] for name in ("s0", "s1", "p0", "p1", "d0", "d1"))
    return c.im2col_back(grad, kernel, data.ne, s0, s1, p0, p1, d0, d1, p["is_2d"])


SPECS = (
    OpSpec(
        Op.IM2COL,
        backward={0: zero_gradient, 1: _back_im2col},
        params=("s0", "s1", "p0", "p1", "d0", "d1", "is_2d"),
    ),
    OpSpec(Op.IM2COL_BACK, backward={1: zero_gradient}, params=("s0", "s1", "p0", "p1", "d0", "d1", "is_2d")),
    OpSpec(Op.IM2COL_3D, params=("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2", "ic")),
    OpSpec(Op.COL2IM_1D, params=("s0", "oc", "p0")),
)
