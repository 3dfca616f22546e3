"""Tensors generated from numbers or a shape.

ARANGE has the params `start, stop, step`; FILL `value`; TRI `type` (a `TriType`); TIMESTEP_EMBEDDING
`dim, max_period`; DIAG none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TriType, as_enum
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, require_contiguous, require_type
from ggmlb.core.ops.spec import ANY, BF16, F16, F32, PADDED, PLAIN, ROW, OpSpec, main, no_such_node, unchanged
from ggmlb.core.sharding import elementwise
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.testing.draw import Program


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
        """Set all elements of `a` to `c`; raises as `fill` (ggml_fill_inplace)."""
        return self._fill("fill_inplace", a, c, True)

    def _fill(self, fn: str, a: Tensor, c: float, inplace: bool) -> Tensor:
        require_type(fn, "a", a, DType.F32, DType.F16)
        require_contiguous(fn, "a", a)
        return self._like(inplace, Op.FILL, a, (a,), {"value": c})

    def tri(self, a: Tensor, type: TriType | int | str) -> Tensor:
        """Return `a` with zeros outside of a triangle of its square matrices (ggml_tri).

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


# -- cases ---


def _draw_tri(p: Program) -> None:
    p.nmse = 0
    n = p.int(1, 12)
    p.out("tri", p.leaf(F32, (n, n, p.extra(1, 3), p.extra(1, 2))), p.one_of(*TriType))


def _draw_diag(p: Program) -> None:
    p.nmse = 0
    p.out("diag", p.operand(F32, (p.int(1, 12), 1, p.extra(1, 3), p.extra(1, 2)), PLAIN, PADDED))


def _draw_fill(p: Program) -> None:
    p.nmse = 0
    p.out(
        p.one_of("fill", "fill_inplace"),
        p.operand(p.one_of(F32, F16, beyond=(BF16,)), p.ne(), PLAIN, beyond=ANY),
        p.float(-5, 5),
    )


def _draw_arange(p: Program) -> None:
    start, step = p.float(-5, 5), p.float(0.125, 2)
    p.nmse = 1e-12
    p.out("arange", start, start + p.int(1, 40) * step, step)


def _draw_timestep_embedding(p: Program) -> None:
    p.nmse = 1e-6
    steps = p.leaf(F32, (p.int(1, 6),), low=0, high=50)
    p.out("timestep_embedding", steps, p.int(2, 40), p.one_of(100, 10000))


SPECS = (
    OpSpec(Op.DIAG, samples={"diag": lambda c, t: c.diag(main(c, t, ROW))}, cases={"diag": _draw_diag}),
    OpSpec(
        Op.ARANGE,
        params=("start", "stop", "step"),
        samples={"arange": lambda c, t: c.arange(0, 8) if t == F32 else no_such_node(t)},
        cases={"arange": _draw_arange},
    ),
    OpSpec(
        Op.TIMESTEP_EMBEDDING,
        params=("dim", "max_period"),
        samples={"timestep_embedding": lambda c, t: c.timestep_embedding(main(c, t, 8), 64)},
        cases={"timestep_embedding": _draw_timestep_embedding},
    ),
    OpSpec(
        Op.TRI,
        params=("type",),
        samples={"tri": lambda c, t: c.tri(main(c, t, ROW, ROW), TriType.LOWER)},
        cases={"tri": _draw_tri},
    ),  # TriType
    OpSpec(
        Op.FILL,
        backward={0: unchanged},
        params=("value",),
        inplace=1,
        shard=elementwise,
        samples={"fill": lambda c, t: c.fill(main(c, t), 1.0)},
        cases={"fill": _draw_fill},
    ),
)
