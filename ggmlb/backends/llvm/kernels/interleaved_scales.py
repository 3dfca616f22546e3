"""Scales of strips: for each group of a block, a vector with one number per row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.llvm.codegen.simd import from_half
from ggmlb.backends.llvm.codegen.value import I32
from ggmlb.backends.llvm.kernels.blocks import mxfp4_scale, q3_k_words, six_bit_words

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.value import Value
    from ggmlb.backends.llvm.kernels.interleaved import Interleaved

Ints = Callable[[int], "Value"]
"""Read those of a group."""


class Scales(NamedTuple):
    """Of a block of each row: what its codes are multiplied by, and what is then added.

    Attributes:
        d: Factor of the whole block.
        scales: Integers that it is multiplied by; `None` if it is the scale of the only group.
        m: Factor of the minimums, if there are any.
        minimums: Integers that it is multiplied by; `None` as above.
    """

    d: Value
    scales: Ints | None = None
    m: Value | None = None
    minimums: Ints | None = None

    def scale(self, group: int) -> Value:
        """The scale of a group."""
        return self.d if self.scales is None else self.scales(group).to_float() * self.d

    def minimum(self, group: int) -> Value | None:
        """The minimum of a group, if there are any."""
        if self.m is None or self.minimums is None:
            return self.m
        return self.minimums(group).to_float() * self.m


def _half(p: Interleaved) -> Value:
    return from_half(p.k, p.each())


def _words(field: Interleaved, n: int) -> list[Value]:
    return [(field + 4 * i).each() for i in range(n)]


def _byte(words: list[Value], i: int) -> Value:
    """A byte of 32-bit words, as an integer."""
    word = words[i // 4]
    return word >> 24 if i % 4 == 3 else (word >> 8 * (i % 4)) & 255


def _d(p: Interleaved) -> Scales:
    return Scales(_half(p["d"]))


def _dm(p: Interleaved) -> Scales:
    return Scales(_half(p["d"]), None, _half(p["m"]))


def _six_bit_pairs(p: Interleaved) -> Scales:
    scales, minimums = six_bit_words(_words(p["scales"], 3))
    return Scales(_half(p["d"]), partial(_byte, scales), -_half(p["dmin"]), partial(_byte, minimums))


def _q2_k(p: Interleaved) -> Scales:
    @cache
    def both(i: int) -> Value:
        return (p["scales"] + i).each().zext(I32)

    return Scales(_half(p["d"]), lambda i: both(i) & 15, -_half(p["dmin"]), lambda i: both(i) >> 4)


def _q3_k(p: Interleaved) -> Scales:
    words = q3_k_words(_words(p["scales"], 3))
    return Scales(_half(p["d"]), lambda i: _byte(words, i) - 32)


def _q6_k(p: Interleaved) -> Scales:
    return Scales(_half(p["d"]), lambda i: (p["scales"] + i).each().sext(I32))


def _iq4_xs(p: Interleaved) -> Scales:
    high, low = p["scales_h"].each().zext(I32), p["scales_l"].each()
    return Scales(_half(p["d"]), lambda i: (((low >> 4 * i) & 15) | (((high >> 2 * i) & 3) << 4)) - 32)


def _mxfp4(p: Interleaved) -> Scales:
    return Scales(mxfp4_scale(p.k, p["e"].each().zext(I32)))


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
"""Read the scales and minimums of a block of each row, by the type's name."""
