"""Block writers: a vector of 32 floats becomes a block of a type.

Rounding equals ggml's reference (quantize_row_*_ref), which writes caches. As there, comparisons ignore
NaN, and a value without a code gets code 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import fold, greatest, look_up, to_half
from ggmlb.backends.llvm.codegen.value import F32, I1, I8, I32, Value, vec
from ggmlb.backends.llvm.kernels.blocks import IQ4, Fields
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter


MOST_FLOAT = 3.4028234663852886e38
"""The largest number in float32."""


def _inverse(k: Emitter, d: Value) -> Value:
    """Return `1 / d` in each lane; 0 where `d` is 0."""
    return k.select(d.equals(0.0), k.const(F32, 0), 1.0 / d).splat(32)


def _magnitude(k: Emitter, x: Value) -> Value:
    """Return the largest absolute value, ignoring NaN."""
    return greatest(k, k.maximum(k.generic("fabs", x), 0.0))


def _largest(k: Emitter, x: Value) -> Value:
    """The value that is farthest from 0, the first of equals; 0 if there is none."""
    magnitude = _magnitude(k, x)
    return k.select(magnitude > 0.0, _first(k, x, k.generic("fabs", x).equals(magnitude.splat(32))), 0.0)


def _first(k: Emitter, x: Value, mask: Value) -> Value:
    """The first lane that a mask has; any if it has none."""
    return x[k.call("llvm.cttz.i32", I32, mask.bits(I32), k.const(I1, 0)) & 31]


def _codes(k: Emitter, x: Value, most: int) -> Value:
    """The integers in `x`, at most `most`; 0 where no code stands for a value, as for NaN."""
    is_code = (x > -1.0) & (x < 256.0)
    return k.minimum(k.select(is_code, x, 0.0).to_int(), most).trunc(I8)


def _total_in_order(x: Value) -> Value:
    """The sum of the lanes, one after another."""
    total = x[0]
    for lane in range(1, 32):
        total = total + x[lane]
    return total


def _put_codes(at: Fields, k: Emitter, codes: Value, p: Value) -> None:
    """Store codes of four bits, or of five."""
    if "qh" in at:
        k.store(((codes & 16) > 0).bits(I32), p + at["qh"])
    low, high = (codes & 15).split()
    k.store(low | (high << 4), p + at["qs"])


def _q8_0(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    d = _magnitude(k, x) / 127.0
    k.store(to_half(k, d), p + at["d"])
    codes = k.generic("round", x * _inverse(k, d))
    is_code = k.generic("fabs", codes) < 129.0
    k.store(k.select(is_code, codes, 0.0).to_int().trunc(I8), p + at["qs"])


def _symmetric(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    """q4_0 and q5_0, with a fifth bit: the value that is farthest from 0 has the lowest code."""
    half = 16 if "qh" in at else 8
    d = _largest(k, x) / float(-half)
    codes = _codes(k, x.times(_inverse(k, d)) + (half + 0.5), 2 * half - 1)
    k.store(to_half(k, d), p + at["d"])
    _put_codes(at, k, codes, p)


def _from_least(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    """q4_1 and q5_1: codes count from the least value on."""
    most, end = 31 if "qh" in at else 15, k.const(x.type, MOST_FLOAT)
    least = fold(k, k.select(x < end, x, end), k.minimum)
    least = k.select(least.equals(0.0), _first(k, x, x.equals(0.0)), least)
    d = (greatest(k, k.select(x > -end, x, -end)) - least) / float(most) + 0.0  # of zeros +0
    codes = _codes(k, (x - least.splat(32)).times(_inverse(k, d)) + 0.5, most)
    k.store(to_half(k, d), p + at["d"])
    k.store(to_half(k, least), p + at["m"])
    _put_codes(at, k, codes, p)


def _iq4_nl(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    """Each value gets the nearest level; then the scale that fits best, large values counting more."""
    largest = _largest(k, x)
    d = largest / float(IQ4[0])
    scaled = x * _inverse(k, d)
    codes = k.const(vec(I32, 32), 15)
    for low, high in pairwise(IQ4):
        codes = codes - (scaled < (low + high) / 2).zext(I32)  # NaN gets the last code, as in ggml
    codes = codes.trunc(I8)
    levels = look_up(k, IQ4, codes).sext(I32).to_float()
    weighed = x.times(x).times(levels)
    squares = _total_in_order(weighed.times(levels))
    fitting = k.select(squares > 0.0, _total_in_order(weighed.times(x)) / squares, 0.0)
    k.store(to_half(k, k.select(k.generic("fabs", largest) < 1e-15, k.const(F32, 0), fitting)), p + at["d"])
    _put_codes(at, k, codes, p)


WRITERS: dict[str, Callable[[Emitter, Value, Value], None]] = {
    name: partial(write, DType.parse(name).codec.offsets)
    for name, write in (
        ("q4_0", _symmetric), ("q4_1", _from_least), ("q5_0", _symmetric), ("q5_1", _from_least),
        ("q8_0", _q8_0), ("iq4_nl", _iq4_nl),
    )
}  # fmt: skip
"""By the type's name: write a block of 32 floats at an address."""
