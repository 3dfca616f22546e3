"""Sorting and selecting. ARGSORT has the param `order` (a `SortOrder`), TOP_K has `k`; results are i32."""

from __future__ import annotations

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, SortOrder, as_enum
from ggmlb.core.ops.base import fail_arg, fail_shape
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.ops.views import ViewOps
from ggmlb.core.sharding import per_row
from ggmlb.core.tensor import Tensor


class SelectOps(ViewOps):
    """argmax, argsort, argsort_top_k, top_k."""

    def argmax(self, a: Tensor) -> Tensor:
        """Return the index of the largest element of each row of a matrix: ne `[ne1]` (ggml_argmax).

        Raises:
            ShapeError: `a` has more than two dimensions.
        """
        if a.ne[2] != 1 or a.ne[3] != 1:
            fail_shape("argmax", f"a must be a matrix, but has ne {list(a.ne)}", a)
        return self._op(Op.ARGMAX, DType.I32, (a.ne[1], 1, 1, 1), (a,))

    def argsort(self, a: Tensor, order: SortOrder | int | str = SortOrder.ASC) -> Tensor:
        """Return the indices that sort each row: the shape of `a` (ggml_argsort).

        Raises:
            ArgumentError: There is no such order.
        """
        return self._op(Op.ARGSORT, DType.I32, a.ne, (a,), {"order": as_enum("argsort", SortOrder, order)})

    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """Return the indices of the `k` largest elements of each row, descending (ggml_argsort_top_k).

        It is a view of `argsort`.

        Raises:
            ArgumentError: A row has fewer than `k` elements.
        """
        _check_k("argsort_top_k", a, k)
        order = self.argsort(a, SortOrder.DESC)
        return self.view_4d(order, k, *a.ne[1:], *order.nb[1:], 0)

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Return the indices of the `k` largest elements of each row, in any order (ggml_top_k).

        Raises:
            ArgumentError: A row has fewer than `k` elements.
        """
        _check_k("top_k", a, k)
        return self._op(Op.TOP_K, DType.I32, (k, *a.ne[1:]), (a,), {"k": k})


def _check_k(fn: str, a: Tensor, k: int) -> None:
    if not 0 <= k <= a.ne[0]:
        fail_arg(fn, f"k is {k}; it must be at most the row length of {a.describe()}")


SPECS = (
    OpSpec(Op.ARGMAX),
    OpSpec(Op.ARGSORT, params=("order",), shard=per_row),
    OpSpec(Op.TOP_K, params=("k",), shard=per_row),
)
