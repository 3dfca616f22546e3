"""Cases, samples and timings: functions of each element, arithmetic with broadcasting, gates, constants."""

from __future__ import annotations

from functools import partial
from typing import Any

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import GluOp, Op, TriType, UnaryOp
from ggmlb.testing.draw import (
    ANY,
    BF16,
    F16,
    F32,
    FLOATS,
    GAPS,
    I32,
    PADDED,
    PLAIN,
    ROWS,
    Program,
    tolerance,
    window,
)
from ggmlb.testing.ops.record import (
    ROW,
    Perf,
    Sample,
    cases,
    f32,
    i32,
    main,
    no_such_node,
    on_main,
    on_rows,
    rows,
)

# -- unary ---


def _unary_sample(op: UnaryOp) -> Sample:
    if op is UnaryOp.XIELU:
        return lambda c, t: c.xielu(main(c, t), 0.8, 0.8, 0.5, -1e-6)
    return lambda c, t: c.unary(main(c, t), op)


SHORT = ("gelu", "gelu_quick", "gelu_erf", "silu")
"""Functions that ggml's CPU backend lacks in bf16."""


NEW = ("hardswish", "hardsigmoid")
"""Functions without an in-place variant."""


def draw_unary(name: str, p: Program) -> None:
    dtype = p.one_of(F32, F16, *([] if name in SHORT else [BF16]), beyond=(BF16,) if name in SHORT else ())
    p.nmse = 5e-6 if name in ("gelu", "gelu_quick") else tolerance(dtype)
    high = p.one_of(2, beyond=(30,))  # large values may overflow
    a = p.operand(dtype, p.ne(), PLAIN, GAPS, beyond=ANY, low=-2, high=high)
    p.out(name + ("_inplace" if name not in NEW and p.bool() else ""), a)


def draw_function(name: str, p: Program) -> None:
    dtype = p.one_of(*FLOATS)
    p.nmse = tolerance(dtype)
    a = p.operand(dtype, p.ne(), *ROWS, beyond=ANY, low=0.1, high=3)
    p.out(name + p.one_of("", "_inplace"), a)


for name in (
    "abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish",
    "hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "floor", "ceil", "round", "trunc",
):  # fmt: skip
    cases(Op.UNARY, name=name)(partial(draw_unary, name))


@cases(
    Op.UNARY,
    {f"unary {op.name.lower()}": _unary_sample(op) for op in UnaryOp},
    *map(on_rows, ("silu", "gelu", "gelu_erf")),
)
def xielu(p: Program) -> None:
    p.nmse = 1e-6
    numbers = (p.float(0.1, 1), p.float(0.1, 1), p.float(0.1, 1), p.float(-0.5, -1e-6))
    p.out("xielu", p.operand(F32, p.ne(), PLAIN, GAPS, beyond=ANY, low=-2, high=2), *numbers)


@cases(Op.LEAKY_RELU, on_main("leaky_relu", 0.1))
def leaky_relu(p: Program) -> None:
    dtype = p.one_of(F32, F16)
    p.nmse = tolerance(dtype)
    p.out("leaky_relu", p.operand(dtype, p.ne(), PLAIN, beyond=ANY), p.float(0.01, 0.9), p.bool())


@cases(Op.SILU_BACK, lambda c, t: c.silu_back(main(c, t), main(c, t)))
def silu_back(p: Program) -> None:
    ne = p.ne()
    p.out("silu_back", p.leaf(F32, ne), p.leaf(F32, ne, low=-3, high=3))


for op in (Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS):
    name = op.value.lower()
    cases(op, on_main(name), name=name)(partial(draw_function, name))


# -- binary ---


def draw_binary(name: str, p: Program) -> None:
    a, b = p.one_of((F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), beyond=((F32, F16),))
    small = p.ne(24, 4, 3, 2)
    large = tuple(n * p.extra(1, 3) for n in small)
    p.nmse = tolerance(a, b)
    positive: Any = {"low": 0.5, "high": 2}
    x = p.operand(a, large, *ROWS, beyond=ANY)
    y = p.operand(b, small, *ROWS, beyond=ANY, **positive)
    p.out(name + p.one_of("", "_inplace"), x, y)


