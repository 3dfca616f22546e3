"""Each instruction of the PTX machine by itself: beside Python's integers, fractions, NumPy, the manual."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.ptx import PtxError
from tests.support.ptx.machine import machine, why_not
from tests.support.ptx.program import Program, Span

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LANES = np.arange(32)
INF, NAN = np.inf, np.nan
LEAST, MOST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
REALS = (
    0.0, -0.0, 1.0, -1.5, 2.5, 3.5, -2.5, 1e-40, -1e-40, LEAST, 3e38, -3e38, INF, -INF, NAN, 0.1,
    8388609.0, 65519.9,
)  # fmt: skip
WHOLES = (
    0, 1, 2, 5, 31, 32, 33, 64, 255, 127, 128, -1, -2, -128, 32767, 32768, 1 << 31, (1 << 31) - 1,
    1 << 63,
)  # fmt: skip


def values(kind: str, seed: int) -> Any:
    """Return numbers for 32 lanes: special ones against each other, then random ones."""
    rng = np.random.default_rng(seed)
    if kind == "pred":
        return rng.integers(0, 2, 32).astype("?")
    dtype = np.dtype(f"{kind[0]}{int(kind[1:]) // 8}".replace("s", "i"))
    if kind[0] == "f":
        some = [*rng.choice(REALS, 20), *(rng.standard_normal(12) * 10.0 ** rng.integers(-6, 7, 12))]
        with np.errstate(over="ignore"):
            return np.array(some).astype(dtype)
    some = [*rng.choice(np.array(WHOLES, object), 20), *rng.integers(0, 1 << 63, 12)]
    unsigned = np.array([int(x) % (1 << 8 * dtype.itemsize) for x in some], f"u{dtype.itemsize}")
    return unsigned.view(dtype)


# -- kernels of a few instructions -------------------------------------------------------------------

REGISTERS = {"p": ("pred", "%p"), "2": ("b16", "%h"), "4": ("b32", "%w"), "8": ("b64", "%q")}


def kernel(body: str, n_params: int, declarations: str = "") -> Program:
    """Return one with `%aN` the address of parameter N, `%t` the thread, 20 registers of each size."""
    registers = "".join(f".reg .{kind} {prefix}<20>;" for kind, prefix in REGISTERS.values())
    loads = "".join(f"ld.param.u64 %a{i}, [k_param_{i}];" for i in range(n_params))
    params = ", ".join(f".param .u64 k_param_{i}" for i in range(n_params))
    return Program(
        f".version 9.0 .target sm_90 .address_size 64 {declarations} .visible .entry k({params}) {{"
        f"{registers} .reg .b64 %a<20>; .reg .b32 %t; {loads} mov.u32 %t, %tid.x;\n{body}\nret; }}"
    )


def launched(program: Program, *arrays: Any, block: int = 32, shared_nbytes: int = 0) -> None:
    """Launch it once; its parameters are where the arrays lie."""
    spans = [Span(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
    arguments = struct.pack(f"{len(arrays)}P", *(span.begin for span in spans))
    program.launch((1, 1, 1), (block, 1, 1), arguments, spans, shared_nbytes=shared_nbytes)


def run(body: str, *arrays: Any, block: int = 32, declarations: str = "") -> None:
    launched(kernel(body, len(arrays), declarations), *arrays, block=block)


def load(letter: str, register: str, param: int) -> str:
    """Return what reads a lane's value of the array that is a parameter."""
    if letter == "p":
        return f"{_address(1, param)} ld.global.u8 %h19, [%q19]; setp.ne.b16 {register}, %h19, 0;\n"
    return f"{_address(int(letter), param)} ld.global.b{8 * int(letter)} {register}, [%q19];\n"


def store(letter: str, register: str, param: int) -> str:
    if letter == "p":
        return f"{_address(1, param)} selp.u16 %h19, 1, 0, {register}; st.global.u8 [%q19], %h19;\n"
    return f"{_address(int(letter), param)} st.global.b{8 * int(letter)} [%q19], {register};\n"


def _address(nbytes: int, param: int) -> str:
    return f"mad.wide.u32 %q19, %t, {nbytes}, %a{param};"


def done(name: str, letters: str, dtype: Any, *inputs: Any) -> Any:
    """Return what an instruction makes of inputs in 32 lanes; `letters`: sizes of its operands."""
    registers = [f"{REGISTERS[letter][1]}{i}" for i, letter in enumerate(letters)]
    named = list(enumerate(zip(letters, registers, strict=True)))
    loads = "".join(load(letter, register, i) for i, (letter, register) in named[1:])
    out = np.zeros(32, dtype)
    run(f"{loads}{name} {', '.join(registers)};\n{store(letters[0], registers[0], 0)}", out, *inputs)
    return out


# -- integers, lane by lane: functions of Python's numbers -------------------------------------------

