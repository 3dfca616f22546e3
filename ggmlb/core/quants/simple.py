"""Types with one scale, and perhaps one minimum, per block: Q4_0 ... Q8_1, Q1_0, Q2_0 and Q8_K.

A block of Q4 and Q5 holds the first half of its elements in the low nibbles and the second in the high ones.
"""

from __future__ import annotations

import numpy as np

from ggmlb.core.quants.codec import (
    Blocks,
    Bytes,
    Codec,
    Floats,
    Ints,
    blockwise,
    expand,
    f32,
    layout,
    planes,
    runs,
    split,
)
from ggmlb.core.quants.columns import (
    codes_of,
    magnitude,
    pack,
    peak,
    put,
    ratio,
    round_away,
    signed_codes_of,
    total,
)

# -- reading ---------------------------------------------------------------------------------------------


def _nibbles(blocks: Blocks) -> Bytes:
    codes = blockwise(split(planes(blocks["qs"]), 4)[0])
    return codes.reshape(len(blocks), -1)


def _bits(blocks: Blocks, name: str) -> Bytes:
    bits = np.unpackbits(planes(blocks[name]).reshape(-1), bitorder="little")
    return bits.reshape(len(blocks), -1)


def _five_bits(blocks: Blocks) -> Bytes:
    codes = _bits(blocks, "qh")
    codes <<= np.uint8(4)
    codes |= _nibbles(blocks)
    return codes


def _centered(codes: Bytes, middle: int) -> Ints:
    signed = codes.view(np.int8)
    signed -= np.int8(middle)
    return signed


def _read_q4_0(values: Floats, blocks: Blocks) -> None:
    expand(values, _centered(_nibbles(blocks), 8), f32(blocks["d"]))


def _read_q4_1(values: Floats, blocks: Blocks) -> None:
    expand(values, _nibbles(blocks), f32(blocks["d"]), -f32(blocks["m"]))


def _read_q5_0(values: Floats, blocks: Blocks) -> None:
    expand(values, _centered(_five_bits(blocks), 16), f32(blocks["d"]))


def _read_q5_1(values: Floats, blocks: Blocks) -> None:
    expand(values, _five_bits(blocks), f32(blocks["d"]), -f32(blocks["m"]))


def _read_q8(values: Floats, blocks: Blocks) -> None:
    expand(values, planes(blocks["qs"]).view(np.int8), f32(blocks["d"]))


def _read_q1_0(values: Floats, blocks: Blocks) -> None:
    codes = _bits(blocks, "qs")
    codes += codes
    expand(values, _centered(codes, 1), f32(blocks["d"]))


_QUARTERS = (np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3).astype(np.int8) - np.int8(1)
_QUARTERS = _QUARTERS.view(np.uint32)[:, 0]
"""The four codes in a byte, minus 1, as one uint32."""


def _read_q2_0(values: Floats, blocks: Blocks) -> None:
    codes = np.take(_QUARTERS, planes(blocks["qs"]), mode="clip").view(np.int8)
    expand(values, codes, f32(blocks["d"]))


# -- writing ---------------------------------------------------------------------------------------------


def _symmetric(blocks: Blocks, columns: Floats, n_levels: int) -> Bytes:
    """Set `d` so that the value of the largest magnitude gets code 0; return the codes."""
    half = n_levels // 2
    d = peak(columns) / np.float32(-half)
    blocks["d"] = d
    columns *= ratio(1, d)
    columns += np.float32(half + 0.5)
    return codes_of(columns, n_levels - 1)


_MOST = np.finfo(np.float32).max


def _affine(blocks: Blocks, columns: Floats, n_levels: int) -> Bytes:
    """Set `d` and `m` so that the codes span the block's range; return the codes."""
    low = np.fmin.reduce(columns, 0, initial=_MOST)
    zero = np.nonzero(low == 0)[0]
    if zero.size:  # the sign of the first zero
        low[zero] = columns[(columns[:, zero] == 0).argmax(0), zero]
    d = (np.fmax.reduce(columns, 0, initial=-_MOST) - low) / np.float32(n_levels - 1)
    d += np.float32(0)  # of zeros +0, whichever is the largest
    blocks["d"], blocks["m"] = d, low
    columns -= low
    columns *= ratio(1, d)
    columns += np.float32(0.5)
    return codes_of(columns, n_levels - 1)


