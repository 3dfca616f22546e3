"""Direct convolution: one op, without im2col.

`a` is the kernel, `b` the data; `s`, `p` and `d` are stride, padding and dilation, and the digit after them
is the dimension: `s0` is the stride along the width. Params: CONV_2D and CONV_2D_DW have `s0, s1, p0, p1, d0,
d1`; CONV_3D `s0..s2, p0..p2, d0..d2, c, n, oc`; CONV_TRANSPOSE_1D `s0, p0, d0`; CONV_TRANSPOSE_2D `stride`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.tensor import Tensor


class ConvDirectOps(OpBase):
    """conv_2d_direct, conv_2d_dw_direct, conv_3d_direct, conv_transpose_1d, conv_transpose_2d_p0."""

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
        (w, h), params = conv_extents(fn, a, b, (s0, s1), (p0, p1), (d0, d1))
        return self._op(Op.CONV_2D, b.dtype, (w, h, a.ne[3], b.ne[3]), (a, b), params)

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

        If the channels of `b` are innermost in memory, so are the result's.

        Raises:
            ShapeError: There is not one kernel per channel, or it is larger than the padded data.
        """
        fn = "conv_2d_dw_direct"
        if a.ne[2] != 1 or a.ne[3] != b.ne[2]:
            fail_shape(fn, f"a must have ne[2] = 1 and ne[3] = {b.ne[2]}, the channels of b", a, b)
        (w, h), params = conv_extents(fn, a, b, (stride0, stride1), (pad0, pad1), (dilation0, dilation1))
        channels, batch = b.ne[2:]
        nb = None
        if b.is_contiguous_channels():
            size = b.dtype.type_size
            nb = (channels * size, w * channels * size, size, h * w * channels * size)
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
        """Return `conv_3d` to `oc` channels in one op, f32, ne `[OW, OH, OD, oc * n]` (ggml_conv_3d_direct).

        The kernel `a` has ne `[KW, KH, KD, c * oc]`, for `c` channels of the data and `oc` of the result; the
        data `b` has ne `[W, H, D, c * n]`, for a batch of `n`.

        Raises:
            ShapeError: ne[3] of `a` or `b` differs, or the kernel is larger than the padded data.
        """
        fn = "conv_3d_direct"
        if a.ne[3] != c * oc or b.ne[3] != c * n:
            fail_shape(fn, f"a must have ne[3] = c * oc = {c * oc}, and b ne[3] = c * n = {c * n}", a, b)
        (w, h, d), params = conv_extents(fn, a, b, (s0, s1, s2), (p0, p1, p2), (d0, d1, d2))
        params |= {"c": c, "n": n, "oc": oc}
        return self._op(Op.CONV_3D, DType.F32, (w, h, d, oc * n), (a, b), params)

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
        ne = ((b.ne[0] - 1) * stride + a.ne[0], (b.ne[1] - 1) * stride + a.ne[1], a.ne[2], b.ne[3])
        return self._op(Op.CONV_TRANSPOSE_2D, DType.F32, ne, (a, b), {"stride": stride})


def conv_extents(
    fn: str, a: Tensor, b: Tensor, strides: Sequence[int], paddings: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], dict[str, int]]:
    """Return the output extents of a convolution, and strides, paddings and dilations as params.

    Raises:
        ShapeError: The kernel is larger than the padded data.
        ArgumentError: A stride or dilation is not positive, or a padding is negative.
    """
    sizes: list[int] = []
    params: dict[str, int] = {}
    for dim, (s, p, d) in enumerate(zip(strides, paddings, dilations, strict=True)):
        if s < 1 or d < 1 or p < 0:
            fail_arg(
                fn,
                f"s{dim} = {s} and d{dim} = {d} must be positive, and the padding p{dim} = {p} not negative",
            )
        size = (b.ne[dim] + 2 * p - d * (a.ne[dim] - 1) - 1) // s + 1
        if size < 1:
            fail_shape(fn, f"the kernel a is larger than the padded data b along dimension {dim}", a, b)
        sizes.append(size)
        params |= {f"s{dim}": s, f"p{dim}": p, f"d{dim}": d}
    return sizes, params


SPECS = (
    OpSpec(Op.CONV_TRANSPOSE_1D, params=("s0", "p0", "d0")),
    OpSpec(Op.CONV_2D, params=("s0", "s1", "p0", "p1", "d0", "d1")),
    OpSpec(Op.CONV_3D, params=("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2", "c", "n", "oc")),
    OpSpec(Op.CONV_2D_DW, params=("s0", "s1", "p0", "p1", "d0", "d1")),
    OpSpec(Op.CONV_TRANSPOSE_2D, params=("stride",)),
)
