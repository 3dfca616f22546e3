"""Cases, samples and timings: copies, concatenation, padding, windows, resizing."""

from __future__ import annotations

from functools import partial

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, ScaleFlag, ScaleMode
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
    window,
)
from ggmlb.testing.ops.record import ROW, Perf, cases, f32, main, on_main, rows

# -- copy ---


@cases(Op.SET, lambda c, t: c.set_2d(main(c, t), main(c, t, ROW, 2), DType.row_size(t, ROW), 0))
def set(p: Program) -> None:
    a, b, nb, offset = window(p, p.one_of(F32, I32))
    p.nmse = 0
    p.out(p.one_of("set", "set_inplace"), a, b, *nb, offset)


@cases(Op.DUP, on_main("dup"))
def dup(p: Program) -> None:
    p.nmse = 0
    fn = p.one_of("dup", beyond=("dup_inplace",))
    p.out(fn, p.operand(p.one_of(F32, F16, BF16, I32, beyond=(I64, DType.I16, DType.I8)), p.ne(), *ANY))


@cases(
    Op.CONT,
    on_main("cont"),
    Perf("cont", "f32,transposed", lambda c, s: c.cont(c.transpose(rows(c, s, F32, 1024 * s)))),
)
def cont(p: Program) -> None:
    p.nmse = 0
    x = p.operand(p.one_of(F32, F16, BF16, I32, beyond=(I64, DType.I16, DType.I8)), p.ne(), *ANY)
    p.out("cont", p.step("transpose", x) if p.bool() else x)


@cases(
    Op.CPY,
    {
        "cpy (from f32)": lambda c, t: c.cpy(f32(c, ROW, 4), main(c, t)),
        "cpy (to f32)": lambda c, t: c.cpy(main(c, t), f32(c, ROW, 4)),
    },
    Perf("cpy", "f32,f32", lambda c, s: c.cpy(rows(c, s, F32, 4096), rows(c, s, F32, 4096))),
    Perf("cpy", "f32,f16", lambda c, s: c.cpy(rows(c, s, F32, 4096), rows(c, s, F16, 4096))),
    Perf("cpy", "f32,q8_0", lambda c, s: c.cpy(rows(c, s), rows(c, s, DType.Q8_0))),
)
def cast(p: Program) -> None:
    a, b = p.one_of(F32, F16, BF16), p.one_of(F32, F16, BF16)
    p.nmse = 0
    p.out("cast", p.operand(a, p.ne(), *ANY), b)


@cases(Op.CPY)
def cpy(p: Program) -> None:
    a, b = p.one_of(F32, F16, BF16), p.one_of(F32, F16, BF16)
    ne = p.ne()
    p.nmse = 0
    p.out("cpy", p.operand(a, ne, *ANY), p.operand(b, ne, PLAIN, PADDED))


@cases(Op.CPY, name="cpy to another shape")
def cpy_reshaped(p: Program) -> None:
    a, b = p.one_of(F32, F16), p.one_of(F32, F16)
    x, y, z = p.int(1, 9), p.int(1, 6), p.int(1, 4)
    p.nmse = 0
    p.out("cpy", p.operand(a, (x, y, z), *ANY), p.leaf(b, (y * z, x)))


@cases(Op.CPY, name="cpy to blocks")
def cpy_to_blocks(p: Program) -> None:
    dtype = p.one_of(*WEIGHTS)
    ne = p.ne(3, 5, 3, 2)
    ne = (ne[0] * dtype.block_size, *ne[1:])
    p.nmse, p.rule = 1e-3, "dequant"
    p.out("cpy", p.operand(F32, ne, *ROWS), p.leaf(dtype, ne))


@cases(Op.CPY, name="cpy from blocks")
def cpy_from_blocks(p: Program) -> None:
    dtype = p.one_of(*WEIGHTS, beyond=READ_ONLY)
    ne = p.ne(3, 5, 3, 2)
    ne = (ne[0] * dtype.block_size, *ne[1:])
    p.out("cpy", p.operand(dtype, ne, PLAIN, beyond=ROWS), p.leaf(F32, ne))


# -- shape ---


@cases(
    Op.CONCAT,
    lambda c, t: c.concat(main(c, t), main(c, t), 1),
    Perf("concat", "f32,f32", lambda c, s: c.concat(rows(c, s), rows(c, s), 1)),
)
def concat(p: Program) -> None:
    dtype, dim = p.one_of(F32, F16, I32, beyond=(BF16, I64, DType.I8)), p.int(0, 3)
    ne = list(p.ne())
    p.nmse = 0
    a = p.operand(dtype, tuple(ne), *ANY)
    ne[dim] = p.int(1, 9)
    p.out("concat", a, p.operand(dtype, tuple(ne), *ANY), dim)


@cases(
    Op.REPEAT,
    on_main("repeat_4d", 2 * ROW, 4, 2, 1),
    Perf("repeat", "f32;one row", lambda c, s: c.repeat(rows(c, s, n=1), rows(c, s))),
)
def repeat(p: Program) -> None:
    dtype = p.one_of(F32, F16, I32, beyond=(BF16, DType.I16))
    ne = p.ne(20, 4, 3, 2)
    p.nmse = 0
    a = p.operand(dtype, ne, *ROWS, beyond=ANY)
    p.out("repeat", a, p.leaf(dtype, tuple(n * p.int(1, 3) for n in ne)))


