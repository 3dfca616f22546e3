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
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import alias
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, full_ne
from ggmlb.core.ops.spec import ANY, BF16, F16, F32, I32, PLAIN, ROW, Extents, OpSpec, f32, main
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.testing.draw import Program

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
    except ValueError:  # a function written in C tells no signature
        pass
    if n_tasks < 1 and n_tasks != N_TASKS_MAX:
        fail_arg(fn, f"n_tasks is {n_tasks}; it must be positive, or N_TASKS_MAX ({N_TASKS_MAX})")
    return {"fun": fun, "n_tasks": n_tasks, "userdata": userdata}


# -- cases ---


TASKS = (1, 2, 5, N_TASKS_MAX)


def _drawn_check(dst: Array, operands: tuple[Array, ...], ith: int, nth: int, ne: Extents) -> None:
    """Raise unless the arrays and the share of work are as documented."""
    found = [array.shape for array in (dst, *operands)]
    if any(shape != ne[::-1] for shape in found):
        raise ValueError(f"arrays have the shapes {found}; all tensors have ne {list(ne)}")
    if not 0 <= ith < nth:
        raise ValueError(f"the share is {ith} of {nth}")


def _drawn_mean(dst: Array, operands: tuple[Array, ...], ith: int, nth: int, ne: Extents) -> None:
    """Write every `nth` row of a sum of halves."""
    _drawn_check(dst, operands, ith, nth, ne)
    rows = dst[:, :, ith::nth]
    total = np.zeros(rows.shape, np.float32)
    for array in operands:
        total += array[:, :, ith::nth].astype(np.float32) / 2
    rows[...] = total.astype(dst.dtype)


def half_of_one(dst: Array, a: Array, ith: int, nth: int, ne: Extents) -> None:
    """`a / 2`."""
    _drawn_mean(dst, (a,), ith, nth, ne)


def half_of_two(dst: Array, a: Array, b: Array, ith: int, nth: int, ne: Extents) -> None:
    """`a / 2 + b / 2`."""
    _drawn_mean(dst, (a, b), ith, nth, ne)


def half_of_three(dst: Array, a: Array, b: Array, c: Array, ith: int, nth: int, ne: Extents) -> None:
    """`a / 2 + b / 2 + c / 2`."""
    _drawn_mean(dst, (a, b, c), ith, nth, ne)


def half_of_all(dst: Array, operands: tuple[Array, ...], ith: int, nth: int, ne: Extents) -> None:
    """Half of the sum of all operands."""
    _drawn_mean(dst, operands, ith, nth, ne)


FUNCTIONS = (half_of_one, half_of_two, half_of_three)


def _drawn_operands(p: Program, dtype: DType, ne: Extents, n: int) -> list[str]:
    return [p.operand(dtype, ne, *ANY), *(p.operand(F32, ne, *ANY) for _ in range(n - 1))]


def _draw_map_custom(n: int, p: Program) -> None:
    inplace = p.bool()
    dtype, ne = p.one_of(F32, F16, BF16, I32), p.ne()
    operands = _drawn_operands(p, dtype, ne, n)
    p.nmse = 0
    name = f"map_custom{n}{'_inplace' if inplace else ''}"
    p.out(name, *operands, FUNCTIONS[n - 1], p.one_of(*TASKS), ne)


def _draw_custom_4d(p: Program) -> None:
    n, result = p.int(1, 5), p.one_of(F32, F16, I32)
    dtype = p.one_of(F32, F16, BF16, I32, DType.Q8_0, DType.Q4_K)
    ne = (dtype.block_size * p.int(1, 2), *p.ne(1, 6, 4, 3)[1:]) if dtype.block_size > 1 else p.ne()
    operands = [p.operand(dtype, ne, PLAIN) for _ in range(n)]
    p.nmse = 0
    p.out("custom_4d", result, *ne, operands, half_of_all, p.one_of(*TASKS), ne)


def _draw_custom_inplace(p: Program) -> None:
    n, ne = p.int(0, 4), p.ne()
    operands = [p.operand(F32, ne, *ANY) for _ in range(n)]
    p.nmse = 0
    p.out("custom_inplace", p.operand(F32, ne, *ANY), operands, half_of_all, p.one_of(*TASKS), ne)


def _nothing(*arrays: object) -> None:
    """A user's function."""


SPECS = (
    OpSpec(
        Op.MAP_CUSTOM1,
        params=("fun", "n_tasks", "userdata"),
        samples={"map_custom1": lambda c, t: c.map_custom1(main(c, t), _nothing)},
        cases={"map_custom1": partial(_draw_map_custom, 1)},
        of_ggml=False,
    ),
    OpSpec(
        Op.MAP_CUSTOM2,
        params=("fun", "n_tasks", "userdata"),
        samples={"map_custom2": lambda c, t: c.map_custom2(main(c, t), f32(c, ROW, 4), _nothing)},
        cases={"map_custom2": partial(_draw_map_custom, 2)},
        of_ggml=False,
    ),
    OpSpec(
        Op.MAP_CUSTOM3,
        params=("fun", "n_tasks", "userdata"),
        samples={
            "map_custom3": lambda c, t: c.map_custom3(main(c, t), f32(c, ROW, 4), f32(c, ROW, 4), _nothing)
        },
        cases={"map_custom3": partial(_draw_map_custom, 3)},
        of_ggml=False,
    ),
    OpSpec(
        Op.CUSTOM,
        params=("fun", "n_tasks", "userdata"),
        samples={"custom_4d": lambda c, t: c.custom_4d(F32, ROW, 4, 1, 1, [main(c, t)], _nothing)},
        cases={"custom_4d": _draw_custom_4d, "custom_inplace": _draw_custom_inplace},
        of_ggml=False,
    ),
)
