"""Readers of quantised blocks: codes (ggml's quants) as byte vectors, scales as float vectors.

A `BlockFormat` reads a block in ggml's layout; `SCALES` and the same readers of codes read blocks in strips
(`interleaved`). An element is `scale (code - offset)`, or `scale code + minimum` where the type has minimums.
Codes are read in *runs* of 32 elements; scales and minimums belong to *groups* of 16 or 32 (the sub-blocks of
k-quants).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from ggmlb.backends.llvm.codegen.emit import F32, I1, I8, I16, I32, I64, Emitter, Value, like, vec
from ggmlb.backends.llvm.codegen.simd import from_half, look_up
from ggmlb.backends.llvm.kernels.grid_blocks import GRIDS, GridFormat
from ggmlb.backends.llvm.kernels.interleaved import Interleaved, Words
from ggmlb.core.dtypes import DType

_B32 = vec(I8, 32)

Pair = Callable[["Emitter", Sequence[Value], int, int], list[Value]]

Fields = dict[str, int]
"""Offset of each field in a block [bytes]."""


class IntScales(NamedTuple):
    """The 16-bit integer scales and minimums of a block of 16 groups, with their float factors.

    Attributes:
        d: Factor of the scales.
        scales: The scales.
        m: Factor of the minimums, if the type has them.
        minimums: The minimums.
    """

    d: Value
    scales: Value
    m: Value | None = None
    minimums: Value | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The block format of a type, with functions that read its codes and scales.

    Attributes:
        block: Elements of a block.
        nbytes: Size of a block [bytes].
        group: Elements that share a scale.
        offset: Offset of the codes; `None` if they are signed; 0 if the type has minimums.
        most: Largest magnitude of `code - offset`.
        has_min: Whether the type has minimums.
        codes: Reads the codes of the block at an address: a `<32 x i8>` per run; of an `Interleaved`: a
            `Words` per run.
        scales: Reads the scales, and minimums or `None`, of the blocks at some addresses: vectors with a
            float per group.
        pair: Reads the codes of two runs, from the addresses of blocks, the pair's number, and the bytes of a
            vector: one vector of 64, a run in each half; or two of 32, half of a run in each half.
        whole: Reads the scales and minimums of a block with groups of 16 as integers.
        wide: Whether activations have the wide layout; see `activations`.
        together: Number of runs that share bytes of the block.
    """

    block: int
    nbytes: int
    group: int
    offset: int | None
    most: int
    has_min: bool
    codes: Callable[[Emitter, Any], list[Any]]
    scales: Callable[[Emitter, Sequence[Value]], tuple[Value, Value | None]]
    pair: Pair
    whole: Callable[[Emitter, Value], IntScales] | None = None
    wide: bool = False
    together: int = 1


def _half(k: Emitter, address: Value) -> Value:
    return from_half(k, k.load(I16, address))


def _each(k: Emitter, element: Any, blocks: Sequence[Value], at: int) -> Value:
    """Load a field of each block; return a vector."""
    found = k.const(vec(element, len(blocks)), 0)
    for i, p in enumerate(blocks):
        found = found.put(i, k.load(element, p + at))
    return found


def _bytes(k: Emitter, address: Any, n: int = 32) -> Any:
    """Load bytes of a block, or of each row of a strip."""
    return address.bytes(n) if isinstance(address, Interleaved) else k.load(vec(I8, n), address)


def _levels(k: Emitter, table: Sequence[int], q: Any) -> Any:
    """Map codes to the values of a table."""
    return q.map(partial(look_up, k, table)) if isinstance(q, Words) else look_up(k, table, q)


def _nibbles(k: Emitter, address: Any) -> Any:
    """Codes of 16 bytes: the low nibbles, then the high ones."""
    q = _bytes(k, address, 16)
    return (q & 15).join(q >> 4)


def _fifth(k: Emitter, address: Any) -> Any:
    """The fifth bits of 32 codes, as 16 or 0."""
    if isinstance(address, Interleaved):
        return address.bits(16)
    bits = k.load(I32, address).bits(vec(I1, 32))
    return k.select(bits, k.const(_B32, 16), 0)


