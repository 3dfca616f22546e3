"""Reading and writing rows by index. None of these ops has params."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, divides, fail_contiguous, fail_dtype, fail_shape
from ggmlb.core.ops.spec import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    PADDED,
    PLAIN,
    READ_ONLY,
    ROW,
    ROWS,
    WEIGHTS,
    OpSpec,
    Perf,
    f32,
    i32,
    main,
)
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.testing.draw import Program

_ROWS = "contiguous within its rows"


class RowOps(OpBase):
    """get_rows, get_rows_back, set_rows."""

    def get_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the rows of `a` selected by `b` (ggml_get_rows).

        Args:
            a: ne `[n, n_rows, m, l]`, any type.
            b: i32 row numbers, ne `[k, m, l]`.

        Returns:
            ne `[n, k, m, l]`; i32 if `a` is, else f32.

        Raises:
            ShapeError: The outer extents differ.
            DTypeError: `b` is not i32.
        """
        p, q = a.ne, b.ne
        if p[2] != q[1] or p[3] != q[2] or q[3] != 1:
            fail_shape("get_rows", f"ne[1:] of b, {list(q[1:])}, must be ne[2:] of a and 1", a, b)
        if b.dtype is not DType.I32:
            fail_dtype("get_rows", "b", b, DType.I32)
        dtype = DType.I32 if a.dtype is DType.I32 else DType.F32
        return self._op(Op.GET_ROWS, dtype, (p[0], q[0], q[1], q[2]), (a, b))

    def get_rows_back(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return the gradient of `get_rows(c, b)`: row `i` of `a` added to row `b[i]` (ggml_get_rows_back).

        Args:
            a: The gradient of the result, ne `[n, k]`.
            b: i32, one row.
            c: Tensor of the result's shape, ne `[n, n_rows]`; its data is not read.

        Returns:
            f32, of the shape of `c`.

        Raises:
            ShapeError: The shapes do not fit.
            DTypeError: `b` is not i32.
        """
        p, r = a.ne, c.ne
        if p[2:] != (1, 1) or b.ne[1:] != (1, 1, 1) or r[2:] != (1, 1) or p[0] != r[0]:
            fail_shape("get_rows_back", "a and c must be matrices with equal ne[0], and b one row", a, b, c)
        if b.dtype is not DType.I32:
            fail_dtype("get_rows_back", "b", b, DType.I32)
        return self._op(Op.GET_ROWS_BACK, DType.F32, (r[0], r[1], 1, 1), (a, b))

    def set_rows(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Write the rows of `b` into the rows of `a` selected by `c`; return a view of `a` (ggml_set_rows).

        The node's sources are `(b, c, a)`, as in ggml.

        Args:
            a: ne `[n, n_rows, m, l]`, any type.
            b: f32 or f16, ne `[n, k, m, l]`.
            c: i64 or i32 row numbers, ne `[k, m or a divisor, l or a divisor]`.

        Raises:
            ShapeError: The shapes do not fit, or rows are not contiguous.
            DTypeError: `b` or `c` is of another type.
        """
        fn = "set_rows"
        p, q, r = a.ne, b.ne, c.ne
        if p[0] != q[0] or p[2] != q[2] or p[3] != q[3]:
            fail_shape(fn, "a and b must have equal ne[0], ne[2] and ne[3]", a, b, c)
        if q[1] != r[0] or r[3] != 1 or not divides(r[1], q[2]) or not divides(r[2], q[3]):
            fail_shape(fn, "ne[0] of c must be ne[1] of b, and its ne[1:3] must divide ne[2:4] of b", a, b, c)
        if b.dtype is not DType.F32 and b.dtype is not DType.F16:
            fail_dtype(fn, "b", b, DType.F32, DType.F16)
        if c.dtype is not DType.I64 and c.dtype is not DType.I32:
            fail_dtype(fn, "c", c, DType.I64, DType.I32)
        if not a.is_contiguous_rows():
            fail_contiguous(fn, "a", a, _ROWS)
        if not b.is_contiguous_rows():
            fail_contiguous(fn, "b", b, _ROWS)
        return self._op_into(Op.SET_ROWS, a, (b, c, a))


# -- how results are sharded over devices ---


def _shard_get_rows(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard by columns of the table."""
    return ShardOutcome(states[0], (states[0], MIRRORED)) if states[0].axis == 0 else None


def _shard_set_rows(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard by columns; the operands are the rows, their indices and the destination."""
    into = states[2]
    return ShardOutcome(into, (into, MIRRORED, into)) if into.is_cut and into.axis == 0 else None


# -- cases ---


def _draw_get_rows(p: Program) -> None:
    dtype = p.one_of(F32, F16, BF16, I32, *WEIGHTS, beyond=READ_ONLY)
    n, n_rows, n2, n3 = p.ne(3 if dtype.block_size > 1 else 70, 7, 3, 2)
    n *= dtype.block_size
    count = p.int(1, 8)
    p.nmse = 1e-7
    index = p.random.integers(0, n_rows, (n3, n2, count))
    p.out(
        "get_rows",
        p.operand(dtype, (n, n_rows, n2, n3), PLAIN, PADDED, beyond=ROWS),
        p.leaf(I32, (count, n2, n3), index),
    )


def _draw_get_rows_back(p: Program) -> None:
    n, count, n_rows = p.int(1, 40), p.int(1, 9), p.int(1, 6)
    dtype = p.one_of(F32, F16)
    index = p.leaf(I32, (count,), p.random.integers(0, n_rows, count))
    p.nmse = 1e-6
    p.out("get_rows_back", p.leaf(dtype, (n, count)), index, p.leaf(F32, (n, n_rows)))


def _draw_set_rows(p: Program) -> None:
    dtype = p.one_of(F32, F16, BF16, *WEIGHTS)
    n, n_rows, n2, n3 = p.ne(3 if dtype.block_size > 1 else 70, 7, 3, 2)
    n *= dtype.block_size
    count = p.int(1, n_rows)
    b2, b3 = p.one_of(1, n2), p.one_of(1, n3)
    index = np.stack([p.random.permutation(n_rows)[:count] for _ in range(b2 * b3)])
    p.nmse = 1e-3 if dtype.block_size > 1 else 1e-6
    p.rule = "dequant" if dtype.block_size > 1 else ""
    source = p.operand(F32, (n, count, n2, n3), *ROWS)
    rows = p.leaf(p.one_of(I32, I64), (count, b2, b3), index)
    p.out("set_rows", p.operand(dtype, (n, n_rows, n2, n3), PLAIN, beyond=(PADDED,)), source, rows)


def _perf(dtype: DType) -> Perf:
    def build(c: Context, s: int) -> Tensor:
        return c.get_rows(c.new_tensor(dtype, (1024 * s, 2048 * s)), i32(c, 512))

    return Perf("get_rows", dtype.name.lower(), build)


SPECS = (
    OpSpec(
        Op.GET_ROWS,
        backward={0: lambda c, t, g: c.get_rows_back(g, t.operand(1), t.operand(0))},
        shard=_shard_get_rows,
        samples={"get_rows": lambda c, t: c.get_rows(main(c, t), i32(c, 3))},
        cases={"get_rows": _draw_get_rows},
        perf=tuple(_perf(t) for t in (F32, F16, DType.Q4_0)),
    ),
    OpSpec(
        Op.GET_ROWS_BACK,
        backward={0: lambda c, t, g: c.get_rows(g, t.operand(1))},
        samples={
            "get_rows_back": lambda c, t: c.get_rows_back(main(c, t, ROW, 3), i32(c, 3), f32(c, ROW, 8))
        },
        cases={"get_rows_back": _draw_get_rows_back},
    ),
    OpSpec(
        Op.SET_ROWS,
        shard=_shard_set_rows,
        samples={"set_rows": lambda c, t: c.set_rows(main(c, t), f32(c, ROW, 2), c.new_tensor(I64, (2,)))},
        cases={"set_rows": _draw_set_rows},
        perf=(
            Perf(
                "set_rows",
                "f16,f32",
                lambda c, s: c.set_rows(
                    c.new_tensor(F16, (256 * s, 2048 * s)),
                    c.new_tensor(F32, (256 * s, 512)),
                    c.new_tensor(I64, (512,)),
                ),
            ),
        ),
    ),
)
