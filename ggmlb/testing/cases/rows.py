"""Norms, soft_max, rope, sums, sorting and row look-ups."""

from __future__ import annotations

from functools import partial

import numpy as np

from ggmlb.core.enums import RopeType, SortOrder
from ggmlb.testing.cases.draw import ANY, BF16, F16, F32, I32, I64, PADDED, PLAIN, ROWS, Program, family
from ggmlb.testing.cases.elementwise import tolerance
from ggmlb.testing.cases.products import READ_ONLY, WEIGHTS

EPS = (1e-6, 1e-5, 1e-2)


def _norm(name: str, p: Program) -> None:
    p.nmse = 1e-6
    a = p.operand(p.one_of(F32, beyond=(F16,)), p.ne(), *ROWS, beyond=ANY, low=-2, high=3)
    p.out(name + p.one_of("", "_inplace"), a, p.one_of(*EPS))


for _name in ("norm", "rms_norm", "l2_norm"):
    family(_name)(partial(_norm, _name))


@family("group_norm")
def group_norm(p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne(9, 5, 8, 2)
    a = p.operand(F32, ne, *ROWS, beyond=ANY, low=-2, high=3)
    p.out("group_norm" + p.one_of("", "_inplace"), a, p.int(1, ne[2]), p.one_of(*EPS))


@family("rms_norm_back")
def rms_norm_back(p: Program) -> None:
    ne = (3 + p.int(1, 70), *p.ne(6, 4, 3)[:3])  # in short rows almost all cancels
    p.nmse = 1e-6
    p.out("rms_norm_back", p.operand(F32, ne, *ROWS), p.operand(F32, ne, *ROWS), p.one_of(*EPS))


@family("soft_max_ext")
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


@family("soft_max_ext_back")
def soft_max_back(p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne()
    y = p.step("soft_max", p.leaf(F32, ne, low=-3, high=3))
    p.out("soft_max_ext_back" + p.one_of("", "_inplace"), p.leaf(F32, ne), y, p.float(0.1, 2), 0.0)


def _diag_mask(name: str, p: Program) -> None:
    p.out(name + p.one_of("", "_inplace"), p.leaf(F32, p.ne(12, 9, 3, 2)), p.int(0, 8))


for _name in ("diag_mask_inf", "diag_mask_zero"):
    family(_name)(partial(_diag_mask, _name))


# -- rope ------------------------------------------------------------------------------------------


def _rope(p: Program, back: bool) -> None:
    mode = p.one_of(*RopeType)
    multi = bool(mode & RopeType.MROPE)
    pairs = p.int(1, 16)
    n_dims = 2 * pairs
    row = 2 * n_dims if mode is RopeType.VISION else n_dims + (0 if multi else 2 * p.extra(0, 4))
    heads, tokens, batch = p.int(1, 4), p.int(1, 5), p.extra(1, 2)
    dtype = p.one_of(F32, F16, beyond=(BF16,))
    p.nmse = {F32: 1e-6, F16: 1e-5, BF16: 1e-4}[dtype]
    a = p.operand(dtype, (row, heads, tokens, batch), *ROWS)
    n_positions = tokens * (4 if multi else 1)
    positions = p.leaf(I32, (n_positions,), p.random.integers(0, 60, n_positions))
    factors = p.leaf(F32, (row // 2,), low=0.5, high=2) if p.bool() else None
    base, scale = p.one_of(10000.0, 500.0), p.one_of(1.0, 0.5)
    yarn = (p.one_of(0.0, 0.7), p.one_of(1.0, 1.3), 32.0, 1.0)
    numbers = (p.one_of(0, 32, 4096), base, scale, *yarn)
    suffix = "_back" if back else p.one_of("", "_inplace")
    if multi:
        cuts = sorted(p.int(1, pairs) for _ in range(3))
        sections = [cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], pairs - cuts[2]]
        if mode is RopeType.VISION:
            sections = [p.int(1, pairs), p.int(1, pairs), 0, 0]
        p.out("rope_multi" + suffix, a, positions, factors, n_dims, sections, mode, *numbers)
    else:
        p.out("rope_ext" + suffix, a, positions, factors, n_dims, mode, *numbers)


family("rope")(partial(_rope, back=False))
family("rope_back")(partial(_rope, back=True))


# -- sums ------------------------------------------------------------------------------------------


@family("sum")
def sum_all(p: Program) -> None:
    dtype = p.one_of(F32, F16, BF16)
    p.nmse = tolerance(dtype)
    p.out("sum", p.operand(dtype, p.ne(), *ROWS, beyond=ANY, low=0.1, high=1))


def _reduce(name: str, p: Program) -> None:
    p.nmse = 1e-6
    ne = p.ne()
    if name == "mean":
        ne = (max(ne[0], 1), *ne[1:])  # of nothing it is not a number
    p.out(name, p.operand(F32, ne, *ROWS, beyond=ANY, low=0.1, high=1))


for _name in ("sum_rows", "mean", "cumsum"):
    family(_name)(partial(_reduce, _name))


@family("argmax")
def argmax(p: Program) -> None:
    p.out("argmax", p.operand(p.one_of(F32, beyond=(F16, BF16)), p.ne(70, 9), PLAIN, PADDED, beyond=ANY))


@family("count_equal")
def count_equal(p: Program) -> None:
    ne = p.ne(40, 9)  # ggml reads beyond the end of tensors of more dimensions
    p.out("count_equal", *(p.leaf(I32, ne, p.random.integers(0, 3, ne[::-1])) for _ in range(2)))


def _distinct(p: Program, ne: tuple[int, ...]) -> str:
    values = p.random.permuted(np.arange(np.prod(ne), dtype=np.float32).reshape(ne[::-1]), axis=-1)
    return p.leaf(F32, ne, values)


@family("argsort")
def argsort(p: Program) -> None:
    p.out("argsort", _distinct(p, p.ne()), p.one_of(*SortOrder))


@family("argsort_top_k")
def argsort_top_k(p: Program) -> None:
    ne = p.ne()
    p.out("argsort_top_k", _distinct(p, ne), p.int(1, ne[0]))


@family("top_k")
def top_k(p: Program) -> None:
    ne = p.ne()
    p.rule = "gather_sorted"
    p.out("top_k", _distinct(p, ne), p.int(1, ne[0]))


# -- rows by index ---------------------------------------------------------------------------------


@family("get_rows")
def get_rows(p: Program) -> None:
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


@family("get_rows_back")
def get_rows_back(p: Program) -> None:
    n, count, n_rows = p.int(1, 40), p.int(1, 9), p.int(1, 6)
    dtype = p.one_of(F32, F16)
    index = p.leaf(I32, (count,), p.random.integers(0, n_rows, count))
    p.nmse = 1e-6
    p.out("get_rows_back", p.leaf(dtype, (n, count)), index, p.leaf(F32, (n, n_rows)))


@family("set_rows")
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
