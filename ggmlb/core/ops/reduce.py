"""Sums and means. None of these ops has params."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_dtype, require_same_shape
from ggmlb.core.ops.spec import ANY, BF16, F16, F32, I32, ROWS, OpSpec, Perf, main, rows, tolerance
from ggmlb.core.sharding import per_row
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.testing.draw import Program


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


# -- cases ---


def _draw_sum_all(p: Program) -> None:
    dtype = p.one_of(F32, F16, BF16)
    p.nmse = tolerance(dtype)
    p.out("sum", p.operand(dtype, p.ne(), *ROWS, beyond=ANY, low=0.1, high=1))


def _draw_reduce(name: str, p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne()
    if name == "mean":
        ne = (max(ne[0], 1), *ne[1:])  # of nothing it is not a number
    p.out(name, p.operand(F32, ne, *ROWS, beyond=ANY, low=0.1, high=1))


def _draw_count_equal(p: Program) -> None:
    ne = p.ne(40, 9)  # ggml reads beyond the end of tensors of more dimensions
    p.out("count_equal", *(p.leaf(I32, ne, p.random.integers(0, 3, ne[::-1])) for _ in range(2)))


SPECS = (
    OpSpec(
        Op.SUM,
        backward={0: lambda c, t, g: c.repeat(g, t.operand(0))},
        samples={"sum": lambda c, t: c.sum(main(c, t))},
        cases={"sum": _draw_sum_all},
    ),
    OpSpec(
        Op.SUM_ROWS,
        backward={0: lambda c, t, g: c.repeat(g, t.operand(0))},
        shard=per_row,
        samples={"sum_rows": lambda c, t: c.sum_rows(main(c, t))},
        cases={"sum_rows": partial(_draw_reduce, "sum_rows")},
        perf=(Perf("sum_rows", "f32", lambda c, s: c.sum_rows(rows(c, s))),),
    ),
    OpSpec(
        Op.CUMSUM,
        shard=per_row,
        samples={"cumsum": lambda c, t: c.cumsum(main(c, t))},
        cases={"cumsum": partial(_draw_reduce, "cumsum")},
        perf=(Perf("cumsum", "f32", lambda c, s: c.cumsum(rows(c, s))),),
    ),
    OpSpec(
        Op.MEAN,
        backward={0: lambda c, t, g: c.repeat(c.scale(g, 1 / t.operand(0).ne[0]), t.operand(0))},
        shard=per_row,
        samples={"mean": lambda c, t: c.mean(main(c, t))},
        cases={"mean": partial(_draw_reduce, "mean")},
    ),
    OpSpec(
        Op.COUNT_EQUAL,
        samples={"count_equal": lambda c, t: c.count_equal(main(c, t), main(c, t))},
        cases={"count_equal": _draw_count_equal},
    ),
)
