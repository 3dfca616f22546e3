"""Ops computed by a Python function, on the CPU backend.

Params: `fun`, `n_tasks` and `userdata`. The backend calls `fun` with NumPy arrays of four dimensions,
`ne` reversed. It reads the operands and writes the result `dst` in place:

    MAP_CUSTOM1    fun(dst, a, ith, nth, userdata)
    MAP_CUSTOM2    fun(dst, a, b, ith, nth, userdata)
    MAP_CUSTOM3    fun(dst, a, b, c, ith, nth, userdata)
    CUSTOM         fun(dst, args, ith, nth, userdata), with `args` a tuple

BF16 operands are ml_dtypes' bfloat16, quantised operands float32; a quantised result is declined. A call does
share `ith` of `nth` of the work, as in C; `nth` is at most `n_tasks`. A function may compute on any backend
except the one that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Final

import numpy.typing as npt

from ggmlb.core.arguments import alias
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, full_ne
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.tensor import Tensor

N_TASKS_MAX: Final = -1
"""`n_tasks` for as many tasks as the backend has threads (GGML_N_TASKS_MAX)."""

MAX_ARGS: Final = 9
"""Operands of `custom_4d` (GGML_MAX_SRC - 1); `custom_inplace` takes one less, beside its first."""

Custom = Callable[..., None]
alias("Custom", "Callable")

Array = npt.NDArray[Any]


class CustomOps(OpBase):
    """map_custom1..3, custom_4d, their in-place forms.

    Raises:
        ArgumentError: `fun` does not take these arguments, or `n_tasks` is neither positive nor
            `N_TASKS_MAX`.
    """

    def map_custom1(self, a: Tensor, fun: Custom, n_tasks: int = 1, userdata: Any = None) -> Tensor:
        """Return `fun` of `a`, with its type and shape (ggml_map_custom1)."""
        return self._map(Op.MAP_CUSTOM1, False, (a,), fun, n_tasks, userdata)

    def map_custom1_inplace(self, a: Tensor, fun: Custom, n_tasks: int = 1, userdata: Any = None) -> Tensor:
        """Return `map_custom1`, written into the memory of `a` (ggml_map_custom1_inplace)."""
        return self._map(Op.MAP_CUSTOM1, True, (a,), fun, n_tasks, userdata)

    def map_custom2(
        self, a: Tensor, b: Tensor, fun: Custom, n_tasks: int = 1, userdata: Any = None
    ) -> Tensor:
        """Return `fun` of `a` and `b`, with the type and shape of `a` (ggml_map_custom2)."""
        return self._map(Op.MAP_CUSTOM2, False, (a, b), fun, n_tasks, userdata)

    def map_custom2_inplace(
        self, a: Tensor, b: Tensor, fun: Custom, n_tasks: int = 1, userdata: Any = None
    ) -> Tensor:
        """Return `map_custom2`, written into the memory of `a` (ggml_map_custom2_inplace)."""
        return self._map(Op.MAP_CUSTOM2, True, (a, b), fun, n_tasks, userdata)

    def map_custom3(
        self, a: Tensor, b: Tensor, c: Tensor, fun: Custom, n_tasks: int = 1, userdata: Any = None
    ) -> Tensor:
        """Return `fun` of `a`, `b` and `c`, with the type and shape of `a` (ggml_map_custom3)."""
        return self._map(Op.MAP_CUSTOM3, False, (a, b, c), fun, n_tasks, userdata)

    def map_custom3_inplace(
        self, a: Tensor, b: Tensor, c: Tensor, fun: Custom, n_tasks: int = 1, userdata: Any = None
    ) -> Tensor:
        """Return `map_custom3`, written into the memory of `a` (ggml_map_custom3_inplace)."""
        return self._map(Op.MAP_CUSTOM3, True, (a, b, c), fun, n_tasks, userdata)

    def custom_4d(
        self,
        dtype: DType | str,
        ne0: int,
        ne1: int,
        ne2: int,
        ne3: int,
        args: Sequence[Tensor],
        fun: Custom,
        n_tasks: int = 1,
        userdata: Any = None,
    ) -> Tensor:
        """Return `fun` of `args`, with the given type and shape (ggml_custom_4d).

        C's `n_args` is omitted: it is the length of `args`.

        Raises:
            ArgumentError: There are too many operands.
            ShapeError: An extent is negative.
        """
        fn = "custom_4d"
        if len(args) > MAX_ARGS:
            fail_arg(fn, f"{len(args)} operands given; give at most {MAX_ARGS}")
        params = _params(fn, ("dst", "args"), fun, n_tasks, userdata)
        ne = full_ne((ne0, ne1, ne2, ne3), fn)
        return self._op(Op.CUSTOM, DType.parse(dtype), ne, tuple(args), params)

    def custom_inplace(
        self, a: Tensor, args: Sequence[Tensor], fun: Custom, n_tasks: int = 1, userdata: Any = None
    ) -> Tensor:
        """Return `fun` of `a` and `args`, written into the memory of `a` (ggml_custom_inplace).

        `fun` gets `a` as the first of its operands.

        Raises:
            ArgumentError: There are too many operands.
        """
        if len(args) > MAX_ARGS - 1:
            fail_arg("custom_inplace", f"{len(args)} operands given; give at most {MAX_ARGS - 1}")
        params = _params("custom_inplace", ("dst", "args"), fun, n_tasks, userdata)
        return self._op_into(Op.CUSTOM, a, (a, *args), params)

    def _map(
        self, op: Op, inplace: bool, src: tuple[Tensor, ...], fun: Custom, n_tasks: int, userdata: Any
    ) -> Tensor:
        fn = op.value.lower() + ("_inplace" if inplace else "")
        params = _params(fn, ("dst", *"abc"[: len(src)]), fun, n_tasks, userdata)
        return self._like(inplace, op, src[0], src, params)


def _params(fn: str, operands: Sequence[str], fun: Custom, n_tasks: int, userdata: Any) -> dict[str, Any]:
    given = [*operands, "ith", "nth", "userdata"]
    try:
        signature(fun).bind(*given)
    except TypeError as error:
        fail_arg(fn, f"fun is called as fun({', '.join(given)}), but takes {signature(fun)}: {error}")
    except ValueError:  # functions written in C have none
        pass
    if n_tasks < 1 and n_tasks != N_TASKS_MAX:
        fail_arg(fn, f"n_tasks is {n_tasks}; it must be positive, or N_TASKS_MAX ({N_TASKS_MAX})")
    return {"fun": fun, "n_tasks": n_tasks, "userdata": userdata}


SPECS = (
    OpSpec(Op.MAP_CUSTOM1, params=("fun", "n_tasks", "userdata")),
    OpSpec(Op.MAP_CUSTOM2, params=("fun", "n_tasks", "userdata")),
    OpSpec(Op.MAP_CUSTOM3, params=("fun", "n_tasks", "userdata")),
    OpSpec(Op.CUSTOM, params=("fun", "n_tasks", "userdata")),
)