cases(
    Op.ADD,
    lambda c, t: c.add(main(c, t), f32(c, ROW, 4)),
    Perf("add", "f32,f32", lambda c, s: c.add(rows(c, s), rows(c, s))),
    Perf("add", "f32,f32;one row", lambda c, s: c.add(rows(c, s), rows(c, s, n=1))),
    name="add",
)(partial(draw_binary, "add"))


@cases(Op.ADD, name="add of blocks")
def add_blocks(p: Program) -> None:
    ne = p.ne(3, 5, 3, 2)
    ne = (32 * ne[0], *ne[1:])
    p.nmse, p.rule = 1e-3, "dequant"
    blocks = p.one_of(DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0)
    p.out("add", p.leaf(blocks, ne), p.operand(F32, ne, *ROWS))


@cases(Op.ADD)
def add_cast(p: Program) -> None:
    ne = p.ne()
    p.nmse = 1e-6
    p.out("add_cast", p.leaf(F16, ne), p.leaf(F32, ne), F32)


@cases(Op.ADD1, lambda c, t: c.add1(main(c, t), f32(c, 1)))
def add1(p: Program) -> None:
    a, b = p.one_of((F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16))
    p.nmse = tolerance(a, b)
    p.out(p.one_of("add1", "add1_inplace"), p.leaf(a, p.ne()), p.leaf(b, (1,)))


@cases(Op.ADD_ID, lambda c, t: c.add_id(main(c, t, ROW, 2, 3), f32(c, ROW, 4), i32(c, 2, 3)))
def add_id(p: Program) -> None:
    n, n_used, n_tokens, _ = p.ne(70, 5, 6)
    n_experts = p.int(1, 6)
    ids = p.random.integers(0, n_experts, (n_tokens, n_used + 2))
    if p.bool():
        many = p.leaf(I32, (n_used + 2, n_tokens), ids)
        chosen = p.step("view_2d", many, n_used, n_tokens, 4 * (n_used + 2), 4)
    else:
        chosen = p.leaf(I32, (n_used, n_tokens), ids[:, :n_used])
    a = p.operand(F32, (n, n_used, n_tokens), *ROWS)
    p.out("add_id", a, p.operand(F32, (n, n_experts), PLAIN, PADDED), chosen)


@cases(Op.ACC, lambda c, t: c.acc(main(c, t), f32(c, ROW, 2), 4 * ROW, 8 * ROW, 8 * ROW, 0))
def acc(p: Program) -> None:
    a, b, nb, offset = window(p, F32)
    p.out(p.one_of("acc", "acc_inplace"), a, b, *nb, offset)


cases(Op.SUB, lambda c, t: c.sub(main(c, t), f32(c, ROW, 4)), name="sub")(partial(draw_binary, "sub"))
cases(Op.DIV, lambda c, t: c.div(main(c, t), f32(c, ROW, 4)), name="div")(partial(draw_binary, "div"))
cases(
    Op.MUL,
    lambda c, t: c.mul(main(c, t), f32(c, ROW, 4)),
    Perf("mul", "f32,f32", lambda c, s: c.mul(rows(c, s), rows(c, s))),
    name="mul",
)(partial(draw_binary, "mul"))


# -- scale ---


@cases(Op.SCALE, on_main("scale", 2.0), on_rows("scale", 0.5))
def scale(p: Program) -> None:
    a = p.operand(F32, p.ne(), PLAIN, beyond=ANY)
    fn = p.one_of("scale", "scale_inplace", "scale_bias", "scale_bias_inplace")
    p.out(fn, a, p.float(0.1, 4), *([p.float(0.5, 2)] if "bias" in fn else []))


