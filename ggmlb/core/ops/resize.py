"""Interpolation. UPSCALE has the params `mode` (a `ScaleMode`), `align_corners` and `antialias`."""

from __future__ import annotations

from enum import Enum

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, ScaleFlag, ScaleMode, as_enum, whole_number
from ggmlb.core.ops.base import OpBase, fail_arg, full_ne, require_type
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.tensor import Ne, Tensor


class ResizeOps(OpBase):
    """upscale, upscale_ext, interpolate."""

    def upscale(
        self, a: Tensor, scale_factor: int, mode: ScaleMode | int | str = ScaleMode.NEAREST
    ) -> Tensor:
        """Return `a`, `scale_factor` times as wide and as high; errors as in `interpolate` (ggml_upscale)."""
        if scale_factor <= 1:
            fail_arg("upscale", f"scale_factor is {scale_factor}; it must be more than 1")
        ne = (a.ne[0] * scale_factor, a.ne[1] * scale_factor, a.ne[2], a.ne[3])
        return self._interpolate("upscale", a, ne, mode)

    def upscale_ext(
        self,
        a: Tensor,
        ne0: int,
        ne1: int,
        ne2: int,
        ne3: int,
        mode: ScaleMode | int | str = ScaleMode.NEAREST,
    ) -> Tensor:
        """Return `interpolate`, under its older name (ggml_upscale_ext)."""
        return self._interpolate("upscale_ext", a, full_ne((ne0, ne1, ne2, ne3), "upscale_ext"), mode)

    def interpolate(
        self,
        a: Tensor,
        ne0: int,
        ne1: int,
        ne2: int,
        ne3: int,
        mode: ScaleMode | int | str = ScaleMode.NEAREST,
    ) -> Tensor:
        """Return `a`, resampled to ne `[ne0, ne1, ne2, ne3]` (ggml_interpolate).

        Args:
            a: f32.
            ne0: Width of the result.
            ne1: Height of the result.
            ne2: Extent 2 of the result, always by the nearest element.
            ne3: Extent 3 of the result, always by the nearest element.
            mode: A `ScaleMode`, or-ed with `ScaleFlag` values; or their names, as `"bilinear|antialias"`.

        Raises:
            DTypeError: `a` is not f32.
            ShapeError: An extent is negative.
            ArgumentError: There is no such mode or flag, or antialiasing with another mode than BILINEAR.
        """
        return self._interpolate("interpolate", a, full_ne((ne0, ne1, ne2, ne3), "interpolate"), mode)

    def _interpolate(self, fn: str, a: Tensor, ne: Ne, mode: ScaleMode | int | str) -> Tensor:
        kind, flags = _read_mode(fn, mode)
        antialias = ScaleFlag.ANTIALIAS in flags
        if antialias and kind is not ScaleMode.BILINEAR:
            fail_arg(fn, f"ANTIALIAS needs BILINEAR, not {kind.name}")
        require_type(fn, "a", a, DType.F32)
        params = {"mode": kind, "align_corners": ScaleFlag.ALIGN_CORNERS in flags, "antialias": antialias}
        return self._op(Op.UPSCALE, a.dtype, ne, (a,), params)


def _read_mode(fn: str, mode: ScaleMode | int | str) -> tuple[ScaleMode, set[ScaleFlag]]:
    """Parse a mode (or-ed numbers, or names joined by `|`) into interpolation and flags."""
    if isinstance(mode, str):
        name, *flags = (part.strip() for part in mode.split("|"))
        return as_enum(fn, ScaleMode, name), {as_enum(fn, ScaleFlag, flag) for flag in flags}
    number = None if isinstance(mode, Enum) else whole_number(mode)
    if number is None:
        return as_enum(fn, ScaleMode, mode), set()
    bits = (1 << bit for bit in range(8, number.bit_length()))
    return as_enum(fn, ScaleMode, number & 0xFF), {as_enum(fn, ScaleFlag, b) for b in bits if number & b}


SPECS = (OpSpec(Op.UPSCALE, params=("mode", "align_corners", "antialias")),)
