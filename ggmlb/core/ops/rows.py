"""Reading and writing rows by index. None of these ops has params."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, divides, fail_contiguous, fail_dtype, fail_shape
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

_ROWS = "contiguous within its rows"


class RowOps(OpBase):
    """get_rows, get_rows_back, set_rows."""

    def get_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the rows of `a` whose numbers are in `b` (ggml_get_rows).

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
            a: The gradient of the result, ne `[n, k]`; rows beyond those of `b` are not read.
            b: i32, one row of at most `k`.
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
        if b.ne[0] > p[1]:
            fail_shape("get_rows_back", "b must not have more elements than a has rows", a, b, c)
        if b.dtype is not DType.I32:
            fail_dtype("get_rows_back", "b", b, DType.I32)
        return self._op(Op.GET_ROWS_BACK, DType.F32, (r[0], r[1], 1, 1), (a, b))

    def set_rows(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Write row `i` of `b` to row `c[i]` of `a`, for all `i`; return a view of `a` (ggml_set_rows).

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


# -- gradients ---


def _back_get_rows_back(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    """Return the rows of the result's gradient, and zeros for rows that have no number."""
    rows, n = c.get_rows(grad, node.operand(1)), node.operand(0).ne[1]
    return rows if rows.ne[1] == n else c.pad(rows, 0, n - rows.ne[1], 0, 0)


SPECS = (
    OpSpec(
        Op.GET_ROWS,
        backward={0: lambda c, t, g: c.get_rows_back(g, t.operand(1), t.operand(0))},
        shard=_shard_get_rows,
    ),
    OpSpec(Op.GET_ROWS_BACK, backward={0: _back_get_rows_back}),
    OpSpec(Op.SET_ROWS, shard=_shard_set_rows),
)
