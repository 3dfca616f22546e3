"""Sums and means. None of these ops has params."""

from __future__ import annotations

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_dtype, require_same_shape
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.sharding import per_row
from ggmlb.core.tensor import Tensor


class ReduceOps(OpBase):
    """sum, sum_rows, mean, cumsum, count_equal."""

    def sum(self, a: Tensor) -> Tensor:
        """Return the sum of all elements, a scalar of the type of `a` (ggml_sum)."""
        return self._op(Op.SUM, a.dtype, (1, 1, 1, 1), (a,))

    def sum_rows(self, a: Tensor) -> Tensor:
        """Return the sum of each row: type of `a`, ne `[1, ne1, ne2, ne3]` (ggml_sum_rows)."""
        return self._op(Op.SUM_ROWS, a.dtype, (1, *a.ne[1:]), (a,))

    def mean(self, a: Tensor) -> Tensor:
        """Return the mean of each row: f32, ne `[1, ne1, ne2, ne3]` (ggml_mean)."""
        return self._op(Op.MEAN, DType.F32, (1, *a.ne[1:]), (a,))

    def cumsum(self, a: Tensor) -> Tensor:
        """Return the running sum along each row (ggml_cumsum).

        Raises:
            DTypeError: `a` is not f32.
        """
        if a.dtype is not DType.F32:
            fail_dtype("cumsum", "a", a, DType.F32)
        return self._op(Op.CUMSUM, a.dtype, a.ne, (a,))

    def count_equal(self, a: Tensor, b: Tensor) -> Tensor:
        """Return how many elements of `a` and `b` are equal: an i64 scalar (ggml_count_equal).

        Raises:
            ShapeError: The shapes differ.
        """
        require_same_shape("count_equal", a, b)
        return self._op(Op.COUNT_EQUAL, DType.I64, (1, 1, 1, 1), (a, b))


SPECS = (
    OpSpec(Op.SUM, backward={0: lambda c, t, g: c.repeat(g, t.operand(0))}),
    OpSpec(
        Op.SUM_ROWS, backward={0: lambda c, t, g: c.repeat(g, t.operand(0))}, shard=per_row, linear=((0,),)
    ),
    OpSpec(Op.CUMSUM, shard=per_row),
    OpSpec(
        Op.MEAN,
        backward={0: lambda c, t, g: c.repeat(c.scale(g, 1 / t.operand(0).ne[0]), t.operand(0))},
        shard=per_row,
    ),
    OpSpec(Op.COUNT_EQUAL),
)