Case = tuple[str, tuple[str, ...], Callable[..., Any]]
"""Types of the result and of the sources; a function of a lane's numbers, or of arrays if all are real."""
CASES: dict[str, Case] = {}


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bytes_of(x: int, signed: bool = False) -> list[int]:
    return [int.from_bytes([b], "little", signed=signed) for b in (x % (1 << 32)).to_bytes(4, "little")]


def dot(signed: bool) -> Callable[[int, int, int], int]:
    return lambda a, b, c: c + sum(x * y for x, y in zip(bytes_of(a, signed), bytes_of(b, True), strict=True))


def inserted(bits: int) -> Callable[[int, int, int, int], int]:
    """Bit by bit, as the manual's loop (9.7.1.23)."""

    def insert(a: int, b: int, position: int, length: int) -> int:
        for i in range(min(length % 256, bits - position % 256)):
            at = position % 256 + i
            b = b & ~(1 << at) | (a >> i & 1) << at
        return b

    return insert


def field(signed: bool) -> Callable[[int, int, int], int]:
    """Bit by bit, as the manual's loop (9.7.1.22)."""

    def extract(a: int, position: int, length: int) -> int:
        position, length = position % 256, length % 256
        sign = signed and length > 0 and a >> min(position + length - 1, 31) & 1
        bits = [a >> position + i & 1 if i < length and position + i < 32 else sign for i in range(32)]
        return sum(bit << i for i, bit in enumerate(bits))

    return extract


def permuted(control: Callable[[int], list[int]]) -> Callable[[int, int, int], int]:
    def permute(a: int, b: int, c: int) -> int:
        every = bytes_of(a) + bytes_of(b)
        return int.from_bytes(
            bytes(255 * (every[s & 7] >> 7) if s & 8 else every[s & 7] for s in control(c)), "little"
        )

    return permute


def funnel(left: bool, wraps: bool) -> Callable[[int, int, int], int]:
    def shift(a: int, b: int, c: int) -> int:
        n, both = c % 32 if wraps else min(c, 32), b << 32 | a
        return both << n >> 32 if left else both >> n

    return shift


ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a < b) | (a > b), "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
ARITHMETIC: dict[str, tuple[int, Callable[..., int]]] = {
    "add": (2, lambda a, b: a + b), "sub": (2, lambda a, b: a - b), "mul.lo": (2, lambda a, b: a * b),
    "mad.lo": (3, lambda a, b, c: a * b + c), "min": (2, min), "max": (2, max), "div": (2, truncated),
    "rem": (2, lambda a, b: a - truncated(a, b) * b),
}  # fmt: skip
for n in (16, 32, 64):
    u = f"u{n}"
    for t in (f"s{n}", u):
        CASES |= {f"{name}.{t}": (t, (t,) * k, function) for name, (k, function) in ARITHMETIC.items()}
        CASES |= {f"setp.{name}.{t}": ("pred", (t, t), function) for name, function in ORDERS.items()}
        CASES[f"shr.{t}"] = t, (t, "u32"), lambda a, k, n=n: a >> min(k, n)
        CASES[f"cvt.rn.f32.{t}"] = "f32", (t,), lambda a: rounded(Fraction(a), "rn")
        CASES[f"cvt.rn.f64.{t}"] = "f64", (t,), float
        if n < 64:
            wide = f"{t[0]}{2 * n}"
            CASES[f"mul.wide.{t}"] = wide, (t, t), lambda a, b: a * b
            CASES[f"mad.wide.{t}"] = wide, (t, t, wide), lambda a, b, c: a * b + c
            CASES[f"mul.hi.{t}"] = t, (t, t), lambda a, b, n=n: a * b >> n
    CASES |= {
        f"neg.s{n}": (f"s{n}", (f"s{n}",), lambda a: -a), f"abs.s{n}": (f"s{n}", (f"s{n}",), abs),
        f"and.b{n}": (u, (u, u), lambda a, b: a & b), f"or.b{n}": (u, (u, u), lambda a, b: a | b),
        f"xor.b{n}": (u, (u, u), lambda a, b: a ^ b), f"not.b{n}": (u, (u,), lambda a: ~a),
        f"shl.b{n}": (u, (u, "u32"), lambda a, k, n=n: a << min(k, n)),
        f"shr.b{n}": (u, (u, "u32"), lambda a, k, n=n: a >> min(k, n)),
        f"setp.eq.b{n}": ("pred", (u, u), lambda a, b: a == b),
        f"setp.ne.b{n}": ("pred", (u, u), lambda a, b: a != b),
    }  # fmt: skip
    for t in (f"b{n}", f"u{n}", f"s{n}", *([f"f{n}"] if n > 16 else [])):
        CASES[f"mov.{t}"] = u, (u,), lambda a: a
        CASES[f"selp.{t}"] = u, (u, u, "pred"), lambda a, b, p: a if p else b
