"""Readers of quantised blocks: codes as byte vectors, scales as float vectors.

A `Form` reads one block; a block has runs of 32 elements. An element is `scale (code - offset)`, or, where
the type has minimums, `scale code + minimum`. Scales and minimums are of groups of 16 or 32 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ggmlb.backends.llvm.codegen.simd import from_half, look_up
from ggmlb.backends.llvm.codegen.value import F32, I1, I8, I16, I32, I64, Value, like, vec
from ggmlb.backends.llvm.kernels.interleaved import Interleaved, Words
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel

_B32 = vec(I8, 32)

Fields = dict[str, int]
"""Where in a block each field begins [bytes]."""


@dataclass(frozen=True, slots=True)
class Form:
    """The block format of a type, with its readers.

    Attributes:
        block: Elements of a block.
        nbytes: Of a block.
        group: Elements that share a scale.
        offset: What is taken from the codes; `None` if they are signed; 0 where there are minimums.
        most: The greatest magnitude of what codes stand for, without the scale and the minimum.
        has_min: Whether there are minimums.
        codes: Read the codes of the block at an address: `<32 x i8>` for each run; or of an `Interleaved`:
            `Words`.
        scales: Read the scales, and minimums or `None`: a float for each group, as vectors.
        pairs: As `codes`, two runs in a vector of 64 bytes, where that takes fewer instructions.
        wide: Whether activations have codes of two bytes; see `activations`.
        together: Runs whose codes have bits in the same bytes.
    """

    block: int
    nbytes: int
    group: int
    offset: int | None
    most: int
    has_min: bool
    codes: Callable[[Kernel, Any], list[Any]]
    scales: Callable[[Kernel, Value], tuple[Value, Value | None]]
    pairs: Callable[[Kernel, Value], list[Value]] | None = None
    wide: bool = False
    together: int = 1


def _half(k: Kernel, address: Value) -> Value:
    return from_half(k, k.load(I16, address))


def _one(k: Kernel, x: Value) -> Value:
    return x.splat(1)


def _bytes(k: Kernel, address: Any, n: int = 32) -> Any:
    """Bytes of a block; where strips are read, of each row of one."""
    return address.bytes(n) if isinstance(address, Interleaved) else k.load(vec(I8, n), address)


def _levels(k: Kernel, table: Sequence[int], q: Any) -> Any:
    """What codes stand for."""
    return q.map(partial(look_up, k, table)) if isinstance(q, Words) else look_up(k, table, q)


def _nibbles(k: Kernel, address: Any) -> Any:
    """16 bytes: the low halves are the first 16 codes, the high ones the others."""
    q = _bytes(k, address, 16)
    return (q & 15).join(q >> 4)


def _fifth(k: Kernel, address: Any) -> Any:
    """32 bits as what they add to codes."""
    if isinstance(address, Interleaved):
        return address.bits(16)
    bits = k.load(I32, address).bits(vec(I1, 32))
    return k.select(bits, k.const(_B32, 16), 0)


def _few_bits(at: Fields, k: Kernel, p: Any) -> list[Any]:
    """Codes of four bits, or of five."""
    q = _nibbles(k, p + at["qs"])
    return [q | _fifth(k, p + at["qh"]) if "qh" in at else q]


def _eight_bits(at: Fields, k: Kernel, p: Any) -> list[Any]:
    return [_bytes(k, p + at["qs"])]


def _d(at: Fields, k: Kernel, p: Value) -> tuple[Value, None]:
    return _one(k, _half(k, p + at["d"])), None


def _dm(at: Fields, k: Kernel, p: Value) -> tuple[Value, Value]:
    return _one(k, _half(k, p + at["d"])), _one(k, _half(k, p + at["m"]))


def _shifted(k: Kernel, both: Value, shifts: tuple[int, int], mask: int) -> Value:
    """Bits of 64 bytes, of the first 32 and of the others from another bit on, as codes."""
    steps = k.table(vec(I16, 32), [shifts[0]] * 16 + [shifts[1]] * 16)
    return (both.bits(vec(I16, 32)) >> steps).bits(vec(I8, 64)) & mask


def _twice(k: Kernel, address: Value) -> Value:
    """32 bytes, and the same again."""
    x = k.load(_B32, address)
    return x.join(x)


# -- two halves of 16-bit factors and 6-bit scales: q4_K and q5_K -----------------------------------


def _words(k: Kernel, words: list[Value]) -> Value:
    """32-bit words as bytes, each a float."""
    longs = [a.zext(I64) | (b.zext(I64) << 32) for a, b in zip(words[::2], words[1::2], strict=True)]
    packed = longs[0].splat(1) if len(longs) == 1 else longs[0].splat(2).put(1, longs[1])
    return packed.bits(vec(I8, 4 * len(words)))


def six_bit_words(w: list[Value]) -> tuple[list[Value], list[Value]]:
    """The scales and the minimums of q4_K and q5_K as words of four bytes, from the words of `scales`."""
    low = [word & 0x3F3F3F3F for word in w[:2]]
    high = [((w[2] >> 4 * i) & 0x0F0F0F0F) | ((word >> 2) & 0x30303030) for i, word in enumerate(w[:2])]
    return [low[0], high[0]], [low[1], high[1]]


def _six_bit_pairs(at: Fields, k: Kernel, p: Value) -> tuple[Value, Value]:
    words = six_bit_words([k.load(I32, p + at["scales"] + 4 * i) for i in range(3)])
    d, dmin = _half(k, p + at["d"]), _half(k, p + at["dmin"])
    factors = d, -dmin
    scales, minimums = (_words(k, words[i]).zext(I32).to_float() * factors[i].splat(8) for i in range(2))
    return scales, minimums


def _q4_k(at: Fields, k: Kernel, p: Any) -> list[Any]:
    runs = []
    for i in range(4):
        q = _bytes(k, p + at["qs"] + 32 * i)
        runs += [q & 15, q >> 4]
    return runs


def _q4_k_pairs(at: Fields, k: Kernel, p: Value) -> list[Value]:
    return [_shifted(k, _twice(k, p + at["qs"] + 32 * i), (0, 4), 15) for i in range(4)]


def _q5_k_pairs(at: Fields, k: Kernel, p: Value) -> list[Value]:
    high = _twice(k, p + at["qh"])
    pairs = []
    for i in range(4):
        q = _shifted(k, _twice(k, p + at["qs"] + 32 * i), (0, 4), 15)
        pairs.append(q | (_shifted(k, high, (2 * i, 2 * i + 1), 1) << 4))
    return pairs


def _q5_k(at: Fields, k: Kernel, p: Any) -> list[Any]:
    runs, high = [], _bytes(k, p + at["qh"])
    for i in range(8):
        q = _bytes(k, p + at["qs"] + 32 * (i // 2))
        q = q >> 4 if i % 2 else q & 15
        bit = (high << (4 - i)) if i < 4 else (high >> (i - 4))
        runs.append(q | (bit & 16))
    return runs


# -- groups of 16: q2_K, q3_K, q6_K -----------------------------------------------------------------


def _q2_k(at: Fields, k: Kernel, p: Any) -> list[Any]:
    halves = [_bytes(k, p + at["qs"] + 32 * i) for i in range(2)]
    return [(q >> 2 * j) & 3 for q in halves for j in range(4)]


def _q2_k_pairs(at: Fields, k: Kernel, p: Value) -> list[Value]:
    halves = [_twice(k, p + at["qs"] + 32 * i) for i in range(2)]
    return [_shifted(k, q, (s, s + 2), 3) for q in halves for s in (0, 4)]


def _q2_k_scales(at: Fields, k: Kernel, p: Value) -> tuple[Value, Value]:
    packed = _bytes(k, p + at["scales"], 16)
    d, dmin = _half(k, p + at["d"]), _half(k, p + at["dmin"])
    scales = (packed & 15).zext(I32).to_float() * d.splat(16)
    return scales, (packed >> 4).zext(I32).to_float() * (-dmin).splat(16)


def _q3_k(at: Fields, k: Kernel, p: Any) -> list[Any]:
    high, halves = _bytes(k, p + at["hmask"]), [_bytes(k, p + at["qs"] + 32 * i) for i in range(2)]
    runs = []
    for i in range(8):
        bit = high << (2 - i) if i < 2 else high >> (i - 2)
        runs.append(((halves[i // 4] >> 2 * (i % 4)) & 3) | (bit & 4))
    return runs


def _q3_k_pairs(at: Fields, k: Kernel, p: Value) -> list[Value]:
    high, halves = _twice(k, p + at["hmask"]), [_twice(k, p + at["qs"] + 32 * i) for i in range(2)]
    pairs = []
    for i in range(4):
        q = _shifted(k, halves[i // 2], (4 * (i % 2), 4 * (i % 2) + 2), 3)
        pairs.append(q | (_shifted(k, high, (2 * i, 2 * i + 1), 1) << 2))
    return pairs


def q3_k_words(w: list[Value]) -> list[Value]:
    """The scales of q3_K, each 32 too great, as words of four bytes, from the words of `scales`."""
    return [
        ((w[i % 2] >> 4 * (i // 2)) & 0x0F0F0F0F) | (((w[2] >> 2 * i) & 0x03030303) << 4) for i in range(4)
    ]


def _q3_k_scales(at: Fields, k: Kernel, p: Value) -> tuple[Value, None]:
    words = q3_k_words([k.load(I32, p + at["scales"] + 4 * i) for i in range(3)])
    return (_words(k, words).zext(I32) - 32).to_float() * _half(k, p + at["d"]).splat(16), None


def _q6_k(at: Fields, k: Kernel, p: Any) -> list[Any]:
    runs = []
    for half in range(2):
        low = [_bytes(k, p + at["ql"] + 64 * half + 32 * i) for i in range(2)]
        high = _bytes(k, p + at["qh"] + 32 * half)
        for j in range(4):
            q = low[j % 2] & 15 if j < 2 else low[j % 2] >> 4
            bits = high << (4 - 2 * j) if j < 3 else high >> 2
            runs.append(q | (bits & 48))
    return runs


def _q6_k_pairs(at: Fields, k: Kernel, p: Value) -> list[Value]:
    pairs = []
    for half in range(2):
        low = _bytes(k, p + at["ql"] + 64 * half, 64)
        high = _twice(k, p + at["qh"] + 32 * half)
        for i in range(2):
            q = low >> 4 if i else low & 15
            pairs.append(q | (_shifted(k, high, (4 * i, 4 * i + 2), 3) << 4))
    return pairs


def _q6_k_scales(at: Fields, k: Kernel, p: Value) -> tuple[Value, None]:
    scales = _bytes(k, p + at["scales"], 16).sext(I32).to_float()
    return scales * _half(k, p + at["d"]).splat(16), None


# -- codes that stand for uneven levels -------------------------------------------------------------

IQ4 = DType.IQ4_NL.codec.levels
"""The levels of iq4_nl and iq4_xs."""

MXFP4 = [level + 12 for level in DType.MXFP4.codec.levels]
"""Those of mxfp4, from 0 on."""


def _uneven(table: Sequence[int], at: Fields, k: Kernel, p: Any) -> list[Any]:
    return [_levels(k, table, _nibbles(k, p + at["qs"]))]


def _iq4_xs(at: Fields, k: Kernel, p: Any) -> list[Any]:
    return [_levels(k, IQ4, _nibbles(k, p + at["qs"] + 16 * i)) for i in range(8)]


def _iq4_xs_pairs(at: Fields, k: Kernel, p: Value) -> list[Value]:
    pairs = []
    for i in range(4):
        q = _bytes(k, p + at["qs"] + 32 * i)
        spread = q.shuffle([*range(16), *range(16), *range(16, 32), *range(16, 32)])
        steps = k.table(vec(I16, 32), ([0] * 8 + [4] * 8) * 2)
        pairs.append(look_up(k, IQ4, (spread.bits(vec(I16, 32)) >> steps).bits(vec(I8, 64)) & 15))
    return pairs


def _iq4_xs_scales(at: Fields, k: Kernel, p: Value) -> tuple[Value, None]:
    steps = k.table(vec(I32, 8), range(0, 32, 4))
    low = (k.load(I32, p + at["scales_l"]).splat(8) >> steps) & 15
    high = (k.load(I16, p + at["scales_h"]).zext(I32).splat(8) >> k.table(vec(I32, 8), range(0, 16, 2))) & 3
    return ((low | (high << 4)) - 32).to_float() * _half(k, p + at["d"]).splat(8), None


def mxfp4_scale(k: Kernel, e: Value) -> Value:
    """Half of 2 to the power of `e - 127`."""
    small = k.const(e.type, 0x00200000) << k.select(e < 2, e, 0)
    bits = k.select(e < 2, small, (e - 1) << 23)
    return bits.bits(like(e.type, F32))


def _mxfp4_scale(at: Fields, k: Kernel, p: Value) -> tuple[Value, None]:
    return _one(k, mxfp4_scale(k, k.load(I8, p + at["e"]).zext(I32))), None


def _form(
    name: str, group: int, offset: int | None, most: int, codes: Any, scales: Any, pairs: Any = None,
    **more: Any,
) -> tuple[str, Form]:  # fmt: skip
    dtype = DType.parse(name)
    at = dtype.codec.offsets
    has_min = "m" in at or "dmin" in at
    sizes = dtype.block_size, dtype.type_size, group
    if pairs:
        more["pairs"] = partial(pairs, at)
    return name, Form(*sizes, offset, most, has_min, partial(codes, at), partial(scales, at), **more)


FORMS: dict[str, Form] = dict(
    [
        _form("q4_0", 32, 8, 8, _few_bits, _d),
        _form("q4_1", 32, 0, 15, _few_bits, _dm),
        _form("q5_0", 32, 16, 16, _few_bits, _d),
        _form("q5_1", 32, 0, 31, _few_bits, _dm),
        _form("q8_0", 32, None, 128, _eight_bits, _d, wide=True),
        _form("q2_k", 16, 0, 3, _q2_k, _q2_k_scales, _q2_k_pairs, together=4),
        _form("q3_k", 16, 4, 4, _q3_k, _q3_k_scales, _q3_k_pairs, together=8),
        _form("q4_k", 32, 0, 15, _q4_k, _six_bit_pairs, _q4_k_pairs, together=2),
        _form("q5_k", 32, 0, 31, _q5_k, _six_bit_pairs, _q5_k_pairs, together=8),
        _form("q6_k", 16, 32, 32, _q6_k, _q6_k_scales, _q6_k_pairs, together=4),
        _form("iq4_nl", 32, None, 127, partial(_uneven, IQ4), _d),
        _form("iq4_xs", 32, None, 127, _iq4_xs, _iq4_xs_scales, _iq4_xs_pairs),
        _form(
            "mxfp4", 32, 12, 12, partial(_uneven, [12 + x for x in DType.MXFP4.codec.levels]), _mxfp4_scale
        ),
    ]
)
"""By the type's name."""
