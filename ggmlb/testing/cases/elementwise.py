"""Functions of one or two elements, gated units, and what writes into a window."""

from __future__ import annotations

from functools import partial
from typing import Any

from ggmlb.core.dtypes import DType
from ggmlb.testing.cases.draw import ANY, BF16, F16, F32, GAPS, I32, PADDED, PLAIN, ROWS, Program, family

UNARY = (
    "abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish",
    "hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "floor", "ceil", "round", "trunc",
)  # fmt: skip
SHORT = ("gelu", "gelu_quick", "gelu_erf", "silu")
"""Not for bf16."""
NEW = ("hardswish", "hardsigmoid")
"""Not in place."""
BLOCKS_32 = (DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0)


def tolerance(*dtypes: DType) -> float:
    """What rounding to a short type may cost."""
    if BF16 in dtypes:
        return 1e-4
    return 1e-6 if F16 in dtypes else 1e-7


def _unary(name: str, p: Program) -> None:
    dtype = p.one_of(F32, F16, *([] if name in SHORT else [BF16]), beyond=(BF16,) if name in SHORT else ())
    p.nmse = 5e-6 if name in ("gelu", "gelu_quick") else tolerance(dtype)
    high = p.one_of(2, beyond=(30,))  # where a careless formula overflows
    a = p.operand(dtype, p.ne(), PLAIN, GAPS, beyond=ANY, low=-2, high=high)
    p.out(name + ("_inplace" if name not in NEW and p.bool() else ""), a)


for _name in UNARY:
    family(_name)(partial(_unary, _name))


def _function(name: str, dtypes: tuple[DType, ...], p: Program) -> None:
    dtype = p.one_of(*dtypes)
    p.nmse = tolerance(dtype)
    a = p.operand(dtype, p.ne(), *ROWS, beyond=ANY, low=0.1, high=3)
    p.out(name + p.one_of("", "_inplace"), a)


for _name in ("sqr", "sqrt", "log", "sin", "cos"):
    family(_name)(partial(_function, _name, (F32, F16, BF16)))


@family("xielu")
def xielu(p: Program) -> None:
    p.nmse = 1e-6
    numbers = (p.float(0.1, 1), p.float(0.1, 1), p.float(0.1, 1), p.float(-0.5, -1e-6))
    p.out("xielu", p.operand(F32, p.ne(), PLAIN, GAPS, beyond=ANY, low=-2, high=2), *numbers)


@family("scale")
def scale(p: Program) -> None:
    a = p.operand(F32, p.ne(), PLAIN, beyond=ANY)
    fn = p.one_of("scale", "scale_inplace", "scale_bias", "scale_bias_inplace")
    p.out(fn, a, p.float(0.1, 4), *([p.float(0.5, 2)] if "bias" in fn else []))


@family("clamp")
def clamp(p: Program) -> None:
    dtype = p.one_of(F32, F16, beyond=(BF16,))
    low = p.float(-1, 0)
    p.nmse = tolerance(dtype)
    a = p.operand(dtype, p.ne(), PLAIN, beyond=ANY)  # where ggml goes astray
    p.out(p.one_of("clamp", beyond=("clamp_inplace",)), a, low, p.float(0.1, 1))


@family("leaky_relu")
def leaky_relu(p: Program) -> None:
    dtype = p.one_of(F32, F16)
    p.nmse = tolerance(dtype)
    p.out("leaky_relu", p.operand(dtype, p.ne(), PLAIN, beyond=ANY), p.float(0.01, 0.9), p.bool())


@family("silu_back")
def silu_back(p: Program) -> None:
    ne = p.ne()
    p.out("silu_back", p.leaf(F32, ne), p.leaf(F32, ne, low=-3, high=3))


# -- two operands ----------------------------------------------------------------------------------


def _binary(name: str, p: Program) -> None:
    a, b = p.one_of((F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), beyond=((F32, F16),))
    small = p.ne(24, 4, 3, 2)
    large = tuple(n * p.extra(1, 3) for n in small)
    p.nmse = tolerance(a, b)
    positive: Any = {"low": 0.5, "high": 2}
    x = p.operand(a, large, *ROWS, beyond=ANY)
    y = p.operand(b, small, *ROWS, beyond=ANY, **positive)
    p.out(name + p.one_of("", "_inplace"), x, y)


for _name in ("add", "sub", "mul", "div"):
    family(_name)(partial(_binary, _name))


@family("add of blocks")
def add_blocks(p: Program) -> None:
    ne = p.ne(3, 5, 3, 2)
    ne = (32 * ne[0], *ne[1:])
    p.nmse, p.rule = 1e-3, "dequant"
    p.out("add", p.leaf(p.one_of(*BLOCKS_32), ne), p.operand(F32, ne, *ROWS))


@family("add_cast")
def add_cast(p: Program) -> None:
    ne = p.ne()
    p.nmse = 1e-6
    p.out("add_cast", p.leaf(F16, ne), p.leaf(F32, ne), F32)


@family("add1")
def add1(p: Program) -> None:
    a, b = p.one_of((F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16))
    p.nmse = tolerance(a, b)
    p.out(p.one_of("add1", "add1_inplace"), p.leaf(a, p.ne()), p.leaf(b, (1,)))


@family("add_id")
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


def _window(p: Program, dtype: DType) -> tuple[str, str, tuple[int, ...], int]:
    """A tensor, one that fits in it, the strides of the window and its offset."""
    size = dtype.type_size
    small = p.ne(20, 4, 3, 2)
    more = [p.int(0, 4), p.int(0, 2), p.int(0, 2), p.int(0, 1)]
    start = [p.int(0, m) for m in more]
    large = tuple(n + m for n, m in zip(small, more, strict=True))
    nb = (size, size * large[0], size * large[0] * large[1], size * large[0] * large[1] * large[2])
    offset = sum(s * b for s, b in zip(start, nb, strict=True))
    return p.leaf(dtype, large), p.operand(dtype, small, *ROWS), nb[1:], offset


@family("acc")
def acc(p: Program) -> None:
    a, b, nb, offset = _window(p, F32)
    p.out(p.one_of("acc", "acc_inplace"), a, b, *nb, offset)


@family("set")
def set_window(p: Program) -> None:
    a, b, nb, offset = _window(p, p.one_of(F32, I32))
    p.nmse = 0
    p.out(p.one_of("set", "set_inplace"), a, b, *nb, offset)


# -- gated units -----------------------------------------------------------------------------------


def _glu(name: str, p: Program) -> None:
    dtype = p.one_of(F32, F16)
    p.nmse = 5e-6 if name.startswith("geglu") else tolerance(dtype)
    ne = p.ne()
    form = p.one_of("", "_swapped", "_split")
    rows: Any = {"low": -2, "high": p.one_of(2, beyond=(30,))}
    if form == "_split":
        p.out(name + form, *(p.operand(dtype, ne, PLAIN, GAPS, **rows) for _ in range(2)))
    else:
        p.out(name + form, p.operand(dtype, (2 * ne[0], *ne[1:]), PLAIN, GAPS, **rows))


for _name in ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick"):
    family(_name)(partial(_glu, _name))


@family("swiglu_oai")
def swiglu_oai(p: Program) -> None:
    ne = p.ne()
    a, b = (p.operand(F32, ne, PLAIN, GAPS, low=-9, high=9) for _ in range(2))
    p.out("swiglu_oai", a, b, p.float(0.5, 2), p.float(1, 7))