CASES |= {
    "and.pred": ("pred", ("pred", "pred"), lambda a, b: a and b),
    "or.pred": ("pred", ("pred", "pred"), lambda a, b: a or b),
    "xor.pred": ("pred", ("pred", "pred"), lambda a, b: a != b),
    "not.pred": ("pred", ("pred",), lambda a: not a), "mov.pred": ("pred", ("pred",), lambda a: a),
    "dp4a.s32.s32": ("s32", ("u32", "u32", "s32"), dot(True)),
    "dp4a.u32.s32": ("s32", ("u32", "u32", "s32"), dot(False)),
    "popc.b32": ("u32", ("u32",), int.bit_count),
    "bfe.u32": ("u32", ("u32",) * 3, field(False)), "bfe.s32": ("s32", ("s32", "u32", "u32"), field(True)),
    "bfi.b32": ("u32", ("u32",) * 4, inserted(32)),
    "bfi.b64": ("u64", ("u64", "u64", "u32", "u32"), inserted(64)),
    "prmt.b32": ("u32", ("u32",) * 3, permuted(lambda c: [c >> 4 * i & 15 for i in range(4)])),
}  # fmt: skip
# The manual's table (9.7.9.7): the result's bytes from the highest on, for each value of c's two lowest bits.
for mode, rows in {
    "f4e": "3210 4321 5432 6543", "b4e": "5670 6701 7012 0123", "rc8": "0000 1111 2222 3333",
    "ecl": "3210 3211 3222 3333", "ecr": "0000 1110 2210 3210", "rc16": "1010 3232 1010 3232",
}.items():  # fmt: skip
    picks = [[int(x) for x in reversed(row)] for row in rows.split()]
    CASES[f"prmt.b32.{mode}"] = "u32", ("u32",) * 3, permuted(lambda c, picks=picks: picks[c & 3])  # type: ignore[misc]
for way in "lr":
    for mode in ("wrap", "clamp"):
        CASES[f"shf.{way}.{mode}.b32"] = "u32", ("u32",) * 3, funnel(way == "l", mode == "wrap")
for space in ("global", "shared", "local", "const"):
    CASES |= {f"cvta.{to}{space}.u64": ("u64", ("u64",), lambda a: a) for to in ("", "to.")}


# -- real numbers, lane by lane: functions of arrays -------------------------------------------------


def rounded(x: Fraction, mode: str) -> float:
    """Round an exact number to float32: to nearest even, towards zero, minus or plus infinity."""
    if x == 0:
        return 0.0
    size = abs(x)
    e = size.numerator.bit_length() - size.denominator.bit_length()
    e -= size < Fraction(2) ** e
    unit = Fraction(2) ** (max(e, -126) - 23)
    whole, rest = divmod(size, unit)
    away = {"rz": False, "rm": x < 0 and rest > 0, "rp": x > 0 and rest > 0}
    result = (whole + away.get(mode, 2 * rest > unit or (2 * rest == unit and whole % 2 == 1))) * unit
    if result >= Fraction(2) ** 128:
        result = INF if mode in ("rn", "rp" if x > 0 else "rm") else MOST  # type: ignore[assignment]
    return float(result) if x > 0 else -float(result)


