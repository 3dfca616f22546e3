"""Scales of strips: for each group of a block, a vector with one scale per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import from_half
from ggmlb.backends.llvm.codegen.value import I32
from ggmlb.backends.llvm.kernels.blocks import mxfp4_scale, q3_k_words, six_bit_words

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.value import Value
    from ggmlb.backends.llvm.kernels.interleaved import Interleaved

Scales = tuple["list[Value]", "list[Value] | None"]


def _half(p: Interleaved) -> Value:
    return from_half(p.k, p.each())


def _words(field: Interleaved, n: int) -> list[Value]:
    return [(field + 4 * i).each() for i in range(n)]


def _bytes(words: list[Value]) -> list[Value]:
    """The bytes of 32-bit words, as integers."""
    return [word >> 24 if i == 3 else (word >> 8 * i) & 255 for word in words for i in range(4)]


def _d(p: Interleaved) -> Scales:
    return [_half(p["d"])], None


def _dm(p: Interleaved) -> Scales:
    return [_half(p["d"])], [_half(p["m"])]


def _six_bit_pairs(p: Interleaved) -> Scales:
    scales, minimums = six_bit_words(_words(p["scales"], 3))
    d, less = _half(p["d"]), -_half(p["dmin"])
    return [b.to_float() * d for b in _bytes(scales)], [b.to_float() * less for b in _bytes(minimums)]


def _q2_k(p: Interleaved) -> Scales:
    d, less = _half(p["d"]), -_half(p["dmin"])
    packed = [(p["scales"] + i).each().zext(I32) for i in range(16)]
    return [(x & 15).to_float() * d for x in packed], [(x >> 4).to_float() * less for x in packed]


def _q3_k(p: Interleaved) -> Scales:
    words, d = q3_k_words(_words(p["scales"], 3)), _half(p["d"])
    return [(x - 32).to_float() * d for x in _bytes(words)], None


def _q6_k(p: Interleaved) -> Scales:
    d = _half(p["d"])
    return [(p["scales"] + i).each().sext(I32).to_float() * d for i in range(16)], None


def _iq4_xs(p: Interleaved) -> Scales:
    d, high, low = _half(p["d"]), p["scales_h"].each().zext(I32), p["scales_l"].each()
    found = []
    for i in range(8):
        code = ((low >> 4 * i) & 15) | (((high >> 2 * i) & 3) << 4)
        found.append((code - 32).to_float() * d)
    return found, None


def _mxfp4(p: Interleaved) -> Scales:
    return [mxfp4_scale(p.k, p["e"].each().zext(I32))], None


SCALES: dict[str, Callable[[Interleaved], Scales]] = {
    "q4_0": _d,
    "q4_1": _dm,
    "q5_0": _d,
    "q5_1": _dm,
    "q8_0": _d,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _six_bit_pairs,
    "q5_k": _six_bit_pairs,
    "q6_k": _q6_k,
    "iq4_nl": _d,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}
"""Read the scales, and the minimums or `None`, of a block of each row, by the type's name."""
