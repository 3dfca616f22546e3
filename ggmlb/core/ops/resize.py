"""Interpolation. UPSCALE has the params `mode` (a `ScaleMode`), `align_corners` and `antialias`."""

from __future__ import annotations

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, ScaleFlag, ScaleMode
from ggmlb.core.ops.base import OpBase, as_enum, fail_arg, full_ne, require_type
from ggmlb.core.tensor import Ne, Tensor


class ResizeOps(OpBase):
    """upscale, upscale_ext, interpolate."""

    def upscale(self, a: Tensor, scale_factor: int, mode: int = ScaleMode.NEAREST) -> Tensor:
        """Return `a`, `scale_factor` times as wide and as high; raises as `interpolate` (ggml_upscale)."""
        if scale_factor <= 1:
            fail_arg("upscale", f"scale_factor is {scale_factor}; it must be more than 1")
        ne = (a.ne[0] * scale_factor, a.ne[1] * scale_factor, a.ne[2], a.ne[3])
        return self._interpolate("upscale", a, ne, mode)

    def upscale_ext(
        self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int = ScaleMode.NEAREST
    ) -> Tensor:
        """Return `interpolate`, under its older name (ggml_upscale_ext)."""
        return self._interpolate("upscale_ext", a, full_ne((ne0, ne1, ne2, ne3), "upscale_ext"), mode)

    def interpolate(
        self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int = ScaleMode.NEAREST
    ) -> Tensor:
        """Return `a`, resampled to ne `[ne0, ne1, ne2, ne3]` (ggml_interpolate).

        Args:
            a: f32.
            ne0: Width of the result.
            ne1: Height of the result.
            ne2: Extent 2 of the result, always by the nearest element.
            ne3: Extent 3 of the result, always by the nearest element.
            mode: A `ScaleMode`, or-ed with `ScaleFlag` values.

        Raises:
            DTypeError: `a` is not f32.
            ShapeError: An extent is negative.
            ArgumentError: There is no such mode, or antialiasing is asked of one other than BILINEAR.
        """
        return self._interpolate("interpolate", a, full_ne((ne0, ne1, ne2, ne3), "interpolate"), mode)

    def _interpolate(self, fn: str, a: Tensor, ne: Ne, mode: int) -> Tensor:
        kind = as_enum(fn, ScaleMode, mode & 0xFF)
        antialias = bool(mode & ScaleFlag.ANTIALIAS)
        if antialias and kind is not ScaleMode.BILINEAR:
            fail_arg(fn, f"ANTIALIAS goes with BILINEAR only, not with {kind.name}")
        require_type(fn, "a", a, DType.F32)
        params = {
            "mode": kind,
            "align_corners": bool(mode & ScaleFlag.ALIGN_CORNERS),
            "antialias": antialias,
        }
        return self._op(Op.UPSCALE, a.dtype, ne, (a,), params)