def exactly(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute with exact numbers, and round; where something is not finite, with NumPy's."""

    def compute(*sources: Any) -> Any:
        plain = function(*sources).astype("f4")
        for i, row in enumerate(zip(*sources, strict=True)):
            if all(map(np.isfinite, row)):
                exact = rounded(function(*(Fraction(float(x)) for x in row)), mode)
                plain[i] = exact or plain[i] * 0
        return plain

    return compute


def flushed(x: Any) -> Any:
    return np.where(np.abs(x) < LEAST, np.copysign(np.float32(0), x), x)


def saturated(x: Any) -> Any:
    return np.where(np.isnan(x), np.float32(0), np.clip(x, 0, 1)) + np.float32(0)


def extreme(pick: Callable[[Any, Any], Any], zero: float) -> Callable[[Any, Any], Any]:
    """The other one where one is NaN; of two zeros that of `zero`'s sign, if there is one."""

    def choose(a: Any, b: Any) -> Any:
        found = (np.signbit(a) == np.signbit(zero)) | (np.signbit(b) == np.signbit(zero))
        return np.where((a == 0) & (b == 0) & found, np.float32(zero), pick(a, b))

    return choose


def divided_approximately(a: Any, b: Any) -> Any:
    """9.7.3.8: the reciprocal of what is beyond 2^126 is lost."""
    return np.where((np.abs(b) > 2.0**126) & np.isfinite(b), a * np.copysign(np.float32(0), b), a / b)


def fused(a: Any, b: Any, c: Any) -> Any:
    exact = [Fraction(x) * Fraction(y) + Fraction(z) if np.isfinite([x, y, z]).all() else x * y + z
             for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]  # fmt: skip
    return np.array([float(x) for x in exact])


def integer(t: str, to_whole: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """9.7.9.22: the nearest that there is; NaN is 0."""
    info = np.iinfo(t.replace("s", "int").replace("u", "uint"))

    def convert(x: Any) -> Any:
        whole = [0 if np.isnan(v) else v if np.isinf(v) else int(v) for v in to_whole(x).tolist()]
        return np.array(
            [info.min if v <= info.min else info.max if v >= info.max else v for v in whole], object
        )

    return convert


def with_twin(name: str, n: int, function: Callable[..., Any], result: str = "f32", of: str = "f32") -> None:
    """Add the case of an instruction, and of its twin with .ftz."""
    CASES[f"{name}.{of}"] = result, ("f32",) * n, function
    flush = flushed if result == "f32" else lambda x: x
    CASES[f"{name}.ftz.{of}"] = result, ("f32",) * n, lambda *x: flush(function(*map(flushed, x)))


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
}  # fmt: skip
for name, function in BINARY.items():
    for mode in ("", ".rn", ".rz", ".rm", ".rp"):
        with_twin(f"{name}{mode}", 2, exactly(mode[1:] or "rn", function))
    CASES |= {f"{name}{mode}.f64": ("f64", ("f64", "f64"), function) for mode in ("", ".rn")}
for mode in ("rn", "rz", "rm", "rp"):
    with_twin(f"fma.{mode}", 3, exactly(mode, lambda a, b, c: a * b + c))
CASES["fma.rn.f64"] = "f64", ("f64",) * 3, fused
for name in ("div.rn", "div.full"):
    with_twin(name, 2, lambda a, b: a / b)
with_twin("div.approx", 2, divided_approximately)
with_twin("min", 2, extreme(np.fmin, -0.0))
with_twin("max", 2, extreme(np.fmax, 0.0))
UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs, "neg": lambda a: -a,
    "rcp.rn": lambda a: np.float32(1) / a, "rcp.approx": lambda a: np.float32(1) / a,
    "sqrt.rn": np.sqrt, "sqrt.approx": np.sqrt, "rsqrt.approx": lambda a: 1 / np.sqrt(a.astype("f8")),
    "ex2.approx": lambda a: np.exp2(a.astype("f8")).astype("f4"),
    "lg2.approx": lambda a: np.log2(a.astype("f8")).astype("f4"),
}  # fmt: skip
for name, unary in UNARY.items():
    with_twin(name, 1, unary)
for name, function in ORDERS.items():
    with_twin(f"setp.{name}", 2, function, "pred")
    with_twin(f"setp.{name}u", 2, lambda a, b, f=function: f(a, b) | np.isnan(a) | np.isnan(b), "pred")
with_twin("setp.num", 2, lambda a, b: ~np.isnan(a) & ~np.isnan(b), "pred")
with_twin("setp.nan", 2, lambda a, b: np.isnan(a) | np.isnan(b), "pred")
for name, to_whole in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
    with_twin(f"cvt.{name}", 1, to_whole, of="f32.f32")
    for t in ("s32", "u32", "s64", "u64"):
        with_twin(f"cvt.{name}", 1, integer(t, to_whole), t, f"{t}.f32")
CASES |= {
    "copysign.f32": ("f32", ("f32", "f32"), lambda a, b: np.copysign(b, a)),
    "cvt.sat.f32.f32": ("f32", ("f32",), saturated),
    "cvt.ftz.sat.f32.f32": ("f32", ("f32",), lambda x: flushed(saturated(flushed(x)))),
    "cvt.f32.f16": ("f32", ("f16",), lambda x: x.astype("f4")),
    "cvt.rn.f16.f32": ("f16", ("f32",), lambda x: x.astype("f2")),
    "cvt.rn.bf16x2.f32": ("u32", ("f32", "f32"), lambda a, b: bf16_bits(a) << 16 | bf16_bits(b)),
    "cvt.f64.f32": ("f64", ("f32",), lambda x: x.astype("f8")),
    "cvt.rn.f32.f64": ("f32", ("f64",), lambda x: x.astype("f4")),
    "cvt.rn.ftz.f32.f64": ("f32", ("f64",), lambda x: flushed(x.astype("f4"))),
}  # fmt: skip


def bf16_bits(x: Any) -> Any:
    """9.7.9.22: NaN becomes the canonical one."""
    return np.where(np.isnan(x), 0x7FFF, x.astype(ml_dtypes.bfloat16).view("u2").astype("u4"))


APPROXIMATE = ("ex2.approx", "lg2.approx", "rsqrt.approx")
"""To two units in the last place."""