def _few_bits(at: Fields, k: Emitter, p: Any) -> list[Any]:
    """Codes of four or five bits."""
    q = _nibbles(k, p + at["qs"])
    return [q | _fifth(k, p + at["qh"]) if "qh" in at else q]


def _eight_bits(at: Fields, k: Emitter, p: Any) -> list[Any]:
    return [_bytes(k, p + at["qs"])]


def _d(at: Fields, k: Emitter, blocks: Sequence[Value]) -> tuple[Value, None]:
    return from_half(k, _each(k, I16, blocks, at["d"])), None


def _dm(at: Fields, k: Emitter, blocks: Sequence[Value]) -> tuple[Value, Value]:
    d, m = (from_half(k, _each(k, I16, blocks, at[name])) for name in "dm")
    return d, m


# -- pairs of runs ----------------------------------------------------------------------------------


def _shifted(k: Emitter, both: Value, shifts: tuple[int, int], mask: int) -> Value:
    """Shift the bytes of each half of a vector right (negative: left) by its own number, and mask them."""
    n = both.type.count
    if any(shifts):
        words = both.bits(vec(I32, n // 4))
        steps = k.table(words.type, [abs(shifts[0])] * (n // 8) + [abs(shifts[1])] * (n // 8))
        both = (words >> steps if max(shifts) > 0 else words << steps).bits(both.type)
    return both & mask


def _twice(k: Emitter, address: Value, n: int) -> Value:
    """`n / 2` bytes, and the same again."""
    x = k.load(vec(I8, n // 2), address)
    return x.join(x)


def _both(k: Emitter, a: Value, b: Value, n: int) -> Value:
    """`n / 2` bytes from one address on, and from another."""
    return k.load(vec(I8, n // 2), a).join(k.load(vec(I8, n // 2), b))


def _vector_parts(n: int) -> range:
    """Offsets in a run of the parts that vectors of `n` bytes have."""
    return range(0, 32, n // 2)


def _nibble_pair(k: Emitter, a: Value, b: Value, n: int) -> list[Value]:
    """The codes of two runs whose first halves are the low four bits of 16 bytes, and the others the high."""
    q = _both(k, a, b, 32)
    if n == 32:
        return [q & 15, (q >> 4) & 15]
    words = q.shuffle([*range(16), *range(16), *range(16, 32), *range(16, 32)]).bits(vec(I32, 16))
    return [(words >> k.table(words.type, ([0] * 4 + [4] * 4) * 2)).bits(vec(I8, 64)) & 15]


def _few_bits_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    a, b = (p + at["qs"] for p in blocks[2 * i : 2 * i + 2])
    found = _nibble_pair(k, a, b, n)
    if "qh" not in at:
        return found
    low, high = (k.load(I32, p + at["qh"]) for p in blocks[2 * i : 2 * i + 2])
    if n == 32:
        bits = [(low & 0xFFFF) | (high << 16), (low >> 16) | (high & -0x10000)]
    else:
        bits = [low.zext(I64) | (high.zext(I64) << 32)]
    fifth = [k.select(of.bits(vec(I1, n)), k.const(vec(I8, n), 16), 0) for of in bits]
    return [q | bit for q, bit in zip(found, fifth, strict=True)]


def _eight_bits_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    a, b = (p + at["qs"] for p in blocks[2 * i : 2 * i + 2])
    return [_both(k, a + h, b + h, n) for h in _vector_parts(n)]


def _uneven_pair(
    table: Sequence[int], at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int
) -> list[Value]:
    a, b = (p + at["qs"] for p in blocks[2 * i : 2 * i + 2])
    return [look_up(k, table, q) for q in _nibble_pair(k, a, b, n)]


# -- two halves of 16-bit factors and 6-bit scales: q4_K and q5_K -----------------------------------


def _floats(k: Emitter, bytes_: Value, factor: Value) -> Value:
    """Unsigned bytes times a factor, as float32."""
    return bytes_.zext(I32).to_float() * factor.splat(bytes_.type.count)


def six_bit_words(w: list[Value]) -> tuple[list[Value], list[Value]]:
    """Unpack the 6-bit scales and minimums of q4_K and q5_K from 12 bytes, three 32-bit words, to bytes."""
    low = [word & 0x3F3F3F3F for word in w[:2]]
    high = [((w[2] >> 4 * i) & 0x0F0F0F0F) | ((word >> 2) & 0x30303030) for i, word in enumerate(w[:2])]
    return [low[0], high[0]], [low[1], high[1]]


def _six_bit_pairs(at: Fields, k: Emitter, blocks: Sequence[Value]) -> tuple[Value, Value]:
    """Read scales and minimums as `six_bit_words` does, but in one vector."""
    (p,), four = blocks, vec(I32, 4)
    words, masks = k.load(four, p + (at["scales"] - 4)), k.table(four, [0x3F3F3F3F, 0x30303030] * 2)
    low = (words.shuffle([1, 1, 2, 2]) >> k.table(four, [0, 2, 0, 2])) & masks
    high = (words.shuffle([3, 3, 3, 3]) >> k.table(four, [0, 0, 0, 4])) & k.table(four, [0, 0x0F0F0F0F] * 2)
    scales, minimums = (low | high).bits(vec(I8, 16)).split()
    return _floats(k, scales, _half(k, p + at["d"])), _floats(k, minimums, -_half(k, p + at["dmin"]))


def _q4_k(at: Fields, k: Emitter, p: Any) -> list[Any]:
    runs = []
    for i in range(4):
        q = _bytes(k, p + at["qs"] + 32 * i)
        runs += [q & 15, q >> 4]
    return runs


def _q4_k_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    p = blocks[0] + (at["qs"] + 32 * i)
    return [_shifted(k, _twice(k, p + h, n), (0, 4), 15) for h in _vector_parts(n)]


def _q5_k_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    high = [_twice(k, blocks[0] + at["qh"] + h, n) for h in _vector_parts(n)]
    low = _q4_k_pair(at, k, blocks, i, n)
    return [q | _shifted(k, bits, (2 * i - 4, 2 * i - 3), 16) for q, bits in zip(low, high, strict=True)]


def _q5_k(at: Fields, k: Emitter, p: Any) -> list[Any]:
    runs, high = [], _bytes(k, p + at["qh"])
    for i in range(8):
        q = _bytes(k, p + at["qs"] + 32 * (i // 2))
        q = q >> 4 if i % 2 else q & 15
        bit = (high << (4 - i)) if i < 4 else (high >> (i - 4))
        runs.append(q | (bit & 16))
    return runs


# -- groups of 16: q2_K, q3_K, q6_K -----------------------------------------------------------------


def _from_ints(whole: Any, at: Fields, k: Emitter, blocks: Sequence[Value]) -> tuple[Value, Value | None]:
    d, scales, m, minimums = whole(at, k, blocks[0])
    found = scales.to_float() * d.splat(16)
    return found, None if m is None else minimums.to_float() * m.splat(16)


def _q2_k(at: Fields, k: Emitter, p: Any) -> list[Any]:
    halves = [_bytes(k, p + at["qs"] + 32 * i) for i in range(2)]
    return [(q >> 2 * j) & 3 for q in halves for j in range(4)]


def _q2_k_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    p, first = blocks[0] + (at["qs"] + 32 * (i // 2)), 4 * (i % 2)
    return [_shifted(k, _twice(k, p + h, n), (first, first + 2), 3) for h in _vector_parts(n)]


def _q2_k_ints(at: Fields, k: Emitter, p: Value) -> IntScales:
    both = _bytes(k, p + at["scales"], 16)
    return IntScales(
        _half(k, p + at["d"]), (both & 15).zext(I16), -_half(k, p + at["dmin"]), (both >> 4).zext(I16)
    )


def _q3_k(at: Fields, k: Emitter, p: Any) -> list[Any]:
    high, halves = _bytes(k, p + at["hmask"]), [_bytes(k, p + at["qs"] + 32 * i) for i in range(2)]
    runs = []
    for i in range(8):
        bit = high << (2 - i) if i < 2 else high >> (i - 2)
        runs.append(((halves[i // 4] >> 2 * (i % 4)) & 3) | (bit & 4))
    return runs


def _q3_k_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    high = [_twice(k, blocks[0] + at["hmask"] + h, n) for h in _vector_parts(n)]
    low = _q2_k_pair(at, k, blocks, i, n)
    return [q | _shifted(k, bits, (2 * i - 2, 2 * i - 1), 4) for q, bits in zip(low, high, strict=True)]


def q3_k_words(w: list[Value]) -> list[Value]:
    """Unpack the 6-bit scales of q3_K, plus 32, from 12 bytes, three 32-bit words, to bytes."""
    return [
        ((w[i % 2] >> 4 * (i // 2)) & 0x0F0F0F0F) | (((w[2] >> 2 * i) & 0x03030303) << 4) for i in range(4)
    ]


def _q3_k_ints(at: Fields, k: Emitter, p: Value) -> IntScales:
    """Read scales as `q3_k_words` does, but in one vector."""
    words, four = k.load(vec(I32, 3), p + at["scales"]), vec(I32, 4)
    low = (words.shuffle([0, 1, 0, 1]) >> k.table(four, [0, 0, 4, 4])) & 0x0F0F0F0F
    high = (words.shuffle([2, 2, 2, 2]) >> k.table(four, [0, 2, 4, 6])) & 0x03030303
    return IntScales(_half(k, p + at["d"]), (low | (high << 4)).bits(vec(I8, 16)).zext(I16) - 32)


def _q6_k(at: Fields, k: Emitter, p: Any) -> list[Any]:
    runs = []
    for half in range(2):
        low = [_bytes(k, p + at["ql"] + 64 * half + 32 * i) for i in range(2)]
        high = _bytes(k, p + at["qh"] + 32 * half)
        for j in range(4):
            q = low[j % 2] & 15 if j < 2 else low[j % 2] >> 4
            bits = high << (4 - 2 * j) if j < 3 else high >> 2
            runs.append(q | (bits & 48))
    return runs


def _q6_k_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    low, high, second = blocks[0] + (at["ql"] + 64 * (i // 2)), blocks[0] + (at["qh"] + 32 * (i // 2)), i % 2
    found = []
    for h in _vector_parts(n):
        q = _both(k, low + h, low + 32 + h, n)
        bits = _shifted(k, _twice(k, high + h, n), (4 * second - 4, 4 * second - 2), 48)
        found.append(((q >> 4 if second else q) & 15) | bits)
    return found


def _q6_k_ints(at: Fields, k: Emitter, p: Value) -> IntScales:
    return IntScales(_half(k, p + at["d"]), _bytes(k, p + at["scales"], 16).sext(I16))


# -- codes that are indices of levels ---------------------------------------------------------------

IQ4 = DType.IQ4_NL.codec.levels
"""The values of iq4_nl and iq4_xs."""

MXFP4 = [level + 12 for level in DType.MXFP4.codec.levels]
"""The values of mxfp4, shifted to begin at 0."""


def _uneven(table: Sequence[int], at: Fields, k: Emitter, p: Any) -> list[Any]:
    return [_levels(k, table, _nibbles(k, p + at["qs"]))]


def _iq4_xs(at: Fields, k: Emitter, p: Any) -> list[Any]:
    return [_levels(k, IQ4, _nibbles(k, p + at["qs"] + 16 * i)) for i in range(8)]


def _iq4_xs_pair(at: Fields, k: Emitter, blocks: Sequence[Value], i: int, n: int) -> list[Value]:
    a, b = (blocks[0] + (at["qs"] + 16 * run) for run in (2 * i, 2 * i + 1))
    return [look_up(k, IQ4, q) for q in _nibble_pair(k, a, b, n)]


def _iq4_xs_scales(at: Fields, k: Emitter, blocks: Sequence[Value]) -> tuple[Value, None]:
    (p,) = blocks
    steps = k.table(vec(I32, 8), range(0, 32, 4))
    low = (k.load(I32, p + at["scales_l"]).splat(8) >> steps) & 15
    high = (k.load(I16, p + at["scales_h"]).zext(I32).splat(8) >> k.table(vec(I32, 8), range(0, 16, 2))) & 3
    return ((low | (high << 4)) - 32).to_float() * _half(k, p + at["d"]).splat(8), None


def mxfp4_scale(k: Emitter, e: Value) -> Value:
    """The scale of mxfp4: 2 to the power of `e - 128`."""
    small = k.const(e.type, 0x00200000) << k.select(e < 2, e, 0)
    bits = k.select(e < 2, small, (e - 1) << 23)
    return bits.bits(like(e.type, F32))


def _mxfp4_scale(at: Fields, k: Emitter, blocks: Sequence[Value]) -> tuple[Value, None]:
    return mxfp4_scale(k, _each(k, I8, blocks, at["e"]).zext(I32)), None


def _format(
    name: str, group: int, offset: int | None, most: int, codes: Any, scales: Any, pair: Any,
    whole: Any = None, **more: Any,
) -> tuple[str, BlockFormat]:  # fmt: skip
    dtype = DType.parse(name)
    at = dtype.codec.offsets
    has_min = "m" in at or "dmin" in at
    sizes = dtype.block_size, dtype.type_size, group
    read = partial(codes, at), partial(scales, at), partial(pair, at)
    if whole is not None:
        more["whole"] = partial(whole, at)
    return name, BlockFormat(*sizes, offset, most, has_min, *read, **more)


def _uneven_format(
    name: str, offset: int | None, most: int, table: Sequence[int], scales: Any
) -> tuple[str, BlockFormat]:
    return _format(name, 32, offset, most, partial(_uneven, table), scales, partial(_uneven_pair, table))


def _grid_format(name: str, form: GridFormat) -> tuple[str, BlockFormat]:
    dtype = DType.parse(name)

    def scales(k: Emitter, blocks: Sequence[Value]) -> tuple[Value, None]:
        return form.scales(dtype.codec.offsets, k, blocks[0]), None

    read = partial(form.codes, name), scales, partial(form.pair, name)
    return name, BlockFormat(
        dtype.block_size, dtype.type_size, form.group, form.offset, form.most, False, *read
    )


FORMATS: dict[str, BlockFormat] = dict(
    [
        _format("q4_0", 32, 8, 8, _few_bits, _d, _few_bits_pair),
        _format("q4_1", 32, 0, 15, _few_bits, _dm, _few_bits_pair),
        _format("q5_0", 32, 16, 16, _few_bits, _d, _few_bits_pair),
        _format("q5_1", 32, 0, 31, _few_bits, _dm, _few_bits_pair),
        _format("q8_0", 32, None, 128, _eight_bits, _d, _eight_bits_pair, wide=True),
        _format("q2_k", 16, 0, 3, _q2_k, partial(_from_ints, _q2_k_ints), _q2_k_pair, _q2_k_ints, together=4),
        _format("q3_k", 16, 4, 4, _q3_k, partial(_from_ints, _q3_k_ints), _q3_k_pair, _q3_k_ints, together=8),
        _format("q4_k", 32, 0, 15, _q4_k, _six_bit_pairs, _q4_k_pair, together=2),
        _format("q5_k", 32, 0, 31, _q5_k, _six_bit_pairs, _q5_k_pair, together=8),
        _format(
            "q6_k", 16, 32, 32, _q6_k, partial(_from_ints, _q6_k_ints), _q6_k_pair, _q6_k_ints, together=4
        ),
        _uneven_format("iq4_nl", None, 127, IQ4, _d),
        _format("iq4_xs", 32, None, 127, _iq4_xs, _iq4_xs_scales, _iq4_xs_pair),
        _uneven_format("mxfp4", 12, 12, MXFP4, _mxfp4_scale),
        *(_grid_format(name, form) for name, form in GRIDS.items()),
    ]
)
"""Formats by the type's name."""

# -- scales of strips ------------------------------------------------------------------------------

GroupInts = Callable[[int], Value]
"""Returns a group's integers, one lane per row."""


class Scales(NamedTuple):
    """Scales and minimums of one block of each row of a strip (16 interleaved rows), a lane per row.

    Attributes:
        d: Factor of the scales.
        scales: Integer scales of groups; `None` if the block is one group with scale `d`.
        m: Factor of the minimums, if the type has them.
        minimums: Integer minimums of groups; `None` likewise.
    """

    d: Value
    scales: GroupInts | None = None
    m: Value | None = None
    minimums: GroupInts | None = None

    def scale(self, group: int) -> Value:
        """Return the float scales of group number `group`, a lane per row."""
        return self.d if self.scales is None else self.scales(group).to_float() * self.d

    def minimum(self, group: int) -> Value | None:
        """Return the float minimums of group number `group`; `None` if the type has no minimums."""
        if self.m is None or self.minimums is None:
            return self.m
        return self.minimums(group).to_float() * self.m


def _strip_half(p: Interleaved) -> Value:
    return from_half(p.k, p.each())


def _strip_words(field: Interleaved, n: int) -> list[Value]:
    return [(field + 4 * i).each() for i in range(n)]


def _byte(words: list[Value], i: int) -> Value:
    """Byte number `i` of 32-bit words."""
    word = words[i // 4]
    return word >> 24 if i % 4 == 3 else (word >> 8 * (i % 4)) & 255


def _strip_d(p: Interleaved) -> Scales:
    return Scales(_strip_half(p["d"]))


def _strip_dm(p: Interleaved) -> Scales:
    return Scales(_strip_half(p["d"]), None, _strip_half(p["m"]))


def _strip_six_bits(p: Interleaved) -> Scales:
    scales, minimums = six_bit_words(_strip_words(p["scales"], 3))
    return Scales(
        _strip_half(p["d"]), partial(_byte, scales), -_strip_half(p["dmin"]), partial(_byte, minimums)
    )


def _strip_q2_k(p: Interleaved) -> Scales:
    @cache
    def both(i: int) -> Value:
        return (p["scales"] + i).each().zext(I32)

    return Scales(
        _strip_half(p["d"]), lambda i: both(i) & 15, -_strip_half(p["dmin"]), lambda i: both(i) >> 4
    )


def _strip_q3_k(p: Interleaved) -> Scales:
    words = q3_k_words(_strip_words(p["scales"], 3))
    return Scales(_strip_half(p["d"]), lambda i: _byte(words, i) - 32)


def _strip_q6_k(p: Interleaved) -> Scales:
    return Scales(_strip_half(p["d"]), lambda i: (p["scales"] + i).each().sext(I32))


def _strip_iq4_xs(p: Interleaved) -> Scales:
    high, low = p["scales_h"].each().zext(I32), p["scales_l"].each()
    return Scales(_strip_half(p["d"]), lambda i: (((low >> 4 * i) & 15) | (((high >> 2 * i) & 3) << 4)) - 32)


def _strip_mxfp4(p: Interleaved) -> Scales:
    return Scales(mxfp4_scale(p.k, p["e"].each().zext(I32)))


SCALES: dict[str, Callable[[Interleaved], Scales]] = {
    "q4_0": _strip_d,
    "q4_1": _strip_dm,
    "q5_0": _strip_d,
    "q5_1": _strip_dm,
    "q8_0": _strip_d,
    "q2_k": _strip_q2_k,
    "q3_k": _strip_q3_k,
    "q4_k": _strip_six_bits,
    "q5_k": _strip_six_bits,
    "q6_k": _strip_q6_k,
    "iq4_nl": _strip_d,
    "iq4_xs": _strip_iq4_xs,
    "mxfp4": _strip_mxfp4,
}
"""Readers of a strip's scales and minimums, by the type's name."""