@cases(Op.CLAMP, on_main("clamp", -1.0, 1.0))
def clamp(p: Program) -> None:
    dtype = p.one_of(F32, F16, beyond=(BF16,))
    low = p.float(-1, 0)
    p.nmse = tolerance(dtype)
    a = p.operand(dtype, p.ne(), PLAIN, beyond=ANY)  # ggml computes other layouts wrongly
    p.out(p.one_of("clamp", beyond=("clamp_inplace",)), a, low, p.float(0.1, 1))


# -- glu ---


def _glu_sample(op: GluOp) -> Sample:
    if op is GluOp.SWIGLU_OAI:
        return lambda c, t: c.swiglu_oai(main(c, t), main(c, t), 1.7, 7.0)
    if op is GluOp.SWIGLU_CLAMP:
        return lambda c, t: c.swiglu_clamp(main(c, t), main(c, t), 7.0)
    return lambda c, t: c.glu(main(c, t), op)


def draw_glu(name: str, p: Program) -> None:
    dtype = p.one_of(F32, F16)
    p.nmse = 5e-6 if name.startswith("geglu") else tolerance(dtype)
    ne = p.ne()
    form = p.one_of("", "_swapped", "_split")
    rows: Any = {"low": -2, "high": p.one_of(2, beyond=(30,))}
    if form == "_split":
        p.out(name + form, *(p.operand(dtype, ne, PLAIN, GAPS, **rows) for _ in range(2)))
    else:
        p.out(name + form, p.operand(dtype, (2 * ne[0], *ne[1:]), PLAIN, GAPS, **rows))


for name in ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick"):
    cases(Op.GLU, name=name)(partial(draw_glu, name))


@cases(
    Op.GLU,
    {f"glu {op.name.lower()}": _glu_sample(op) for op in GluOp},
    Perf("swiglu", "f32", lambda c, s: c.swiglu(f32(c, 2048 * s, 512))),
)
def swiglu_oai(p: Program) -> None:
    ne = p.ne()
    a, b = (p.operand(F32, ne, PLAIN, GAPS, low=-9, high=9) for _ in range(2))
    p.out("swiglu_oai", a, b, p.float(0.5, 2), p.float(1, 7))


@cases(Op.GLU)
def swiglu_clamp(p: Program) -> None:
    ne = p.ne()
    a, b = (p.operand(F32, ne, PLAIN, GAPS, low=-9, high=9) for _ in range(2))
    p.out("swiglu_clamp", a, b, p.float(1, 7))


# -- constant ---


@cases(Op.TRI, lambda c, t: c.tri(main(c, t, ROW, ROW), TriType.LOWER))
def tri(p: Program) -> None:
    p.nmse = 0
    n = p.int(1, 12)
    p.out("tri", p.leaf(F32, (n, n, p.extra(1, 3), p.extra(1, 2))), p.one_of(*TriType))


@cases(Op.DIAG, lambda c, t: c.diag(main(c, t, ROW)))
def diag(p: Program) -> None:
    p.nmse = 0
    p.out("diag", p.operand(F32, (p.int(1, 12), 1, p.extra(1, 3), p.extra(1, 2)), PLAIN, PADDED))


@cases(Op.FILL, on_main("fill", 1.0))
def fill(p: Program) -> None:
    p.nmse = 0
    fn, dtype = p.one_of("fill", "fill_inplace"), p.one_of(F32, F16, beyond=(BF16,))
    p.out(fn, p.operand(dtype, p.ne(), PLAIN, beyond=ANY), p.float(-5, 5))


@cases(Op.ARANGE, lambda c, t: c.arange(0, 8) if t == F32 else no_such_node(t))
def arange(p: Program) -> None:
    start, step = p.float(-5, 5), p.float(0.125, 2)
    p.nmse = 1e-12
    p.out("arange", start, start + p.int(1, 40) * step, step)


@cases(Op.TIMESTEP_EMBEDDING, lambda c, t: c.timestep_embedding(main(c, t, 8), 64))
def timestep_embedding(p: Program) -> None:
    p.nmse = 1e-6
    steps = p.leaf(F32, (p.int(1, 6),), low=0, high=50)
    p.out("timestep_embedding", steps, p.int(2, 40), p.one_of(100, 10000))