@pytest.mark.parametrize("name", CASES)
def test_lane_by_lane(name: str) -> None:
    result, sources, function = CASES[name]
    letters = "".join("p" if t == "pred" else str(int(t[1:]) // 8) for t in (result, *sources))
    dtype = np.dtype("?" if result == "pred" else f"{result[0]}{letters[0]}".replace("s", "i"))
    for seed in range(4):
        inputs = [values(t, 10 * seed + i) for i, t in enumerate(sources)]
        if name.startswith(("div", "rem")) and sources[0][0] in "su":
            inputs[1][inputs[1] == 0] = 3  # a quotient by 0 is nobody's
        if name.startswith("bfi"):
            inputs[3] %= 70
        got = done(name, letters, dtype, *inputs)
        with np.errstate(all="ignore"):
            if all(t[0] == "f" for t in sources):
                want = function(*inputs)
            else:
                want = [function(*(x.item() for x in row)) for row in zip(*inputs, strict=True)]
        if dtype.kind in "iu":
            want = np.array([int(x) % (1 << 8 * dtype.itemsize) for x in want], f"u{dtype.itemsize}").view(
                dtype
            )
        want = np.asarray(want).astype(dtype)
        if name.startswith(APPROXIMATE):
            np.testing.assert_array_max_ulp(got, want, 2)
        else:
            np.testing.assert_array_equal(got, want)
        if dtype.kind == "f" and not any(mode in name for mode in (".rz", ".rm", ".rp")):
            numbers = ~np.isnan(got)
            np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(want)[numbers])


@pytest.mark.parametrize("to", [f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)])
@pytest.mark.parametrize("of", [f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)])
def test_conversion_between_integers(to: str, of: str) -> None:
    """9.7.9.22: of the source the lowest bits count; the result fills the register by its own sign."""

    def as_type(x: int, t: str) -> int:
        bits = int(t[1:])
        return x % (1 << bits) - ((x >> (bits - 1) & 1) << bits if t[0] == "s" else 0)

    wide, result = (max(int(t[1:]), 16) for t in (of, to))
    source = values(f"u{wide}", 1)
    got = done(f"cvt.{to}.{of}", f"{result // 8}{wide // 8}", f"u{result // 8}", source)
    assert got.tolist() == [as_type(as_type(int(x), of), to) % (1 << result) for x in source]


def test_a_carry_goes_on_to_the_next() -> None:
    """9.7.2: the product of 32 bits each, and two more numbers, in 64 bits."""
    a, b, c, d, low, high = (values("u32", seed) for seed in range(6))
    run(
        "".join(load("4", f"%w{i}", i) for i in range(4))
        + "mad.lo.cc.u32 %w4, %w0, %w1, %w2; madc.hi.u32 %w5, %w0, %w1, %w3;"
        + store("4", "%w4", 4) + store("4", "%w5", 5),
        a, b, c, d, low, high,
    )  # fmt: skip
    for x, y, z, more, lower, upper in zip(*(v.tolist() for v in (a, b, c, d, low, high)), strict=True):
        assert upper << 32 | lower == (x * y + z + (more << 32)) % (1 << 64)


def test_parts_of_registers() -> None:
    """9.7.9.3: the first part is the lowest."""
    for whole_size, part_size in (("4", "2"), ("8", "4")):
        whole, bits = values(f"u{8 * int(whole_size)}", 2), 8 * int(whole_size)
        low, high, again = (np.zeros(32, f"u{size}") for size in (part_size, part_size, whole_size))
        w, p = REGISTERS[whole_size][1], REGISTERS[part_size][1]
        run(
            f"{load(whole_size, f'{w}1', 0)}"
            f"mov.b{bits} {{{p}1, {p}2}}, {w}1; mov.b{bits} {w}3, {{{p}1, {p}2}};"
            f"{store(part_size, f'{p}1', 1)}{store(part_size, f'{p}2', 2)}{store(whole_size, f'{w}3', 3)}",
            whole, low, high, again,
        )  # fmt: skip
        assert (low == whole.astype(low.dtype)).all()
        assert (high == whole >> whole.dtype.type(bits // 2)).all()
        assert (again == whole).all()


# -- memory ------------------------------------------------------------------------------------------

SPACES = ".shared .align 16 .b8 s[1024]; .local .align 8 .b8 l[16];"


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "f32", "b64"])
@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_loads_and_stores(space: str, kind: str) -> None:
    """9.7.9.8, 9.7.9.11: bytes and halves fill a register by their sign."""
    n = int(kind[1:]) // 8
    letter, dtype = str(max(n, 2)), np.dtype(f"{'i' if kind[0] == 's' else 'u'}{n}")
    register = f"{REGISTERS[letter][1]}1"
    source, out = np.arange(32 * n, dtype=np.uint8) * 37, np.zeros(32, f"{dtype.kind}{letter}")
    body = f"mad.wide.u32 %q1, %t, {n}, %a0; ld.global.{kind} {register}, [%q1];"
    if space != "global":
        body += f"mov.u64 %q2, {space[0]}; mad.wide.u32 %q2, %t, {n if space == 'shared' else 0}, %q2;"
        body += (
            f"st.{space}.{kind.replace('s', 'u')} [%q2], {register}; mov.b{8 * int(letter)} {register}, 0;"
        )
        body += f"ld.{space}.{kind} {register}, [%q2+0];"
    run(body + store(letter, register, 1), source, out, declarations=SPACES)
    assert out.tolist() == source.view(dtype).tolist()


