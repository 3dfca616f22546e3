"""Blocks of quantised weights: their codes as bytes, and their scales as floats, in vectors.

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

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel

_B32 = vec(I8, 32)


@dataclass(frozen=True, slots=True)
class Form:
    """How a type lies in memory.

    Attributes:
        block: Elements of a block.
        nbytes: Of a block.
        group: Elements that share a scale.
        offset: What is taken from the codes; `None` if they are signed; 0 where there are minimums.
        has_min: Whether there are minimums.
        codes: Read the codes of the block at an address: `<32 x i8>` for each run; or of an `Interleaved`:
            `Words`.
        scales: Read the scales, and minimums or `None`: a float for each group, as vectors.
        pairs: As `codes`, two runs in a vector of 64 bytes, where that takes fewer instructions.
        wide: Whether activations have codes of two bytes; see `activations`.
    """

    block: int
    nbytes: int
    group: int
    offset: int | None
    has_min: bool
    codes: Callable[[Kernel, Any], list[Any]]
    scales: Callable[[Kernel, Value], tuple[Value, Value | None]]
    pairs: Callable[[Kernel, Value], list[Value]] | None = None
    wide: bool = False


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


def _d(k: Kernel, p: Value) -> tuple[Value, None]:
    return _one(k, _half(k, p)), None


def _dm(k: Kernel, p: Value) -> tuple[Value, Value]:
    return _one(k, _half(k, p)), _one(k, _half(k, p + 2))


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


def _six_bit_pairs(k: Kernel, p: Value) -> tuple[Value, Value]:
    w = [k.load(I32, p + 4 + 4 * i) for i in range(3)]
    low = [word & 0x3F3F3F3F for word in w[:2]]
    high = [
        ((w[2] >> shift) & 0x0F0F0F0F) | ((word >> 2) & 0x30303030)
        for shift, word in zip((0, 4), w[:2], strict=True)
    ]
    d, dmin = _half(k, p), _half(k, p + 2)
    scales, minimums = (
        _words(k, [low[i], high[i]]).zext(I32).to_float() * factor.splat(8)
        for i, factor in enumerate((d, -dmin))
    )
    return scales, minimums


def _q4_k(k: Kernel, p: Any) -> list[Any]:
    runs = []
    for i in range(4):
        q = _bytes(k, p + 16 + 32 * i)
        runs += [q & 15, q >> 4]
    return runs


def _q4_k_pairs(k: Kernel, p: Value) -> list[Value]:
    return [_shifted(k, _twice(k, p + 16 + 32 * i), (0, 4), 15) for i in range(4)]


def _q5_k_pairs(k: Kernel, p: Value) -> list[Value]:
    high = _twice(k, p + 16)
    pairs = []
    for i in range(4):
        q = _shifted(k, _twice(k, p + 48 + 32 * i), (0, 4), 15)
        pairs.append(q | (_shifted(k, high, (2 * i, 2 * i + 1), 1) << 4))
    return pairs


def _q5_k(k: Kernel, p: Any) -> list[Any]:
    runs, high = [], _bytes(k, p + 16)
    for i in range(8):
        q = _bytes(k, p + 48 + 32 * (i // 2))
        q = q >> 4 if i % 2 else q & 15
        bit = (high << (4 - i)) if i < 4 else (high >> (i - 4))
        runs.append(q | (bit & 16))
    return runs


# -- groups of 16: q2_K, q3_K, q6_K -----------------------------------------------------------------


def _q2_k(k: Kernel, p: Any) -> list[Any]:
    halves = [_bytes(k, p + 16 + 32 * i) for i in range(2)]
    return [(q >> 2 * j) & 3 for q in halves for j in range(4)]


def _q2_k_pairs(k: Kernel, p: Value) -> list[Value]:
    halves = [_twice(k, p + 16 + 32 * i) for i in range(2)]
    return [_shifted(k, q, (s, s + 2), 3) for q in halves for s in (0, 4)]


def _q2_k_scales(k: Kernel, p: Value) -> tuple[Value, Value]:
    packed = _bytes(k, p, 16)
    d, dmin = _half(k, p + 80), _half(k, p + 82)
    scales = (packed & 15).zext(I32).to_float() * d.splat(16)
    return scales, (packed >> 4).zext(I32).to_float() * (-dmin).splat(16)


def _q3_k(k: Kernel, p: Any) -> list[Any]:
    high, halves = _bytes(k, p), [_bytes(k, p + 32 + 32 * i) for i in range(2)]
    runs = []
    for i in range(8):
        bit = high << (2 - i) if i < 2 else high >> (i - 2)
        runs.append(((halves[i // 4] >> 2 * (i % 4)) & 3) | (bit & 4))
    return runs


def _q3_k_pairs(k: Kernel, p: Value) -> list[Value]:
    high, halves = _twice(k, p), [_twice(k, p + 32 + 32 * i) for i in range(2)]
    pairs = []
    for i in range(4):
        q = _shifted(k, halves[i // 2], (4 * (i % 2), 4 * (i % 2) + 2), 3)
        pairs.append(q | (_shifted(k, high, (2 * i, 2 * i + 1), 1) << 2))
    return pairs


def _q3_k_scales(k: Kernel, p: Value) -> tuple[Value, None]:
    w = [k.load(I32, p + 96 + 4 * i) for i in range(3)]
    words = [
        ((w[i % 2] >> 4 * (i // 2)) & 0x0F0F0F0F) | (((w[2] >> 2 * i) & 0x03030303) << 4) for i in range(4)
    ]
    return (_words(k, words).zext(I32) - 32).to_float() * _half(k, p + 108).splat(16), None


def _q6_k(k: Kernel, p: Any) -> list[Any]:
    runs = []
    for half in range(2):
        low = [_bytes(k, p + 64 * half + 32 * i) for i in range(2)]
        high = _bytes(k, p + 128 + 32 * half)
        for j in range(4):
            q = low[j % 2] & 15 if j < 2 else low[j % 2] >> 4
            bits = high << (4 - 2 * j) if j < 3 else high >> 2
            runs.append(q | (bits & 48))
    return runs


def _q6_k_pairs(k: Kernel, p: Value) -> list[Value]:
    pairs = []
    for half in range(2):
        low, high = _bytes(k, p + 64 * half, 64), _twice(k, p + 128 + 32 * half)
        for i in range(2):
            q = low >> 4 if i else low & 15
            pairs.append(q | (_shifted(k, high, (4 * i, 4 * i + 2), 3) << 4))
    return pairs


def _q6_k_scales(k: Kernel, p: Value) -> tuple[Value, None]:
    return _bytes(k, p + 192, 16).sext(I32).to_float() * _half(k, p + 208).splat(16), None


# -- codes that stand for uneven levels -------------------------------------------------------------

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels of iq4_nl and iq4_xs."""

