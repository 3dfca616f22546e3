"""Readers of IQ1, IQ2 and IQ3 blocks: quants are entries of a codebook (grid) of 4 or 8 bytes, with signs.

Codes (ggml's quants) are made unsigned by an offset. An element of IQ1 is a grid value plus or minus 1/8
(`IQ1S_DELTA`): its codes are in units of 1/8, as a table with both sums would not fit the L1 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ggmlb.backends.llvm.codegen.emit import I1, I8, I16, I32, I64, Emitter, Value, vec
from ggmlb.backends.llvm.codegen.simd import from_half
from ggmlb.core.dtypes import DType
from ggmlb.core.quants.grids import grid

Fields = dict[str, int]
"""Offset of each field in a block [bytes]."""

Read = Callable[[Fields, Emitter, Value], Value]
"""Reads values of a block: `read(fields, kernel, address)`."""

Number = Callable[[int], Value]
"""Returns the number of an entry among those of two runs; `first` is the first of these in the block."""


class GridFormat(NamedTuple):
    """How the blocks of a type with a grid are read.

    Attributes:
        group: Elements that share a scale.
        most: Largest magnitude of `code - offset`.
        entry: Bytes of an entry.
        numbers: Reads numbers of entries: `numbers(fields, kernel, address, first)`.
        signs: Reads the sign bits of all elements, in 32-bit words.
        scales: Reads the scales, a float per group.
        adds: Whether signs are of ones that are added to an entry's elements; else of the elements.
    """

    group: int
    most: int
    entry: int
    numbers: Callable[[Fields, Emitter, Value, int], Number]
    signs: Read
    scales: Read
    adds: bool = False

    @property
    def offset(self) -> int:
        """Number added to the signed codes so that they are unsigned: at least the largest magnitude."""
        return 16 if self.most < 16 else 64

    def codes(self, name: str, k: Emitter, p: Value) -> list[Value]:
        """Return the codes of a block: a `<32 x i8>` per run."""
        pairs = [self._vectors(name, k, p, i, [(0, 1), (2, 3)]) for i in range(4)]
        return [run for pair in pairs for run in pair]

    def pair(self, name: str, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
        """Return the codes of two runs; see `BlockFormat.pair`."""
        return self._vectors(name, k, blocks[0], i, [(0, 1, 2, 3)] if n == 64 else [(0, 2), (1, 3)])

    def _vectors(self, name: str, k: Emitter, p: Value, i: int, of: Sequence[Sequence[int]]) -> list[Value]:
        """Return vectors of halves of runs (16 codes), by their numbers in pair number `i` of runs."""
        at, table = DType.parse(name).codec.offsets, _table(k, name, self.offset)
        word, each = I64 if self.entry == 8 else I32, 16 // self.entry
        number = self.numbers(at, k, p, 4 * each * i)
        signs = self.signs(at, k, p)
        vectors = []
        for halves in of:
            found = k.const(vec(word, each * len(halves)), 0)
            for lane, entry in enumerate([each * half + j for half in halves for j in range(each)]):
                found = found.put(lane, k.load(word, table + number(entry) * self.entry))
            codes = found.bits(vec(I8, 16 * len(halves)))
            is_positive = _clear(k, signs, [4 * i + half for half in halves])
            if self.adds:
                codes = codes + k.select(is_positive, k.const(codes.type, 1), -1)
            else:
                codes = k.select(is_positive, codes, k.const(codes.type, 2 * self.offset) - codes)
            vectors.append(codes)
        return vectors


def _clear(k: Emitter, words: Value, halves: Sequence[int]) -> Value:
    """A mask of the elements of halves of runs whose bit is not set."""
    n = 16 * len(halves)
    if k.level.lanes == 16:
        return (words ^ -1).bits(vec(I16, 16)).shuffle(halves).bits(vec(I1, n))
    bytes_ = words.bits(vec(I8, 32)).shuffle([2 * half + j // 8 for half in halves for j in range(16)])
    return (bytes_ & k.table(bytes_.type, [1 << j % 8 for j in range(n)])).equals(0)


def _table(k: Emitter, name: str, offset: int) -> Value:
    """The address of the type's grid, with the offset of its codes; of IQ1, in units of 1/8."""
    is_iq1 = name.startswith("iq1")
    items = grid("IQ1_S" if is_iq1 else name.upper())
    codes = items.view(np.int8) * np.int8(8 if is_iq1 else 1) + np.int8(offset)
    signed = codes.view(np.dtype(f"i{items.itemsize}"))
    return k.constants("grid_" + name, signed.tolist(), I64 if items.itemsize == 8 else I32)


# -- numbers of entries ----------------------------------------------------------------------------


def _bytes(at: Fields, k: Emitter, p: Value, first: int) -> Number:
    return lambda i: k.load(I8, p + (at["qs"] + first + i)).zext(I64)