def _put_nibbles(blocks: Blocks, codes: Bytes) -> None:
    put(blocks, "qs", pack(codes.reshape(2, -1, len(blocks)), 4))


def _put_five_bits(blocks: Blocks, codes: Bytes) -> None:
    put(blocks, "qh", np.packbits(codes >> np.uint8(4), axis=0, bitorder="little"))
    codes &= np.uint8(15)
    _put_nibbles(blocks, codes)


def _write_q4_0(blocks: Blocks, columns: Floats) -> None:
    _put_nibbles(blocks, _symmetric(blocks, columns, 16))


def _write_q4_1(blocks: Blocks, columns: Floats) -> None:
    _put_nibbles(blocks, _affine(blocks, columns, 16))


def _write_q5_0(blocks: Blocks, columns: Floats) -> None:
    _put_five_bits(blocks, _symmetric(blocks, columns, 32))


def _write_q5_1(blocks: Blocks, columns: Floats) -> None:
    _put_five_bits(blocks, _affine(blocks, columns, 32))


def _write_q8_0(blocks: Blocks, columns: Floats) -> None:
    d = magnitude(columns) / np.float32(127)
    blocks["d"] = d
    columns *= ratio(1, d)
    put(blocks, "qs", signed_codes_of(round_away(columns)))


def _write_q8_1(blocks: Blocks, columns: Floats) -> None:
    d = magnitude(columns) / np.float32(127)
    blocks["d"] = d
    columns *= ratio(1, d)
    codes = round_away(columns)
    blocks["s"] = codes.sum(0) * d  # sums of integers below 2^24: exact in any order
    put(blocks, "qs", signed_codes_of(codes))


def _write_q8_k(blocks: Blocks, columns: Floats) -> None:
    top = peak(columns)
    step = ratio(-127, top)
    blocks["d"] = ratio(1, step)
    columns *= step
    codes = np.minimum(np.rint(columns, out=columns), np.float32(127), out=columns)
    put(blocks, "qs", codes.astype(np.int8))
    blocks["bsums"] = codes.reshape(16, 16, -1).sum(1).T


def _write_q1_0(blocks: Blocks, columns: Floats) -> None:
    blocks["d"] = total(np.abs(columns)) / np.float32(128)
    put(blocks, "qs", np.packbits(columns >= 0, axis=0, bitorder="little"))


def _write_q2_0(blocks: Blocks, columns: Floats) -> None:
    d = magnitude(columns)
    blocks["d"] = d
    columns *= ratio(1, d)
    columns = round_away(columns)
    columns += np.float32(1)
    codes = codes_of(columns, 3).reshape(16, 4, -1)
    put(blocks, "qs", pack(codes.transpose(1, 0, 2), 2))


Q4_0 = Codec(layout(d="<f2", qs=runs(1, 16)), _read_q4_0, _write_q4_0)
Q4_1 = Codec(layout(d="<f2", m="<f2", qs=runs(1, 16)), _read_q4_1, _write_q4_1)
Q5_0 = Codec(layout(d="<f2", qh=runs(1, 4), qs=runs(1, 16)), _read_q5_0, _write_q5_0)
Q5_1 = Codec(layout(d="<f2", m="<f2", qh=runs(1, 4), qs=runs(1, 16)), _read_q5_1, _write_q5_1)
Q8_0 = Codec(layout(d="<f2", qs=runs(1, 32)), _read_q8, _write_q8_0)
Q8_1 = Codec(layout(d="<f2", s="<f2", qs=runs(1, 32)), _read_q8, _write_q8_1)
Q8_K = Codec(layout(d="<f4", qs=runs(1, 256), bsums=("<i2", 16)), _read_q8, _write_q8_k)
Q1_0 = Codec(layout(d="<f2", qs=runs(1, 16)), _read_q1_0, _write_q1_0)
Q2_0 = Codec(layout(d="<f2", qs=runs(1, 16)), _read_q2_0, _write_q2_0)