def test_constants_and_parameters() -> None:
    """5.4.4, 7.1: initial values, what a module has no value for is zero, parameters by offset."""
    out = np.zeros((4, 32), np.int32)
    run(
        "mov.u64 %q0, table; ld.const.s8 %w0, [%q0+1]; ld.const.u8 %w1, [table+3]; ld.global.u32 %w2, [word];"
        f"ld.param.u32 %w3, [k_param_1+4]; {''.join(store('4', f'%w{i}', i) for i in range(4))}",
        *out, declarations=".const .align 1 .b8 table[4] = {1, 255, 3}; .global .align 4 .u32 word = 77;",
    )  # fmt: skip
    assert out[:, 5].tolist() == [-1, 0, 77, int(out[1].ctypes.data) >> 32]


def test_compare_and_swap_takes_turns() -> None:
    """9.7.13.4: one lane finds what was there before."""
    word, out = np.array([5], np.int32), np.zeros(32, np.int32)
    run(
        "add.u32 %w1, %t, 100; fence.sc.sys; atom.acquire.sys.global.cas.b32 %w0, [%a0], 5, %w1;"
        f"{store('4', '%w0', 1)}",
        word,
        out,
    )
    (first,) = np.flatnonzero(out == 5)
    assert word[0] == 100 + first
    assert set(np.delete(out, first)) == {word[0]}


COPY = "mad.wide.u32 %q1, %t, 16, %a0; mov.u32 %w1, s; mad.lo.u32 %w1, %t, 16, %w1;"


@pytest.mark.parametrize("wait", ["cp.async.wait_group 1;", "cp.async.wait_group 0;"])
def test_a_copy_is_there_when_its_group_was_waited_for(wait: str) -> None:
    """9.7.9.25.3: 16 bytes, or zeros; the last group may be on its way."""
    source, out = np.arange(256, dtype=np.int32), np.zeros(32, np.int32)
    run(
        f"{COPY} and.b32 %w2, %t, 1; shl.b32 %w2, %w2, 4;"
        "cp.async.cg.shared.global.L2::128B [%w1], [%q1], 16, %w2; cp.async.commit_group;"
        "cp.async.cg.shared.global [%w1+512], [%q1], 16, 16; cp.async.commit_group;"
        f"{wait} ld.shared.u32 %w3, [%w1+4]; {store('4', '%w3', 1)}",
        source, out, declarations=SPACES,
    )  # fmt: skip
    assert out.tolist() == [4 * i + 1 if i % 2 else 0 for i in range(32)]


def test_dynamic_shared_memory_is_as_long_as_the_launch_says() -> None:
    out, at = np.zeros(32, np.int32), "mov.u32 %w1, s; mad.lo.u32 %w1, %t, 4, %w1; st.shared.u32 [%w1], %t;"
    program = kernel(
        f"{at} ld.shared.u32 %w2, [%w1]; {store('4', '%w2', 0)}", 1, ".extern .shared .align 16 .b8 s[];"
    )
    launched(program, out, shared_nbytes=128)
    assert (out == LANES).all()
    with pytest.raises(PtxError, match=r"thread 31 .* outside of all shared arrays"):
        launched(program, out, shared_nbytes=124)


@pytest.mark.parametrize("declared", [("s", "own"), ("own", "s")])
def test_dynamic_shared_memory_comes_after_all_other(declared: tuple[str, str]) -> None:
    """In whatever order a text declares them, writes to all bytes of it leave the other alone."""
    texts = {"s": ".extern .shared .align 16 .b8 s[];", "own": ".shared .align 16 .b8 own[128];"}
    out = np.zeros(32, np.int32)
    address = "mov.u32 %w1, {}; mad.lo.u32 %w1, %t, 4, %w1;"
    program = kernel(
        f"{address.format('own')} st.shared.u32 [%w1], %t; bar.sync 0; mov.u32 %w3, 7; {address.format('s')}"
        + "".join(f"st.shared.u32 [%w1+{at}], %w3;" for at in range(0, 1024, 128))
        + f"bar.sync 0; {address.format('own')} ld.shared.u32 %w2, [%w1]; {store('4', '%w2', 0)}",
        1, "".join(texts[name] for name in declared),
    )  # fmt: skip
    launched(program, out, shared_nbytes=1024)
    assert (out == LANES).all()


UNWRITTEN = "writes what comes from memory that nothing has written"