@cases(Op.REPEAT, name="repeat of single elements")
def repeat_each(p: Program) -> None:
    dtype, ne = p.one_of(F32, F16), (1, p.int(1, 200), *p.ne(4, 3))
    p.nmse = 0
    p.out("repeat", p.leaf(dtype, ne), p.leaf(dtype, (p.int(2, 9), *ne[1:])))


@cases(Op.REPEAT_BACK, lambda c, t: c.repeat_back(main(c, t, ROW, 4), f32(c, ROW, 2)))
def repeat_back(p: Program) -> None:
    ne = p.ne(20, 4, 3, 2)
    p.nmse = 1e-6
    a = p.operand(F32, tuple(n * p.int(1, 3) for n in ne), *ROWS, beyond=ANY)
    p.out("repeat_back", a, p.leaf(F32, ne))


def draw_pad(name: str, p: Program) -> None:
    p.nmse = 0
    ne = p.ne(20, 5, 4, 3)
    circular = name.endswith("circular")
    n_widths = 8 if "ext" in name else 4
    limits = [ne[i // (n_widths // 4)] if circular else 4 for i in range(n_widths)]
    a = p.operand(p.one_of(F32, beyond=(F16, BF16)), ne, *ANY)
    p.out(name, a, *(p.int(0, min(4, limit)) for limit in limits))


for name in ("pad", "pad_ext", "pad_circular", "pad_ext_circular"):
    cases(Op.PAD, on_main("pad", 1, 1), name=name)(partial(draw_pad, name))


@cases(Op.PAD_REFLECT_1D, on_main("pad_reflect_1d", 2, 3))
def pad_reflect_1d(p: Program) -> None:
    p.nmse = 0
    ne = p.ne()
    p.out("pad_reflect_1d", p.leaf(F32, ne), p.int(0, ne[0] - 1), p.int(0, ne[0] - 1))


@cases(Op.ROLL, on_main("roll", 1, 2))
def roll(p: Program) -> None:
    p.nmse = 0
    ne = p.ne()
    a = p.operand(p.one_of(F32, beyond=(F16,)), ne, *ROWS, beyond=ANY)
    p.out("roll", a, *(p.int(1 - n, n - 1) for n in ne))


# -- window ---


@cases(Op.WIN_PART, lambda c, t: c.win_part(main(c, t, 8, 14, 14), 7))
def win_part(p: Program) -> None:
    p.nmse = 0
    p.out("win_part", p.leaf(F32, p.ne(8, 11, 11)), p.int(1, 5))


@cases(Op.WIN_UNPART, lambda c, t: c.win_unpart(main(c, t, 8, 7, 7, 4), 14, 14, 7))
def win_unpart(p: Program) -> None:
    p.nmse = 0
    w, wide, high = p.int(1, 5), p.int(1, 11), p.int(1, 11)
    windows = -(-wide // w) * -(-high // w)
    p.out("win_unpart", p.leaf(F32, (p.int(1, 8), w, w, windows)), wide, high, w)


@cases(Op.GET_REL_POS, lambda c, t: c.get_rel_pos(main(c, t, 8, 7), 4, 4))
def get_rel_pos(p: Program) -> None:
    p.nmse = 0
    n = p.int(1, 8)
    p.out("get_rel_pos", p.leaf(F16, (p.int(1, 20), 2 * n - 1)), n, n)


@cases(
    Op.ADD_REL_POS, lambda c, t: c.add_rel_pos(main(c, t, 16, 16, 2), f32(c, 4, 4, 4, 2), f32(c, 4, 4, 4, 2))
)
def add_rel_pos(p: Program) -> None:
    k, wide, high, n = p.int(1, 6), p.int(1, 4), p.int(1, 4), p.int(1, 3)
    bias = (p.leaf(F32, (k, wide, high, n)) for _ in range(2))
    p.out(p.one_of("add_rel_pos", "add_rel_pos_inplace"), p.leaf(F32, (k * k, wide * high, n)), *bias)


# -- resize ---


@cases(
    Op.UPSCALE,
    lambda c, t: c.upscale(main(c, t, 16, 16, 3), 2, ScaleMode.BILINEAR),
    Perf("upscale", "f32", lambda c, s: c.upscale(f32(c, 32 * s, 32 * s, 64), 2)),
    Perf("upscale", "f32;bilinear", lambda c, s: c.upscale(f32(c, 32 * s, 32 * s, 64), 2, "bilinear")),
)
def upscale(p: Program) -> None:
    p.nmse = 1e-7
    p.out("upscale", p.operand(F32, p.ne(8, 7, 3, 2), *ANY), p.int(2, 4), p.one_of(*ScaleMode))


@cases(Op.UPSCALE)
def interpolate(p: Program) -> None:
    ne = p.ne(12, 12, 4, 3)
    to = (p.int(1, 20), p.int(1, 20), ne[2] * p.int(1, 2), ne[3] * p.int(1, 2))
    corners, smooth = ScaleFlag.ALIGN_CORNERS, ScaleMode.BILINEAR | ScaleFlag.ANTIALIAS
    mode = p.one_of(*ScaleMode, *(m | corners for m in ScaleMode), smooth, smooth | corners)
    p.nmse = 1e-6
    p.out("interpolate", p.operand(F32, ne, *ANY), *to, mode)
