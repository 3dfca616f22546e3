"""Copies, joins, paddings, and tensors that follow from numbers."""

from __future__ import annotations

from functools import partial

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import TriType
from ggmlb.testing.cases.draw import ANY, BF16, F16, F32, I32, I64, PADDED, PLAIN, ROWS, Program, family
from ggmlb.testing.cases.products import READ_ONLY, WEIGHTS


@family("dup")
def dup(p: Program) -> None:
    p.nmse = 0
    fn = p.one_of("dup", beyond=("dup_inplace",))
    p.out(fn, p.operand(p.one_of(F32, F16, BF16, I32, beyond=(I64, DType.I16, DType.I8)), p.ne(), *ANY))


@family("cont")
def cont(p: Program) -> None:
    p.nmse = 0
    p.out("cont", p.operand(p.one_of(F32, F16, BF16, I32, beyond=(I64, DType.I16, DType.I8)), p.ne(), *ANY))


@family("cast")
def cast(p: Program) -> None:
    a, b = p.one_of(F32, F16, BF16), p.one_of(F32, F16, BF16)
    p.nmse = 0
    p.out("cast", p.operand(a, p.ne(), *ANY), b)


@family("cpy")
def cpy(p: Program) -> None:
    a, b = p.one_of(F32, F16, BF16), p.one_of(F32, F16, BF16)
    ne = p.ne()
    p.nmse = 0
    p.out("cpy", p.operand(a, ne, *ANY), p.operand(b, ne, PLAIN, PADDED))


@family("cpy to another shape")
def cpy_reshaped(p: Program) -> None:
    a, b = p.one_of(F32, F16), p.one_of(F32, F16)
    x, y, z = p.int(1, 9), p.int(1, 6), p.int(1, 4)
    p.nmse = 0
    p.out("cpy", p.operand(a, (x, y, z), *ANY), p.leaf(b, (y * z, x)))


@family("cpy to blocks")
def cpy_to_blocks(p: Program) -> None:
    dtype = p.one_of(*WEIGHTS)
    ne = p.ne(3, 5, 3, 2)
    ne = (ne[0] * dtype.block_size, *ne[1:])
    p.nmse, p.rule = 1e-3, "dequant"
    p.out("cpy", p.operand(F32, ne, *ROWS), p.leaf(dtype, ne))


@family("cpy from blocks")
def cpy_from_blocks(p: Program) -> None:
    dtype = p.one_of(*WEIGHTS, beyond=READ_ONLY)
    ne = p.ne(3, 5, 3, 2)
    ne = (ne[0] * dtype.block_size, *ne[1:])
    p.out("cpy", p.operand(dtype, ne, PLAIN, beyond=ROWS), p.leaf(F32, ne))


@family("concat")
def concat(p: Program) -> None:
    dtype, dim = p.one_of(F32, F16, I32, beyond=(BF16, I64, DType.I8)), p.int(0, 3)
    ne = list(p.ne())
    p.nmse = 0
    a = p.operand(dtype, tuple(ne), *ANY)
    ne[dim] = p.int(1, 9)
    p.out("concat", a, p.operand(dtype, tuple(ne), *ANY), dim)


@family("repeat")
def repeat(p: Program) -> None:
    dtype = p.one_of(F32, F16, I32, beyond=(BF16, DType.I16))
    ne = p.ne(20, 4, 3, 2)
    p.nmse = 0
    p.out(
        "repeat", p.operand(dtype, ne, *ROWS, beyond=ANY), p.leaf(dtype, tuple(n * p.int(1, 3) for n in ne))
    )


@family("repeat_back")
def repeat_back(p: Program) -> None:
    ne = p.ne(20, 4, 3, 2)
    p.nmse = 1e-6
    p.out(
        "repeat_back", p.operand(F32, tuple(n * p.int(1, 3) for n in ne), *ROWS, beyond=ANY), p.leaf(F32, ne)
    )


def _pad(name: str, p: Program) -> None:
    p.nmse = 0
    ne = p.ne(20, 5, 4, 3)
    circular = name.endswith("circular")
    n_widths = 8 if "ext" in name else 4
    limits = [ne[i // (n_widths // 4)] if circular else 4 for i in range(n_widths)]
    p.out(
        name,
        p.operand(p.one_of(F32, beyond=(F16, BF16)), ne, *ANY),
        *(p.int(0, min(4, limit)) for limit in limits),
    )


for _name in ("pad", "pad_ext", "pad_circular", "pad_ext_circular"):
    family(_name)(partial(_pad, _name))


@family("pad_reflect_1d")
def pad_reflect_1d(p: Program) -> None:
    p.nmse = 0
    ne = p.ne()
    p.out("pad_reflect_1d", p.leaf(F32, ne), p.int(0, ne[0] - 1), p.int(0, ne[0] - 1))


@family("roll")
def roll(p: Program) -> None:
    p.nmse = 0
    ne = p.ne()
    p.out(
        "roll",
        p.operand(p.one_of(F32, beyond=(F16,)), ne, *ROWS, beyond=ANY),
        *(p.int(1 - n, n - 1) for n in ne),
    )


@family("tri")
def tri(p: Program) -> None:
    p.nmse = 0
    n = p.int(1, 12)
    p.out("tri", p.leaf(F32, (n, n, p.extra(1, 3), p.extra(1, 2))), p.one_of(*TriType))


@family("diag")
def diag(p: Program) -> None:
    p.nmse = 0
    p.out("diag", p.operand(F32, (p.int(1, 12), 1, p.extra(1, 3), p.extra(1, 2)), PLAIN, PADDED))


@family("fill")
def fill(p: Program) -> None:
    p.nmse = 0
    p.out(
        p.one_of("fill", "fill_inplace"),
        p.operand(p.one_of(F32, F16, beyond=(BF16,)), p.ne(), PLAIN, beyond=ANY),
        p.float(-5, 5),
    )


@family("arange")
def arange(p: Program) -> None:
    start, step = p.float(-5, 5), p.float(0.125, 2)
    p.nmse = 1e-12
    p.out("arange", start, start + p.int(1, 40) * step, step)


@family("timestep_embedding")
def timestep_embedding(p: Program) -> None:
    p.nmse = 1e-6
    steps = p.leaf(F32, (p.int(1, 6),), low=0, high=50)
    p.out("timestep_embedding", steps, p.int(2, 40), p.one_of(100, 10000))


@family("win_part")
def win_part(p: Program) -> None:
    p.nmse = 0
    p.out("win_part", p.leaf(F32, p.ne(8, 11, 11)), p.int(1, 5))


@family("win_unpart")
def win_unpart(p: Program) -> None:
    p.nmse = 0
    w, wide, high = p.int(1, 5), p.int(1, 11), p.int(1, 11)
    windows = -(-wide // w) * -(-high // w)
    p.out("win_unpart", p.leaf(F32, (p.int(1, 8), w, w, windows)), wide, high, w)


@family("get_rel_pos")
def get_rel_pos(p: Program) -> None:
    p.nmse = 0
    n = p.int(1, 8)
    p.out("get_rel_pos", p.leaf(F16, (p.int(1, 20), 2 * n - 1)), n, n)


@family("add_rel_pos")
def add_rel_pos(p: Program) -> None:
    k, wide, high, n = p.int(1, 6), p.int(1, 4), p.int(1, 4), p.int(1, 3)
    bias = (p.leaf(F32, (k, wide, high, n)) for _ in range(2))
    p.out(p.one_of("add_rel_pos", "add_rel_pos_inplace"), p.leaf(F32, (k * k, wide * high, n)), *bias)