# What a thread does that it must not.
FAULTS = {
    "its own array": ("ld.local.u32 %w1, [l+16];", "outside of all arrays of the thread"),
    "constants": ("ld.const.u32 %w1, [%a0];", "outside of all constants"),
    "another space": ("ld.shared.u32 %w1, [%a0];", "outside of all shared arrays"),
    "a register": (f"add.u32 %w1, %w2, 1; {store('4', '%w1', 0)}", UNWRITTEN),
    "an address": ("ld.global.u32 %w1, [%q1];", "uses an address that nothing has written"),
    "a condition": ("@%p1 bra END; END:", "goes by a condition that nothing has written"),
    "a local array": (f"ld.local.u32 %w1, [l]; {store('4', '%w1', 0)}", UNWRITTEN),
    "a lane that has ended": (
        f"setp.eq.u32 %p1, %t, 1; @%p1 exit; shfl.sync.bfly.b32 %w1, %t, 1, 31, -1; {store('4', '%w1', 0)}",
        f"thread 0 .* {UNWRITTEN}",
    ),
    "a part of a warp": ("shfl.sync.bfly.b32 %w1, %t, 1, 31, 0xffff;", "names part of its warp"),
    "parted lanes": (
        "setp.eq.u32 %p1, %t, 1; @%p1 bra OTHER; shfl.sync.bfly.b32 %w1, %t, 1, 31, -1; bra END;"
        "OTHER: shfl.sync.bfly.b32 %w1, %t, 1, 31, -1; END:",
        "threads? 0 .*wait at different barriers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    body, why = FAULTS[fault]
    with pytest.raises(PtxError, match=why):
        run(body, np.zeros(256, np.int32), declarations=SPACES)


def test_what_the_machine_lacks_is_named() -> None:
    with pytest.raises(PtxError, match=r"lacks add\.f16x2, tanh\.approx\.f32$"):
        kernel("tanh.approx.f32 %w1, %w2; add.f16x2 %w1, %w2, %w3; add.f16x2 %w1, %w2, %w3;", 0)


def test_a_launch_must_be_the_kernels() -> None:
    program = kernel("", 1)
    for grid, block, nbytes, why in (
        ((1, 1, 1), (2048, 1, 1), 8, "up to 1024"),
        ((1, 1, 1), (32, 1, 1), 4, "takes 8 bytes"),
    ):
        with pytest.raises(PtxError, match=why):
            program.launch(grid, block, bytes(nbytes), [])


# -- lanes together ----------------------------------------------------------------------------------


def test_a_branch_by_a_table() -> None:
    """9.7.12.3."""
    out = np.zeros(32, np.int32)
    run(
        "mov.u32 %w1, 0; and.b32 %w2, %t, 3; TABLE: .branchtargets A, B, A, C; brx.idx %w2, TABLE;"
        f"A: add.u32 %w1, %w1, 1; B: add.u32 %w1, %w1, 10; C: add.u32 %w1, %w1, 100; {store('4', '%w1', 0)}",
        out,
    )
    assert out.tolist() == [111, 110, 111, 100] * 8


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    """9.7.9.6, as the manual's loop: segments, clamps; out of range a lane keeps its own, and p is false."""
    a, out, inside = values("u32", 3), np.zeros(32, np.uint32), np.zeros(32, "?")
    for c in (0x1F, 0, 0x181F, 0x1C07, 0x1003, 0x1F1F, 0x0F):
        for b in (0, 1, 3, 8, 17, 31, 33):
            run(
                f"{load('4', '%w1', 0)} shfl.sync.{mode}.b32 %w0|%p0, %w1, {b}, {c}, -1;"
                f"{store('4', '%w0', 1)}{store('p', '%p0', 2)}",
                a, out, inside,
            )  # fmt: skip
            mask, clamp, step = c >> 8 & 31, c & 31, b & 31
            for lane in range(32):
                first, last = lane & mask, (lane & mask) | (clamp & ~mask)
                j = {
                    "up": lane - step,
                    "down": lane + step,
                    "bfly": lane ^ step,
                    "idx": first | (step & ~mask),
                }[mode]
                p = j >= last if mode == "up" else j <= last
                assert (inside[lane], out[lane]) == (p, a[j if p else lane]), (b, c, lane)


MATRICES = {
    "m16n8k8.row.col.f32.f16.f16.f32": (8, "f2", "f2"),
    "m16n8k16.row.col.f32.f16.f16.f32": (16, "f2", "f2"),
    "m16n8k16.row.col.f32.bf16.bf16.f32": (16, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (8, "f4", "f4"),
    **{
        f"m16n8k{k}.row.col.s32.{kind[0].replace('i', 's')}8.s8.s32": (k, kind, "i1")
        for k in (16, 32)
        for kind in ("i1", "u1")
    },
}
"""Shapes of products with the extent of k, and the types of both sources."""


@pytest.mark.parametrize("shape", MATRICES)
def test_products_of_matrices(shape: str) -> None:
    """9.7.14.5: fragments by the manual's formulas, groupID = lane >> 2, threadID = lane % 4.

    A register has the elements of neighbouring k that fit: the next one of a has rows 8 further, the one
    after that, as the next one of b, the elements that follow those of all four threads.
    """
    k, *kinds = MATRICES[shape]
    n, is_whole = 4 // np.dtype(kinds[0]).itemsize, kinds[1] == "i1"
    rng, kind = np.random.default_rng(k), "i4" if is_whole else "f4"

    def matrix(rows: int, columns: int, of: str) -> Any:
        if is_whole:
            ends = np.iinfo(of) if of != "i4" else np.iinfo("i2")
            return rng.integers(ends.min, ends.max + 1, (rows, columns)).astype(of)
        return rng.standard_normal((rows, columns)).astype(of)

    a, b, c = matrix(16, k, kinds[0]), matrix(k, 8, kinds[1]), matrix(16, 8, kind)
    group, thread, parts = LANES >> 2, LANES % 4, k // (4 * n)
    along = [n * thread[:, None] + np.arange(n) + 4 * n * j for j in range(parts)]
    of_a = [a[group[:, None] + 8 * half, along[j]] for j in range(parts) for half in range(2)]
    of_b = [b[along[j], group[:, None]] for j in range(parts)]
    of_c = [(group + (8 if i >= 2 else 0), 2 * thread + (i & 1)) for i in range(4)]
    words = [np.ascontiguousarray(part).view("u4")[:, 0].copy() for part in (*of_a, *of_b)]
    inputs, out = [*words, *(c[at].copy() for at in of_c)], np.zeros((4, 32), kind)
    ends = [0, 2 * parts, 3 * parts, len(inputs)]
    names = [[f"%w{j}" for j in range(*part)] for part in ((15, 19), *pairwise(ends))]
    lists = ["{" + ", ".join(part) + "}" for part in names]
    run(
        "".join(load("4", f"%w{i}", i + 4) for i in range(len(inputs)))
        + f"mma.sync.aligned.{shape} {', '.join(lists)};"
        + "".join(store("4", f"%w{15 + i}", i) for i in range(4)),
        *out, *inputs,
    )  # fmt: skip
    got = np.zeros((16, 8), kind)
    for at, values_ in zip(of_c, out, strict=True):
        got[at] = values_
    if is_whole:
        assert (got == a.astype("i4") @ b.astype("i4") + c).all()
        return
    if "tf32" in shape:  # 10 bits of the fraction count
        a, b = ((x.view("u4") & 0xFFFFE000).view("f4") for x in (a, b))
    np.testing.assert_allclose(got, a.astype("f4") @ b.astype("f4") + c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["", ".trans"])
def test_matrices_from_shared_memory(way: str) -> None:
    """9.7.14.5.15: lane 8i + j addresses row j of matrix i; a lane gets two of row lane/4, or that column."""
    source, out = np.arange(4 * 64, dtype=np.uint16), np.zeros((4, 32), np.uint32)
    run(
        f"{COPY} ld.global.v4.u32 {{%w4, %w5, %w6, %w7}}, [%q1];"
        "st.shared.v4.u32 [%w1], {%w4, %w5, %w6, %w7};"
        f"bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x4{way}.shared.b16 {{%w4, %w5, %w6, %w7}}, [%w1];"
        + "".join(store("4", f"%w{4 + i}", i + 1) for i in range(4)),
        source, *out, declarations=SPACES,
    )  # fmt: skip
    for found, matrix in zip(out, source.reshape(4, 8, 8), strict=True):
        rows = matrix.T.copy() if way else matrix
        assert (found == rows.view(np.uint32).ravel()).all()


OTHERS = {
    "cvt integer", *(f"mov.b{n} {way}" for n in (32, 64) for way in ("pack", "unpack")), "ld", "st",
    "mad.lo.cc.u32", "madc.hi.u32", "fence",
    "cp.async.cg.shared.global", "cp.async.commit_group", "cp.async.wait_group",
    "atom.global.cas.b32", "ld.param", "bra", "ret", "exit", "bar.sync", "bar.warp.sync",
    "griddepcontrol.launch_dependents", "griddepcontrol.wait",
    *(f"shfl.sync.{mode}.b32" for mode in ("up", "down", "bfly", "idx")),
    "vote.sync.any.pred", *(f"ldmatrix.sync.aligned.m8n8.x4{way}.shared.b16" for way in ("", ".trans")),
    *(f"mma.sync.aligned.{shape}" for shape in MATRICES),
}  # fmt: skip
"""Instructions of tests after `test_lane_by_lane`, of two other files, and of golden programs."""


def test_every_instruction_of_the_machine_has_a_test() -> None:
    assert set(machine().ops) == set(CASES) | OTHERS