_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _iq4_xs(k: Kernel, p: Any) -> list[Any]:
    return [_levels(k, IQ4, _nibbles(k, p + 8 + 16 * i)) for i in range(8)]


def _iq4_xs_pairs(k: Kernel, p: Value) -> list[Value]:
    pairs = []
    for i in range(4):
        q = _bytes(k, p + 8 + 32 * i)
        spread = q.shuffle([*range(16), *range(16), *range(16, 32), *range(16, 32)])
        steps = k.table(vec(I16, 32), ([0] * 8 + [4] * 8) * 2)
        pairs.append(look_up(k, IQ4, (spread.bits(vec(I16, 32)) >> steps).bits(vec(I8, 64)) & 15))
    return pairs


def _iq4_xs_scales(k: Kernel, p: Value) -> tuple[Value, None]:
    steps = k.table(vec(I32, 8), range(0, 32, 4))
    low = (k.load(I32, p + 4).splat(8) >> steps) & 15
    high = (k.load(I16, p + 2).zext(I32).splat(8) >> k.table(vec(I32, 8), range(0, 16, 2))) & 3
    return ((low | (high << 4)) - 32).to_float() * _half(k, p).splat(8), None


def mxfp4_scale(k: Kernel, e: Value) -> Value:
    """Half of 2 to the power of `e - 127`."""
    small = k.const(e.type, 0x00200000) << k.select(e < 2, e, 0)
    bits = k.select(e < 2, small, (e - 1) << 23)
    return bits.bits(like(e.type, F32))


def _mxfp4_scale(k: Kernel, p: Value) -> tuple[Value, None]:
    return _one(k, mxfp4_scale(k, k.load(I8, p).zext(I32))), None


FORMS: dict[str, Form] = {
    "q4_0": Form(32, 18, 32, 8, False, lambda k, p: [_nibbles(k, p + 2)], _d),
    "q4_1": Form(32, 20, 32, 0, True, lambda k, p: [_nibbles(k, p + 4)], _dm),
    "q5_0": Form(32, 22, 32, 16, False, lambda k, p: [_nibbles(k, p + 6) | _fifth(k, p + 2)], _d),
    "q5_1": Form(32, 24, 32, 0, True, lambda k, p: [_nibbles(k, p + 8) | _fifth(k, p + 4)], _dm),
    "q8_0": Form(32, 34, 32, None, False, lambda k, p: [_bytes(k, p + 2)], _d, wide=True),
    "q2_k": Form(256, 84, 16, 0, True, _q2_k, _q2_k_scales, _q2_k_pairs),
    "q3_k": Form(256, 110, 16, 4, False, _q3_k, _q3_k_scales, _q3_k_pairs),
    "q4_k": Form(256, 144, 32, 0, True, _q4_k, _six_bit_pairs, _q4_k_pairs),
    "q5_k": Form(256, 176, 32, 0, True, _q5_k, _six_bit_pairs, _q5_k_pairs),
    "q6_k": Form(256, 210, 16, 32, False, _q6_k, _q6_k_scales, _q6_k_pairs),
    "iq4_nl": Form(32, 18, 32, None, False, lambda k, p: [_levels(k, IQ4, _nibbles(k, p + 2))], _d),
    "iq4_xs": Form(256, 136, 32, None, False, _iq4_xs, _iq4_xs_scales, _iq4_xs_pairs),
    "mxfp4": Form(
        32, 17, 32, None, False, lambda k, p: [_levels(k, _MXFP4, _nibbles(k, p + 1))], _mxfp4_scale
    ),
}
"""By the type's name."""
