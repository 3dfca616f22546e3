"""Cases, samples and timings: users' functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.custom import N_TASKS_MAX, Array
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import ANY, BF16, F16, F32, I32, PLAIN, Extents, Program
from ggmlb.testing.ops.record import ROW, cases, f32, main

# -- custom ---


TASKS = (1, 2, 5, N_TASKS_MAX)


def _sum_of_halves(dst: Array, operands: tuple[Array, ...], ith: int, nth: int, ne: Extents) -> None:
    """Write every `nth` row of a sum of halves; raise unless arrays and share of work are as documented."""
    found = [array.shape for array in (dst, *operands)]
    if any(shape != ne[::-1] for shape in found):
        raise ValueError(f"arrays have the shapes {found}; all must have {ne[::-1]}")
    if not 0 <= ith < nth:
        raise ValueError(f"ith is {ith} and nth is {nth}; ith must be 0 to nth - 1")
    rows = dst[:, :, ith::nth]
    total = np.zeros(rows.shape, np.float32)
    for array in operands:
        total += array[:, :, ith::nth].astype(np.float32) / 2
    rows[...] = total.astype(dst.dtype)


def half_of_one(dst: Array, a: Array, ith: int, nth: int, ne: Extents) -> None:
    """Write `a / 2` to `dst`, in rows `ith`, `ith + nth`, ..."""
    _sum_of_halves(dst, (a,), ith, nth, ne)


def half_of_two(dst: Array, a: Array, b: Array, ith: int, nth: int, ne: Extents) -> None:
    """Write `a / 2 + b / 2` to `dst`, in rows `ith`, `ith + nth`, ..."""
    _sum_of_halves(dst, (a, b), ith, nth, ne)


def half_of_three(dst: Array, a: Array, b: Array, c: Array, ith: int, nth: int, ne: Extents) -> None:
    """Write `a / 2 + b / 2 + c / 2` to `dst`, in rows `ith`, `ith + nth`, ..."""
    _sum_of_halves(dst, (a, b, c), ith, nth, ne)


def half_of_all(dst: Array, operands: tuple[Array, ...], ith: int, nth: int, ne: Extents) -> None:
    """Write half of the sum of the operands to `dst`, in rows `ith`, `ith + nth`, ..."""
    _sum_of_halves(dst, operands, ith, nth, ne)


FUNCTIONS = (half_of_one, half_of_two, half_of_three)


def draw_map_custom(n: int, p: Program) -> None:
    inplace = p.bool()
    dtype, ne = p.one_of(F32, F16, BF16, I32), p.ne()
    operands = [p.operand(dtype, ne, *ANY), *(p.operand(F32, ne, *ANY) for _ in range(n - 1))]
    p.nmse = 0
    name = f"map_custom{n}{'_inplace' if inplace else ''}"
    p.out(name, *operands, FUNCTIONS[n - 1], p.one_of(*TASKS), ne)


def _sample(n: int, c: Context, t: DType) -> Tensor:
    function: Callable[..., Tensor] = getattr(c, f"map_custom{n}")
    return function(main(c, t), *(f32(c, ROW, 4) for _ in range(n - 1)), _nothing)


def _nothing(*arrays: object) -> None:
    """A user's function."""


for n in (1, 2, 3):
    fn = f"map_custom{n}"
    cases(Op(fn.upper()), partial(_sample, n), name=fn, of_ggml=False)(partial(draw_map_custom, n))


@cases(
    Op.CUSTOM,
    {"custom_4d": lambda c, t: c.custom_4d(F32, ROW, 4, 1, 1, [main(c, t)], _nothing)},
    of_ggml=False,
)
def custom_4d(p: Program) -> None:
    n, result = p.int(1, 5), p.one_of(F32, F16, I32)
    dtype = p.one_of(F32, F16, BF16, I32, DType.Q8_0, DType.Q4_K)
    ne = (dtype.block_size * p.int(1, 2), *p.ne(1, 6, 4, 3)[1:]) if dtype.block_size > 1 else p.ne()
    operands = [p.operand(dtype, ne, PLAIN) for _ in range(n)]
    p.nmse = 0
    p.out("custom_4d", result, *ne, operands, half_of_all, p.one_of(*TASKS), ne)


@cases(Op.CUSTOM)
def custom_inplace(p: Program) -> None:
    n, ne = p.int(0, 4), p.ne()
    operands = [p.operand(F32, ne, *ANY) for _ in range(n)]
    p.nmse = 0
    p.out("custom_inplace", p.operand(F32, ne, *ANY), operands, half_of_all, p.one_of(*TASKS), ne)
