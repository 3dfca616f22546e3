"""Pooling; results are f32.

POOL_1D has the params `op` (an `OpPool`), `k0, s0, p0`; POOL_2D and POOL_2D_BACK `op, k0, k1, s0, s1, p0,
p1`: kernel, stride and padding along width (0) and height (1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, OpPool, as_enum
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, require_int32
from ggmlb.core.ops.spec import F16, F32, Extents, OpSpec, Perf, f32, flat, main, window_places
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.testing.draw import Program


class PoolOps(OpBase):
    """pool_1d, pool_2d, pool_2d_back."""

    def pool_1d(self, a: Tensor, op: OpPool | int | str, k0: int, s0: int, p0: int = 0) -> Tensor:
        """Return the maximum or mean of a window sliding along the rows (ggml_pool_1d).

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
        """Return the maximum or mean of a window sliding over planes (ggml_pool_2d).

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
        """Return the gradient of the operand `af` of `pool_2d`, for that of its result (ggml_pool_2d_back).

        `a` is the gradient of the result of `pool_2d(af, ...)`, with the same numbers.

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


# -- cases ---


def _drawn_pooling(p: Program) -> tuple[int, int, int, int]:
    """Draw extent, window size, stride and padding such that each window covers some data."""
    k = p.int(1, 4)
    padding = p.extra(0, k - 1)
    return max(1, k - 2 * padding) + p.int(0, 12), k, p.extra(1, 3), padding


def _draw_pool_1d(p: Program) -> None:
    n, k, s, q = _drawn_pooling(p)
    p.nmse = 1e-6
    p.out("pool_1d", p.leaf(p.one_of(F32, F16), (n, *p.ne(5, 3, 2)[:3])), p.one_of(*OpPool), k, s, q)


def _drawn_planes(p: Program) -> tuple[Extents, tuple[int | float, ...]]:
    (n0, k0, s0, q0), (n1, k1, s1, q1) = _drawn_pooling(p), _drawn_pooling(p)
    return (n0, n1, p.int(1, 3), p.int(1, 2)), (k0, k1, s0, s1, float(q0), float(q1))


def _draw_pool_2d(p: Program) -> None:
    ne, numbers = _drawn_planes(p)
    p.nmse = 1e-6
    p.out("pool_2d", p.leaf(p.one_of(F32, F16), ne), p.one_of(*OpPool), *numbers)


def _draw_pool_2d_back(p: Program) -> None:
    ne, numbers = _drawn_planes(p)
    k0, k1, s0, s1, q0, q1 = (int(n) for n in numbers)
    extents = window_places(ne[:2], (k0, k1), (s0, s1), (q0, q1), (1, 1))
    p.nmse = 1e-6
    p.out("pool_2d_back", p.leaf(F32, (*extents, *ne[2:])), p.leaf(F32, ne), p.one_of(*OpPool), *numbers)


SPECS = (
    OpSpec(
        Op.POOL_1D,
        params=("op", "k0", "s0", "p0"),
        samples={"pool_1d": lambda c, t: c.pool_1d(main(c, t), OpPool.MAX, 2, 2)},
        cases={"pool_1d": _draw_pool_1d},
    ),  # op: OpPool
    OpSpec(
        Op.POOL_2D,
        backward={0: _back_pool_2d},
        params=("op", "k0", "k1", "s0", "s1", "p0", "p1"),
        samples={"pool_2d": lambda c, t: c.pool_2d(main(c, t, 16, 16, 2), OpPool.AVG, 2, 2, 2, 2)},
        cases={"pool_2d": _draw_pool_2d},
        perf=(Perf("pool_2d", "f32", lambda c, s: c.pool_2d(f32(c, 64 * s, 64 * s, 64), 0, 2, 2, 2, 2)),),
    ),
    OpSpec(
        Op.POOL_2D_BACK,
        params=("op", "k0", "k1", "s0", "s1", "p0", "p1"),
        samples={
            "pool_2d_back": lambda c, t: c.pool_2d_back(
                main(c, t, 5, 4, 3, 2), f32(c, 10, 8, 3, 2), OpPool.MAX, 2, 2, 2, 2
            )
        },
        cases={"pool_2d_back": _draw_pool_2d_back},
    ),
)