def _iq2_xxs_bytes(at: Fields, k: Emitter, p: Value, first: int) -> Number:
    """Four bytes of each eight."""
    return lambda i: k.load(I8, p + (at["qs"] + 2 * first + i // 4 * 8 + i % 4)).zext(I64)


def _nines(at: Fields, k: Emitter, p: Value, first: int) -> Number:
    """The lowest nine bits of 16."""
    return lambda i: k.load(I16, p + (at["qs"] + 2 * (first + i))).zext(I64) & 511


def _with_high(n_bits: int, at: Fields, k: Emitter, p: Value, first: int) -> Number:
    """A byte, and above it `n_bits` of another that several numbers share; of four, the last is a sign."""
    shared, low = 8 // n_bits, _bytes(at, k, p, first)

    def number(i: int) -> Value:
        part, j = divmod(first + i, shared)
        high = k.load(I8, p + (at["qh"] + part)).zext(I64) << (8 - n_bits * j)
        return low(i) | (high & (256 << min(n_bits, 3)) - 256)

    return number


def _iq1_s_numbers(at: Fields, k: Emitter, p: Value, first: int) -> Number:
    """A byte, and above it three bits of a word that four numbers share."""
    low = _bytes(at, k, p, first)

    def number(i: int) -> Value:
        word = k.load(I16, p + (at["qh"] + (first + i) // 4 * 2)).zext(I64)
        j = 8 - 3 * (i % 4)
        return low(i) | ((word << j if j > 0 else word >> -j) & 0x700)

    return number


# -- signs -----------------------------------------------------------------------------------------


def _with_even(signs: Value) -> Value:
    """Set the highest bit of each byte so that the number of its bits is even."""
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    return signs | (((odd ^ (odd >> 1)) & 0x01010101) << 7)


def _sevens(read: Read, at: Fields, k: Emitter, p: Value) -> Value:
    """Spread the lowest 28 bits of each word to seven bits of each of its bytes."""
    words = read(at, k, p)
    spread = [(words << i) & (0x7F << 8 * i) for i in range(4)]
    return _with_even((spread[0] | spread[1]) | (spread[2] | spread[3]))


def _odd_words(at: Fields, k: Emitter, p: Value) -> Value:
    return k.load(vec(I32, 16), p + at["qs"]).shuffle(range(1, 16, 2))


def _words(name: str, at: Fields, k: Emitter, p: Value) -> Value:
    return k.load(vec(I32, 8), p + at[name])


def _iq2_xs_signs(at: Fields, k: Emitter, p: Value) -> Value:
    return _with_even((k.load(vec(I16, 32), p + at["qs"]) >> 9).trunc(I8).bits(vec(I32, 8)))


def _iq1_s_signs(at: Fields, k: Emitter, p: Value) -> Value:
    """The highest bit of a word, for the run."""
    words = k.load(vec(I16, 8), p + at["qh"])
    return k.select(words < 0, k.const(vec(I32, 8), -1), 0)


def _iq1_m_signs(at: Fields, k: Emitter, p: Value) -> Value:
    """The highest bit of each nibble, for eight elements."""
    both, ones = k.load(vec(I8, 16), p + at["qh"]), k.const(vec(I8, 16), -1)
    low, high = k.select((both & 8) > 0, ones, 0), k.select(both < 0, ones, 0)
    return low.shuffle([i // 2 + i % 2 * 16 for i in range(32)], high).bits(vec(I32, 8))


# -- scales ----------------------------------------------------------------------------------------


def _scaled(codes: Value, d: Value, factor: float) -> Value:
    """`d factor (code + 1/2)`."""
    return (codes.to_float() + 0.5) * (d * factor).splat(codes.type.count)


def _d(at: Fields, k: Emitter, p: Value) -> Value:
    return from_half(k, k.load(I16, p + at["d"]))


def _top_scales(read: Read, factor: float, at: Fields, k: Emitter, p: Value) -> Value:
    """Four bits above the signs of each run."""
    return _scaled(read(at, k, p) >> 28, _d(at, k, p), factor)


def _nibble_scales(n: int, factor: float, at: Fields, k: Emitter, p: Value) -> Value:
    """Nibbles, the lower one of a byte first."""
    both = k.load(vec(I8, n // 2), p + at["scales"])
    order = [i // 2 + i % 2 * (n // 2) for i in range(n)]
    codes = (both & 15).shuffle(order, both >> 4).zext(I32)
    return _scaled(codes, _d(at, k, p), factor)


def _iq1_s_scales(at: Fields, k: Emitter, p: Value) -> Value:
    codes = (k.load(vec(I16, 8), p + at["qh"]) >> 12) & 7
    return _scaled(codes.zext(I32), _d(at, k, p), 0.25)


def _iq1_m_scales(at: Fields, k: Emitter, p: Value) -> Value:
    """Four scales of three bits in each of four words, whose highest digits are the block's scale."""
    words = k.load(vec(I16, 4), p + at["scales"])
    digits = [words[i] & -4096 for i in range(4)]
    d = digits[3] | (digits[2] >> 4) | (digits[1] >> 8) | (digits[0] >> 12)
    sixteen = words.zext(I32).shuffle([i // 4 for i in range(16)])
    codes = (sixteen >> k.table(vec(I32, 16), [3 * (i % 4) for i in range(16)])) & 7
    return _scaled(codes, from_half(k, d), 0.25)


_SIGNS = partial(_words, "signs")

GRIDS: dict[str, GridFormat] = {
    "iq2_xxs": GridFormat(
        32, 43, 8, _iq2_xxs_bytes, partial(_sevens, _odd_words), partial(_top_scales, _odd_words, 0.25)
    ),
    "iq2_xs": GridFormat(16, 43, 8, _nines, _iq2_xs_signs, partial(_nibble_scales, 16, 0.25)),
    "iq2_s": GridFormat(16, 43, 8, partial(_with_high, 2), _SIGNS, partial(_nibble_scales, 16, 0.25)),
    "iq3_xxs": GridFormat(32, 62, 4, _bytes, partial(_sevens, _SIGNS), partial(_top_scales, _SIGNS, 0.5)),
    "iq3_s": GridFormat(32, 15, 4, partial(_with_high, 1), _SIGNS, partial(_nibble_scales, 8, 2.0)),
    "iq1_s": GridFormat(32, 9, 8, _iq1_s_numbers, _iq1_s_signs, _iq1_s_scales, adds=True),
    "iq1_m": GridFormat(16, 9, 8, partial(_with_high, 4), _iq1_m_signs, _iq1_m_scales, adds=True),
}
"""The formats by the type's name."""
