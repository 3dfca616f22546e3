"""Cases, samples and timings: sums, norms, soft max, sorting, lookups."""

from __future__ import annotations

from functools import partial

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, SortOrder
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import (
    ANY,
    BF16,
    F16,
    F32,
    I32,
    I64,
    PADDED,
    PLAIN,
    READ_ONLY,
    ROWS,
    WEIGHTS,
    Program,
    tolerance,
)
from ggmlb.testing.ops.record import ROW, Perf, cases, f32, i32, main, on_main, on_rows, rows

# -- reduce ---


@cases(Op.SUM, on_main("sum"), name="sum")
def sum_all(p: Program) -> None:
    dtype = p.one_of(F32, F16, BF16)
    p.nmse = tolerance(dtype)
    p.out("sum", p.operand(dtype, p.ne(), *ROWS, beyond=ANY, low=0.1, high=1))


def draw_per_row(name: str, p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne()
    if name == "mean":
        ne = (max(ne[0], 1), *ne[1:])  # the mean of no elements is NaN
    p.out(name, p.operand(F32, ne, *ROWS, beyond=ANY, low=0.1, high=1))


@cases(Op.COUNT_EQUAL, lambda c, t: c.count_equal(main(c, t), main(c, t)))
def count_equal(p: Program) -> None:
    ne = p.ne(40, 9)  # ggml reads beyond the end of tensors of more dimensions
    p.out("count_equal", *(p.leaf(I32, ne, p.random.integers(0, 3, ne[::-1])) for _ in range(2)))


for fn in ("sum_rows", "cumsum", "mean"):
    timings = () if fn == "mean" else (on_rows(fn),)
    cases(Op(fn.upper()), on_main(fn), *timings, name=fn)(partial(draw_per_row, fn))


# -- norm ---


EPS = (1e-6, 1e-5, 1e-2)


def draw_norm(name: str, p: Program) -> None:
    p.nmse = 1e-6
    a = p.operand(p.one_of(F32, beyond=(F16,)), p.ne(), *ROWS, beyond=ANY, low=-2, high=3)
    p.out(name + p.one_of("", "_inplace"), a, p.one_of(*EPS))


@cases(Op.GROUP_NORM, lambda c, t: c.group_norm(main(c, t, ROW, 4, 8), 2, 1e-5))
def group_norm(p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne(9, 5, 8, 2)
    a = p.operand(F32, ne, *ROWS, beyond=ANY, low=-2, high=3)
    p.out("group_norm" + p.one_of("", "_inplace"), a, p.int(1, ne[2]), p.one_of(*EPS))


@cases(Op.RMS_NORM_BACK, lambda c, t: c.rms_norm_back(main(c, t), main(c, t), 1e-5))
def rms_norm_back(p: Program) -> None:
    ne = (3 + p.int(1, 70), *p.ne(6, 4, 3)[:3])  # short rows lose precision by cancellation
    p.nmse = 1e-6
    p.out("rms_norm_back", p.operand(F32, ne, *ROWS), p.operand(F32, ne, *ROWS), p.one_of(*EPS))


for fn in ("norm", "rms_norm", "l2_norm"):
    timings = () if fn == "l2_norm" else (on_rows(fn, 1e-5),)
    cases(Op(fn.upper()), on_main(fn, 1e-5), *timings, name=fn)(partial(draw_norm, fn))


# -- softmax ---


@cases(
    Op.SOFT_MAX,
    lambda c, t: c.soft_max_ext(main(c, t), c.new_tensor(F16, (ROW, 4)), 0.1, 0.0),
    on_rows("soft_max_ext"),
    Perf("soft_max_ext", "f32,f16", lambda c, s: c.soft_max_ext(rows(c, s), rows(c, s, F16), 0.5)),
    name="soft_max_ext",
)
def soft_max(p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne()
    a = p.leaf(F32, ne, low=-4, high=4)
    mask, max_bias = None, 0.0
    if p.bool():
        shape = (ne[0], ne[1] + p.extra(0, 2), p.one_of(1, ne[2]), p.one_of(1, ne[3]))
        mask = p.mask(p.one_of(F32, F16), shape)
        max_bias = p.one_of(0.0, 8.0)
    y = p.step(p.one_of("soft_max_ext", "soft_max_ext_inplace"), a, mask, p.float(0.1, 2), max_bias)
    if p.bool():
        p.void("soft_max_add_sinks", y, p.leaf(F32, (ne[2],)))
    p.compare(y)


@cases(Op.SOFT_MAX_BACK, lambda c, t: c.soft_max_ext_back(main(c, t), main(c, t)), name="soft_max_ext_back")
def soft_max_back(p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne()
    y = p.step("soft_max", p.leaf(F32, ne, low=-3, high=3))
    p.out("soft_max_ext_back" + p.one_of("", "_inplace"), p.leaf(F32, ne), y, p.float(0.1, 2), 0.0)


def draw_diag_mask(name: str, p: Program) -> None:
    p.out(name + p.one_of("", "_inplace"), p.leaf(F32, p.ne(12, 9, 3, 2)), p.int(0, 8))


for fn in ("diag_mask_inf", "diag_mask_zero"):
    cases(Op(fn.upper()), on_main(fn, 1), name=fn)(partial(draw_diag_mask, fn))


# -- select ---


@cases(Op.ARGMAX, on_main("argmax"), Perf("argmax", "f32", lambda c, s: c.argmax(f32(c, 8000 * s, 32))))
def argmax(p: Program) -> None:
    p.out("argmax", p.operand(p.one_of(F32, beyond=(F16, BF16)), p.ne(70, 9), PLAIN, PADDED, beyond=ANY))


def _drawn_distinct(p: Program, ne: tuple[int, ...]) -> str:
    values = p.random.permuted(np.arange(np.prod(ne), dtype=np.float32).reshape(ne[::-1]), axis=-1)
    return p.leaf(F32, ne, values)


@cases(Op.ARGSORT, on_main("argsort"), Perf("argsort", "f32", lambda c, s: c.argsort(f32(c, 1024 * s, 32))))
def argsort(p: Program) -> None:
    p.out("argsort", _drawn_distinct(p, p.ne()), p.one_of(*SortOrder))


@cases(Op.ARGSORT)
def argsort_top_k(p: Program) -> None:
    ne = p.ne()
    p.out("argsort_top_k", _drawn_distinct(p, ne), p.int(1, ne[0]))


@cases(Op.TOP_K, on_main("top_k", 4), Perf("top_k", "f32", lambda c, s: c.top_k(f32(c, 8000 * s, 16), 40)))
def top_k(p: Program) -> None:
    ne = p.ne()
    p.rule = "gather_sorted"
    p.out("top_k", _drawn_distinct(p, ne), p.int(1, ne[0]))


# -- rows ---


def _lookup(dtype: DType) -> Perf:
    name = dtype.name.lower()
    return Perf("get_rows", name, lambda c, s: c.get_rows(rows(c, s, dtype, 2048 * s), i32(c, 512)))


@cases(Op.GET_ROWS, lambda c, t: c.get_rows(main(c, t), i32(c, 3)), *map(_lookup, (F32, F16, DType.Q4_0)))
def get_rows(p: Program) -> None:
    dtype = p.one_of(F32, F16, BF16, I32, *WEIGHTS, beyond=READ_ONLY)
    n, n_rows, n2, n3 = p.ne(3 if dtype.block_size > 1 else 70, 7, 3, 2)
    n *= dtype.block_size
    count = p.int(1, 8)
    p.nmse = 1e-7
    index = p.random.integers(0, n_rows, (n3, n2, count))
    table = p.operand(dtype, (n, n_rows, n2, n3), PLAIN, PADDED, beyond=ROWS)
    p.out("get_rows", table, p.leaf(I32, (count, n2, n3), index))


@cases(Op.GET_ROWS_BACK, lambda c, t: c.get_rows_back(main(c, t, ROW, 3), i32(c, 3), f32(c, ROW, 8)))
def get_rows_back(p: Program) -> None:
    n, count, n_rows = p.int(1, 40), p.int(1, 9), p.int(1, 6)
    dtype = p.one_of(F32, F16)
    index = p.leaf(I32, (count,), p.random.integers(0, n_rows, count))
    p.nmse = 1e-6
    unread = p.one_of(0, 2)  # rows that have no index
    p.out("get_rows_back", p.leaf(dtype, (n, count + unread)), index, p.leaf(F32, (n, n_rows)))


def _written_rows(c: Context, s: int) -> Tensor:
    cache, ids = c.new_tensor(F16, (256 * s, 2048 * s)), c.new_tensor(I64, (512,))
    return c.set_rows(cache, f32(c, 256 * s, 512), ids)


@cases(
    Op.SET_ROWS,
    lambda c, t: c.set_rows(main(c, t), f32(c, ROW, 2), c.new_tensor(I64, (2,))),
    Perf("set_rows", "f16,f32", _written_rows),
)
def set_rows(p: Program) -> None:
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
