"""Convolution: `a` is the kernel, `b` the data; `s`, `p` and `d` are stride, padding and dilation.

Params: IM2COL and IM2COL_BACK have `s0, s1, p0, p1, d0, d1, is_2d`; CONV_2D and CONV_2D_DW the same but
`is_2d`; IM2COL_3D `s0..s2, p0..p2, d0..d2, ic`; CONV_3D these with `c, n, oc` in place of `ic`;
CONV_TRANSPOSE_1D `s0, p0, d0`; CONV_TRANSPOSE_2D `stride`; COL2IM_1D `s0, oc, p0`. The digit is the
dimension: `s0` is the stride along the width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.dtypes import DType
from ggmlb.enums import Op
from ggmlb.ops.base import fail_arg, fail_shape, full_ne, require_contiguous, require_type
from ggmlb.ops.copy import CopyOps
from ggmlb.ops.matmul import MatmulOps
from ggmlb.ops.views import ViewOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.tensor import Tensor


class ConvOps(CopyOps, MatmulOps, ViewOps):
    """Convolutions by im2col and a product, as ggml composes them, and those that are one op."""

    # -- by im2col -----------------------------------------------------------------------------

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
        """Return the patch of `b` under the kernel `a`, for each place of the kernel (ggml_im2col).

        Args:
            a: Kernel, ne `[KW, KH, IC, OC]` or `[K, IC, OC]`; only its shape is read.
            b: Data, ne `[W, H, IC, N]` or `[L, IC, N]`.
            s0: Strides, paddings and dilations along width (0) and height (1).
            s1: See `s0`.
            p0: See `s0`.
            p1: See `s0`.
            d0: See `s0`.
            d1: See `s0`.
            is_2D: Whether there are two spatial dimensions, else one.
            dst_type: Type of the result.

        Returns:
            ne `[KW * KH * IC, OW, OH, N]` or `[K * IC, OL, N]`.

        Raises:
            ShapeError: The channels differ, or the kernel is larger than the padded data.
            ArgumentError: A stride or dilation is not positive, or a padding is negative.
        """
        k, n = a.ne, b.ne
        width = conv_size("im2col", a, b, 0, s0, p0, d0)
        if is_2D:
            if k[2] != n[2]:
                fail_shape("im2col", f"a has {k[2]} channels, ne[2], and b {n[2]}; they must be equal", a, b)
            height = conv_size("im2col", a, b, 1, s1, p1, d1)
            ne = (k[0] * k[1] * k[2], width, height, n[3])
        else:
            if k[1] != n[1] or n[3] != 1:
                fail_shape("im2col", "a and b must have equal ne[1], the channels, and b an ne[3] of 1", a, b)
            ne = (k[0] * k[1], width, n[2], 1)
        params = {"s0": s0, "s1": s1, "p0": p0, "p1": p1, "d0": d0, "d1": d1, "is_2d": bool(is_2D)}
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

        Args:
            a: The gradient of the result of `im2col`.
            b: The kernel.
            ne: Four extents of the data.
            s0: Strides, paddings and dilations, as for `im2col`.
            s1: See `s0`.
            p0: See `s0`.
            p1: See `s0`.
            d0: See `s0`.
            d1: See `s0`.
            is_2D: Whether there are two spatial dimensions, else one.
        """
        params = {"s0": s0, "s1": s1, "p0": p0, "p1": p1, "d0": d0, "d1": d1, "is_2d": bool(is_2D)}
        return self._op(Op.IM2COL_BACK, DType.F32, full_ne(ne, "im2col_back"), (a, b), params)

    def conv_1d(self, a: Tensor, b: Tensor, s0: int = 1, p0: int = 0, d0: int = 1) -> Tensor:
        """Return the convolution of `b` with `a` through f16 patches: ne `[OL, OC, N]` (ggml_conv_1d).

        ggml labels the result of a batch in the wrong order; here it is put in order.

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

        Args:
            a: Kernel, ne `[KW, KH, IC, OC]`.
            b: Data, ne `[W, H, IC, N]`.
            s0: Strides, paddings and dilations along width (0) and height (1).
            s1: See `s0`.
            p0: See `s0`.
            p1: See `s0`.
            d0: See `s0`.
            d1: See `s0`.

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

        Args:
            a: Kernels, ne `[KW, KH, 1, C]`.
            b: Data, ne `[W, H, C, N]`.
            s0: Strides, paddings and dilations along width (0) and height (1).
            s1: See `s0`.
            p0: See `s0`.
            p1: See `s0`.
            d0: See `s0`.
            d1: See `s0`.

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
        """Return the patch of `b` under the kernel `a`, for each place of the kernel (ggml_im2col_3d).

        Args:
            a: Kernel, ne `[KW, KH, KD, IC * OC]`; only its shape is read.
            b: Data, ne `[W, H, D, IC * N]`.
            IC: Channels of the data.
            s0: Strides, paddings and dilations along width (0), height (1) and depth (2).
            s1: See `s0`.
            s2: See `s0`.
            p0: See `s0`.
            p1: See `s0`.
            p2: See `s0`.
            d0: See `s0`.
            d1: See `s0`.
            d2: See `s0`.
            dst_type: Type of the result.

        Returns:
            ne `[KW * KH * KD * IC, OW, OH, OD * N]`.

        Raises:
            ShapeError: `IC` does not divide ne[3], or the kernel is larger than the padded data.
            ArgumentError: A stride or dilation is not positive, or a padding is negative.
        """
        fn = "im2col_3d"
        if IC < 1 or a.ne[3] % IC or b.ne[3] % IC:
            fail_shape(fn, f"IC = {IC} must divide ne[3] of a and of b", a, b)
        w = conv_size(fn, a, b, 0, s0, p0, d0)
        h = conv_size(fn, a, b, 1, s1, p1, d1)
        d = conv_size(fn, a, b, 2, s2, p2, d2)
        ne = (a.ne[0] * a.ne[1] * a.ne[2] * IC, w, h, d * (b.ne[3] // IC))
        params = {
            "s0": s0, "s1": s1, "s2": s2, "p0": p0, "p1": p1, "p2": p2, "d0": d0, "d1": d1, "d2": d2,
            "ic": IC,
        }  # fmt: skip
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

    # -- as one op -----------------------------------------------------------------------------

    def conv_2d_direct(
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
        """Return `conv_2d` as one op, in the type of `b` (ggml_conv_2d_direct); same arguments.

        Raises:
            ShapeError: The channels differ, or the kernel is larger than the padded data.
        """
        fn = "conv_2d_direct"
        if a.ne[2] != b.ne[2]:
            fail_shape(fn, f"a has {a.ne[2]} channels, ne[2], and b {b.ne[2]}; they must be equal", a, b)
        ne = (
            conv_size(fn, a, b, 0, s0, p0, d0),
            conv_size(fn, a, b, 1, s1, p1, d1),
            a.ne[3],
            b.ne[3],
        )
        params = {"s0": s0, "s1": s1, "p0": p0, "p1": p1, "d0": d0, "d1": d1}
        return self._op(Op.CONV_2D, b.dtype, ne, (a, b), params)

    def conv_2d_dw_direct(
        self,
        a: Tensor,
        b: Tensor,
        stride0: int = 1,
        stride1: int = 1,
        pad0: int = 0,
        pad1: int = 0,
        dilation0: int = 1,
        dilation1: int = 1,
    ) -> Tensor:
        """Return `conv_2d_dw` as one op, in the type of `b` (ggml_conv_2d_dw_direct).

        Where the channels of `b` are innermost in memory, so are those of the result.

        Raises:
            ShapeError: There is not one kernel per channel, or it is larger than the padded data.
        """
        fn = "conv_2d_dw_direct"
        if a.ne[2] != 1 or a.ne[3] != b.ne[2]:
            fail_shape(fn, f"a must have ne[2] = 1 and ne[3] = {b.ne[2]}, the channels of b", a, b)
        w = conv_size(fn, a, b, 0, stride0, pad0, dilation0)
        h = conv_size(fn, a, b, 1, stride1, pad1, dilation1)
        channels, batch = b.ne[2:]
        nb = None
        if b.is_contiguous_channels():
            size = b.dtype.type_size
            nb = (channels * size, w * channels * size, size, h * w * channels * size)
        params = {"s0": stride0, "s1": stride1, "p0": pad0, "p1": pad1, "d0": dilation0, "d1": dilation1}
        return self._op(Op.CONV_2D_DW, b.dtype, (w, h, channels, batch), (a, b), params, nb=nb)

    def conv_3d_direct(
        self,
        a: Tensor,
        b: Tensor,
        s0: int,
        s1: int,
        s2: int,
        p0: int,
        p1: int,
        p2: int,
        d0: int,
        d1: int,
        d2: int,
        c: int,
        n: int,
        oc: int,
    ) -> Tensor:
        """Return `conv_3d` as one op, in f32 (ggml_conv_3d_direct).

        Args:
            a: Kernel, ne `[KW, KH, KD, c * oc]`.
            b: Data, ne `[W, H, D, c * n]`.
            s0: Strides, paddings and dilations along width (0), height (1) and depth (2).
            s1: See `s0`.
            s2: See `s0`.
            p0: See `s0`.
            p1: See `s0`.
            p2: See `s0`.
            d0: See `s0`.
            d1: See `s0`.
            d2: See `s0`.
            c: Channels of the data.
            n: Batch.
            oc: Channels of the result.

        Raises:
            ShapeError: ne[3] of `a` or `b` differs, or the kernel is larger than the padded data.
        """
        fn = "conv_3d_direct"
        if a.ne[3] != c * oc or b.ne[3] != c * n:
            fail_shape(fn, f"a must have ne[3] = c * oc = {c * oc}, and b ne[3] = c * n = {c * n}", a, b)
        ne = (
            conv_size(fn, a, b, 0, s0, p0, d0),
            conv_size(fn, a, b, 1, s1, p1, d1),
            conv_size(fn, a, b, 2, s2, p2, d2),
            oc * n,
        )
        params = {
            "s0": s0, "s1": s1, "s2": s2, "p0": p0, "p1": p1, "p2": p2, "d0": d0, "d1": d1, "d2": d2,
            "c": c, "n": n, "oc": oc,
        }  # fmt: skip
        return self._op(Op.CONV_3D, DType.F32, ne, (a, b), params)

    def conv_transpose_1d(self, a: Tensor, b: Tensor, s0: int = 1, p0: int = 0, d0: int = 1) -> Tensor:
        """Return the transposed convolution: f32, ne `[(L - 1) * s0 + K, OC, N]` (ggml_conv_transpose_1d).

        Args:
            a: Kernel, ne `[K, OC, IC]`.
            b: Data, a matrix of ne `[L, IC]`.
            s0: Stride.
            p0: Must be 0.
            d0: Must be 1.

        Raises:
            ShapeError: `b` is no matrix, or the channels differ.
            ArgumentError: The stride is not positive, `p0` is not 0 or `d0` is not 1.
        """
        fn = "conv_transpose_1d"
        if b.ne[2] != 1 or b.ne[3] != 1:
            fail_shape(fn, "b must be a matrix", a, b)
        if a.ne[2] != b.ne[1] or a.ne[3] != 1:
            fail_shape(fn, f"a must have ne[2] = {b.ne[1]}, the channels of b, and ne[3] = 1", a, b)
        if p0 != 0 or d0 != 1 or s0 < 1:
            fail_arg(fn, f"s0 = {s0}, p0 = {p0}, d0 = {d0}; s0 must be positive, p0 be 0 and d0 be 1")
        ne = ((b.ne[0] - 1) * s0 + a.ne[0], a.ne[1], b.ne[2], 1)
        return self._op(Op.CONV_TRANSPOSE_1D, DType.F32, ne, (a, b), {"s0": s0, "p0": p0, "d0": d0})

    def conv_transpose_2d_p0(self, a: Tensor, b: Tensor, stride: int) -> Tensor:
        """Return the transposed convolution without padding (ggml_conv_transpose_2d_p0).

        Args:
            a: Kernel, ne `[KW, KH, OC, IC]`.
            b: Data, ne `[W, H, IC, N]`.
            stride: Along both dimensions.

        Returns:
            f32, ne `[(W - 1) * stride + KW, (H - 1) * stride + KH, OC, N]`.

        Raises:
            ShapeError: The channels differ.
            ArgumentError: The stride is not positive.
        """
        fn = "conv_transpose_2d_p0"
        if a.ne[3] != b.ne[2]:
            fail_shape(fn, f"a must have ne[3] = {b.ne[2]}, the channels of b", a, b)
        if stride < 1:
            fail_arg(fn, f"stride is {stride}; it must be positive")
        ne = (
            (b.ne[0] - 1) * stride + a.ne[0],
            (b.ne[1] - 1) * stride + a.ne[1],
            a.ne[2],
            b.ne[3],
        )
        return self._op(Op.CONV_TRANSPOSE_2D, DType.F32, ne, (a, b), {"stride": stride})


def conv_size(fn: str, a: Tensor, b: Tensor, dim: int, s: int, p: int, d: int) -> int:
    """Return how many places the kernel `a` has along a dimension of `b`.

    Raises:
        ShapeError: There is none.
        ArgumentError: The stride or dilation is not positive, or the padding is negative.
    """
    if s < 1 or d < 1 or p < 0:
        fail_arg(
            fn, f"s{dim} = {s} and d{dim} = {d} must be positive, and the padding p{dim} = {p} not negative"
        )
    places = (b.ne[dim] + 2 * p - d * (a.ne[dim] - 1) - 1) // s + 1
    if places < 1:
        fail_shape(fn, f"the kernel a is larger than the padded data b along dimension {dim}", a, b)
    return places
