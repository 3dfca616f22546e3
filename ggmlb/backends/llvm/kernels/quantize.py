"""Writing blocks: 32 floats, in a vector, become a block of a type.

Each type rounds as ggml's reference does (quantize_row_*_ref), which is what caches are written with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import fold, greatest, look_up, to_half, total
from ggmlb.backends.llvm.codegen.value import F32, I8, I32, Value, vec
from ggmlb.backends.llvm.kernels.blocks import IQ4

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel


def _inverse(k: Kernel, d: Value) -> Value:
    """`1 / d` in each lane; 0 of 0."""
    return k.select(d.equals(0.0), k.const(F32, 0), 1.0 / d).splat(32)


def _largest(k: Kernel, x: Value) -> Value:
    """The value that is farthest from 0."""

    def larger(a: Value, b: Value) -> Value:
        return k.select(k.generic("fabs", b) > k.generic("fabs", a), b, a)

    return fold(k, x, larger)


def _put_nibbles(k: Kernel, codes: Value, at: Value) -> None:
    low, high = (codes & 15).split()
    k.store(low | (high << 4), at)


def _put_fifth(k: Kernel, codes: Value, at: Value) -> None:
    k.store(((codes & 16) > 0).bits(I32), at)


def _q8_0(k: Kernel, x: Value, at: Value) -> None:
    d = greatest(k, k.generic("fabs", x)) / 127.0
    k.store(to_half(k, d), at)
    k.store(k.generic("round", x * _inverse(k, d)).to_int().trunc(I8), at + 2)


def _symmetric(bits: int, k: Kernel, x: Value, at: Value) -> None:
    """q4_0 and q5_0: the value that is farthest from 0 has the lowest code."""
    half = 1 << (bits - 1)
    d = _largest(k, x) / float(-half)
    codes = k.minimum(x * _inverse(k, d) + (half + 0.5), float(2 * half - 1)).to_int().trunc(I8)
    k.store(to_half(k, d), at)
    if bits == 5:
        _put_fifth(k, codes, at + 2)
    _put_nibbles(k, codes, at + (6 if bits == 5 else 2))


def _from_least(bits: int, k: Kernel, x: Value, at: Value) -> None:
    """q4_1 and q5_1: codes count from the least value on."""
    most = float((1 << bits) - 1)
    least = fold(k, x, k.minimum)
    d = (greatest(k, x) - least) / most
    codes = k.minimum((x - least.splat(32)) * _inverse(k, d) + 0.5, most).to_int().trunc(I8)
    k.store(to_half(k, d), at)
    k.store(to_half(k, least), at + 2)
    if bits == 5:
        _put_fifth(k, codes, at + 4)
    _put_nibbles(k, codes, at + (8 if bits == 5 else 4))


def _iq4_nl(k: Kernel, x: Value, at: Value) -> None:
    """Each value gets the nearest level; then the scale that fits best, large values counting more."""
    d = _largest(k, x) / float(IQ4[0])
    scaled = x * _inverse(k, d)
    codes = k.const(vec(I32, 32), 0)
    for low, high in pairwise(IQ4):
        codes = codes + (scaled >= (low + high) / 2).zext(I32)
    codes = codes.trunc(I8)
    levels = look_up(k, IQ4, codes).sext(I32).to_float()
    weighed = x * x * levels
    squares = total(k, weighed * levels)
    fitting = k.select(squares > 0.0, total(k, weighed * x) / squares, 0.0)
    k.store(to_half(k, fitting), at)
    _put_nibbles(k, codes, at + 2)


WRITERS: dict[str, Callable[[Kernel, Value, Value], None]] = {
    "q4_0": partial(_symmetric, 4),
    "q4_1": partial(_from_least, 4),
    "q5_0": partial(_symmetric, 5),
    "q5_1": partial(_from_least, 5),
    "q8_0": _q8_0,
    "iq4_nl": _iq4_nl,
}
"""By the type's name: write a block of 32 floats at an address."""
