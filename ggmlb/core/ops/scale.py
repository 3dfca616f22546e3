"""Scaling and clamping. SCALE has the params `scale, bias`; CLAMP has `min, max`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, fail_contiguous
from ggmlb.core.ops.binary import is_padded_1d
from ggmlb.core.ops.spec import OpSpec, flat
from ggmlb.core.sharding import elementwise
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context


class ScaleOps(OpBase):
    """scale, scale_bias, clamp and their in-place forms."""

    def scale(self, a: Tensor, s: float) -> Tensor:
        """Return `a * s` (ggml_scale).

        Raises:
            ShapeError: `a` has gaps other than between rows.
        """
        return self._scale("scale", a, s, 0.0, False)

    def scale_inplace(self, a: Tensor, s: float) -> Tensor:
        """Return `scale`, written into the memory of `a` (ggml_scale_inplace)."""
        return self._scale("scale_inplace", a, s, 0.0, True)

    def scale_bias(self, a: Tensor, s: float, b: float) -> Tensor:
        """Return `a * s + b`; errors as in `scale` (ggml_scale_bias)."""
        return self._scale("scale_bias", a, s, b, False)

    def scale_bias_inplace(self, a: Tensor, s: float, b: float) -> Tensor:
        """Return `scale_bias`, written into the memory of `a` (ggml_scale_bias_inplace)."""
        return self._scale("scale_bias_inplace", a, s, b, True)

    def _scale(self, fn: str, a: Tensor, s: float, b: float, inplace: bool) -> Tensor:
        if not is_padded_1d(a):
            fail_contiguous(fn, "a", a, "contiguous except for gaps between rows")
        return self._like(inplace, Op.SCALE, a, (a,), {"scale": s, "bias": b})

    def clamp(self, a: Tensor, min: float, max: float) -> Tensor:
        """Return `a`, at least `min` and at most `max` (ggml_clamp).

        Raises:
            ArgumentError: `min` is above `max`.
        """
        return self._like(False, Op.CLAMP, a, (a,), _bounds("clamp", min, max))

    def clamp_inplace(self, a: Tensor, min: float, max: float) -> Tensor:
        """Return `clamp`, written into the memory of `a` (ggml_clamp_inplace)."""
        return self._like(True, Op.CLAMP, a, (a,), _bounds("clamp_inplace", min, max))


def _bounds(fn: str, low: float, high: float) -> dict[str, float]:
    if not low <= high:
        fail_arg(fn, f"min is {low} and max is {high}; min must not be above max")
    return {"min": low, "max": high}


# -- gradients ---


def _back_scale(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.scale(grad, node.params["scale"])


def _back_clamp(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    a, p = flat(c, node.operand(0)), node.params
    inside = c.mul(c.step(c.scale_bias(a, 1, -p["min"])), c.step(c.scale_bias(a, -1, p["max"])))
    return c.mul(grad, inside)


SPECS = (
    OpSpec(Op.SCALE, backward={0: _back_scale}, params=("scale", "bias"), inplace=1, shard=elementwise),
    OpSpec(Op.CLAMP, backward={0: _back_clamp}, params=("min", "max"), shard=elementwise),
)
