"""Pooling; results are f32.

POOL_1D has the params `op` (an `OpPool`), `k0, s0, p0`; POOL_2D and POOL_2D_BACK `op, k0, k1, s0, s1, p0,
p1`: kernel, stride and padding along width (0) and height (1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, OpPool, as_enum
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, require_int32
from ggmlb.core.ops.spec import OpSpec, flat
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context


class PoolOps(OpBase):
    """pool_1d, pool_2d, pool_2d_back."""

    def pool_1d(self, a: Tensor, op: OpPool | int | str, k0: int, s0: int, p0: int = 0) -> Tensor:
        """Return the maximum or mean, as `op` says, of a window sliding along the rows (ggml_pool_1d).

        Raises:
            ShapeError: The window is larger than the padded row.
            ArgumentError: A number is out of range, or there is no such pooling.
        """
        width = _size("pool_1d", a, 0, k0, s0, p0)
        params = {"op": as_enum("pool_1d", OpPool, op), "k0": k0, "s0": s0, "p0": p0}
        return self._op(Op.POOL_1D, DType.F32, (width, *a.ne[1:]), (a,), params)

    def pool_2d(
        self,
        a: Tensor,
        op: OpPool | int | str,
        k0: int,
        k1: int,
        s0: int,
        s1: int,
        p0: float = 0,
        p1: float = 0,
    ) -> Tensor:
        """Return the maximum or mean, as `op` says, of a window sliding over planes (ggml_pool_2d).

        Raises:
            ShapeError: The window is larger than the padded plane.
            ArgumentError: A number is out of range, or there is no such pooling.
        """
        width = _size("pool_2d", a, 0, k0, s0, p0)
        height = _size("pool_2d", a, 1, k1, s1, p1)
        params = _params("pool_2d", op, k0, k1, s0, s1, p0, p1)
        return self._op(Op.POOL_2D, DType.F32, (width, height, *a.ne[2:]), (a,), params)

    def pool_2d_back(
        self,
        a: Tensor,
        af: Tensor,
        op: OpPool | int | str,
        k0: int,
        k1: int,
        s0: int,
        s1: int,
        p0: float = 0,
        p1: float = 0,
    ) -> Tensor:
        """Return the gradient of `af`, given the gradient `a` of `pool_2d(af, ...)` (ggml_pool_2d_back).

        The other arguments are those of `pool_2d`.

        Raises:
            ShapeError: `a` does not have the shape of the result.
            ArgumentError: A number is out of range, or there is no such pooling.
        """
        fn = "pool_2d_back"
        width, height = _size(fn, af, 0, k0, s0, p0), _size(fn, af, 1, k1, s1, p1)
        if a.ne != (width, height, *af.ne[2:]):
            fail_shape(fn, f"a must have ne {[width, height, *af.ne[2:]]}, as the pooled af has", a, af)
        params = _params(fn, op, k0, k1, s0, s1, p0, p1)
        return self._op(Op.POOL_2D_BACK, DType.F32, af.ne, (a, af), params)


def _size(fn: str, a: Tensor, dim: int, k: int, s: int, p: float) -> int:
    require_int32(fn, **{f"k{dim}": k, f"s{dim}": s, f"p{dim}": p})
    if k < 1 or s < 1 or p < 0:
        fail_arg(
            fn, f"k{dim} = {k} and s{dim} = {s} must be positive, and the padding p{dim} = {p} not negative"
        )
    places = int((a.ne[dim] + 2 * p - k) // s) + 1
    if places < 1:
        fail_shape(fn, f"the window of {k} is larger than dimension {dim} with its padding", a)
    return places


def _params(
    fn: str, op: OpPool | int | str, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float
) -> dict[str, int]:
    pool = as_enum(fn, OpPool, op)
    return {"op": pool, "k0": k0, "k1": k1, "s0": s0, "s1": s1, "p0": int(p0), "p1": int(p1)}


# -- gradients ---


def _back_pool_2d(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.pool_2d_back(grad, flat(c, node.operand(0)), **node.params)


SPECS = (
    OpSpec(Op.POOL_1D, params=("op", "k0", "s0", "p0")),
    OpSpec(Op.POOL_2D, backward={0: _back_pool_2d}, params=("op", "k0", "k1", "s0", "s1", "p0", "p1")),
    OpSpec(Op.POOL_2D_BACK, params=("op", "k0", "k1", "s0", "s1", "p0", "p1")),
)
