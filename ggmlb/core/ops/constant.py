"""Tensors generated from numbers or a shape.

ARANGE has the params `start, stop, step`; FILL `value`; TRI `type` (a `TriType`); TIMESTEP_EMBEDDING
`dim, max_period`; DIAG none.
"""

from __future__ import annotations

import numpy as np

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TriType, as_enum
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, require_contiguous, require_type
from ggmlb.core.ops.spec import OpSpec, zero_gradient
from ggmlb.core.sharding import elementwise
from ggmlb.core.tensor import Tensor


class ConstantOps(OpBase):
    """arange, fill, tri, diag, timestep_embedding."""

    def arange(self, start: float, stop: float, step: float = 1.0) -> Tensor:
        """Return `start`, `start + step`, ... below `stop`: one row of f32 (ggml_arange).

        Raises:
            ArgumentError: `stop` is not above `start`, `step` is not positive, or a bound is no f32.
        """
        if not (stop > start and step > 0):
            fail_arg(
                "arange", f"start {start}, stop {stop}, step {step}: stop must be above start, step above 0"
            )
        # In float32, as in ggml: (1 - 0) / 0.1 is 10 there, but above 10 in float64.
        with np.errstate(all="ignore"):
            count = np.ceil((np.float32(stop) - np.float32(start)) / np.float32(step))
        if not np.isfinite(count):
            fail_arg("arange", f"start {start}, stop {stop}, step {step}: that is {count} elements")
        params = {"start": start, "stop": stop, "step": step}
        return self._op(Op.ARANGE, DType.F32, (int(count), 1, 1, 1), (), params)

    def fill(self, a: Tensor, c: float) -> Tensor:
        """Return a tensor of the type and shape of `a`, all elements `c` (ggml_fill).

        Raises:
            DTypeError: `a` is not f32 or f16.
            ShapeError: `a` is not contiguous.
        """
        return self._fill("fill", a, c, False)

    def fill_inplace(self, a: Tensor, c: float) -> Tensor:
        """Set all elements of `a` to `c`; errors as in `fill` (ggml_fill_inplace)."""
        return self._fill("fill_inplace", a, c, True)

    def _fill(self, fn: str, a: Tensor, c: float, inplace: bool) -> Tensor:
        require_type(fn, "a", a, DType.F32, DType.F16)
        require_contiguous(fn, "a", a)
        return self._like(inplace, Op.FILL, a, (a,), {"value": c})

    def tri(self, a: Tensor, type: TriType | int | str) -> Tensor:
        """Return `a` with zeros outside of the triangle `type` of its square matrices (ggml_tri).

        Raises:
            DTypeError: `a` is not f32.
            ShapeError: `a` is not contiguous, or its matrices are not square.
            ArgumentError: There is no such triangle.
        """
        require_type("tri", "a", a, DType.F32)
        require_contiguous("tri", "a", a)
        if a.ne[0] != a.ne[1]:
            fail_shape("tri", f"ne[0] = {a.ne[0]} and ne[1] = {a.ne[1]} must be equal", a)
        return self._op(Op.TRI, a.dtype, a.ne, (a,), {"type": as_enum("tri", TriType, type)})

    def diag(self, a: Tensor) -> Tensor:
        """Return matrices with the rows of `a` on their diagonals: ne `[n, n, ...]` (ggml_diag).

        Raises:
            ShapeError: ne[1] of `a` is not 1.
        """
        if a.ne[1] != 1:
            fail_shape("diag", f"ne[1] is {a.ne[1]}; it must be 1", a)
        return self._op(Op.DIAG, a.dtype, (a.ne[0], a.ne[0], a.ne[2], a.ne[3]), (a,))

    def timestep_embedding(self, timesteps: Tensor, dim: int, max_period: int = 10000) -> Tensor:
        """Return `[cos | sin]` of each time step at `dim // 2` frequencies (ggml_timestep_embedding).

        Returns:
            f32, ne `[dim, n_timesteps]`; the last element of an odd row is 0.

        Raises:
            ArgumentError: `dim` or `max_period` is not positive.
        """
        if dim < 1 or max_period < 1:
            fail_arg("timestep_embedding", f"dim = {dim} and max_period = {max_period} must be positive")
        params = {"dim": dim, "max_period": max_period}
        ne = (dim, timesteps.ne[0], 1, 1)
        return self._op(Op.TIMESTEP_EMBEDDING, DType.F32, ne, (timesteps,), params)


SPECS = (
    OpSpec(Op.DIAG),
    OpSpec(Op.ARANGE, params=("start", "stop", "step")),
    OpSpec(Op.TIMESTEP_EMBEDDING, params=("dim", "max_period")),
    OpSpec(Op.TRI, params=("type",)),
    OpSpec(Op.FILL, backward={0: zero_gradient}, params=("value",), inplace=1, shard=elementwise),
)
