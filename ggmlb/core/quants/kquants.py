"""Q2_K to Q6_K: blocks of 256 elements in runs of 16 or 32, whose scales are themselves quantised."""

from __future__ import annotations

import numpy as np

from ggmlb.core.quants.codec import (
    Blocks,
    Bytes,
    Codec,
    Floats,
    blockwise,
    expand,
    f32,
    layout,
    planes,
    runs,
    split,
)
from ggmlb.core.quants.columns import pack, peak, put, ratio, total
from ggmlb.core.quants.search import TINY, fit_affine, fit_signed, fit_signed_by_descent, per_run, rounded

# -- reading ---------------------------------------------------------------------------------------------


def _factors(blocks: Blocks) -> Floats:
    """The factors of scales and of minimums, `(2, n_blocks, 1)`."""
    return np.stack([f32(blocks["d"]), f32(blocks["dmin"])])[:, :, None]


def _six_bit_pairs(blocks: Blocks) -> tuple[Floats, Floats]:
    """The scales and the minimums of the 8 runs of Q4_K and Q5_K, each `(n_blocks, 8)`.

    Word 0 has four scales and word 1 four minimums, of 6 bits per byte. Word 2 has the low 4 bits of the
    other four of each; their high 2 bits are the top bits of words 0 and 1.
    """
    words = blocks["scales"].T
    codes = np.empty((2, len(blocks), 2), np.uint32)  # (scale | minimum, block, first | last four)
    np.bitwise_and(words[:2], 0x3F3F3F3F, out=codes[:, :, 0])
    np.right_shift(words[2], np.array([[0], [4]], np.uint32), out=codes[:, :, 1])
    codes[:, :, 1] &= np.uint32(0x0F0F0F0F)
    codes[:, :, 1] |= (words[:2] >> np.uint32(2)) & np.uint32(0x30303030)
    scales = f32(codes.view(np.uint8))
    scales *= _factors(blocks)
    return scales[0], scales[1]


def _read_q2_k(values: Floats, blocks: Blocks) -> None:
    packed = blocks["scales"]
    d, dmin = _factors(blocks)
    codes = split(planes(blocks["qs"]), 2).reshape(8, -1, 32)
    expand(values, blockwise(codes), (packed & 15) * d, (packed >> 4) * dmin)


def _read_q3_k(values: Floats, blocks: Blocks) -> None:
    words = blocks["scales"].T
    fours = np.empty((4, len(blocks)), np.uint32)
    np.bitwise_and(words[:2], 0x0F0F0F0F, out=fours[:2])
    np.bitwise_and(words[:2] >> np.uint32(4), 0x0F0F0F0F, out=fours[2:])
    high = words[2] >> np.array([[0], [2], [4], [6]], np.uint32)
    fours |= (high & np.uint32(0x03030303)) << np.uint32(4)
    scales = f32(np.ascontiguousarray(fours.T).view(np.uint8))
    scales -= np.float32(32)
    scales *= f32(blocks["d"])[:, None]
    codes = split(planes(blocks["hmask"]), 1)[0]
    codes <<= np.uint8(2)
    codes |= split(planes(blocks["qs"]), 2).reshape(codes.shape)
    signed = blockwise(codes).view(np.int8)
    signed -= np.int8(4)
    expand(values, signed, scales)


def _read_q4_k(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qs"]), 4)
    expand(values, blockwise(codes.reshape(8, -1, 32)), *_six_bit_pairs(blocks))


def _read_q5_k(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qh"]), 1)[0]
    codes <<= np.uint8(4)
    codes |= split(planes(blocks["qs"]), 4).reshape(codes.shape)
    expand(values, blockwise(codes), *_six_bit_pairs(blocks))


def _read_q6_k(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qh"]), 2).reshape(2, 2, 2, -1, 32)  # half, low or high, run, block, 32
    codes <<= np.uint8(4)
    codes |= split(planes(blocks["ql"]), 4).reshape(codes.shape).swapaxes(1, 2)
    signed = blockwise(codes.reshape(8, -1, 32)).view(np.int8)
    signed -= np.int8(32)
    expand(values, signed, f32(blocks["scales"]) * f32(blocks["d"])[:, None])


# -- writing ---------------------------------------------------------------------------------------------


def _runs(columns: Floats, length: int) -> Floats:
    return columns.reshape(256 // length, length, -1)


def _weights(x: Floats) -> Floats:
    """Error weights of Q4_K and Q5_K: the magnitude plus the run's root mean square."""
    weights = np.abs(x)
    weights += per_run(np.sqrt(total(x * x) / np.float32(x.shape[1])))
    return weights


def _shared(scales: Floats, most: int) -> tuple[Floats, Bytes]:
    """Quantise scales that should not be negative, `(n_runs, n_blocks)`, to codes and a factor per block."""
    top = np.maximum(scales.max(0), np.float32(0))
    codes = np.rint(scales * ratio(most, top))
    return top / np.float32(most), np.minimum(codes.astype(np.int32).astype(np.uint8), np.uint8(most))


def _codes(x: Floats, scales: Floats, least: int, most: int, searched: Floats) -> Bytes:
    """Round the values to codes from 0 by the stored scales; where a scale is 0, keep the searched codes."""
    codes = rounded(x / per_run(scales), least, most)
    codes -= np.float32(least)
    np.copyto(codes, searched, where=per_run(scales == 0))
    return codes.astype(np.uint8)


def _affine(
    blocks: Blocks, x: Floats, scales: Floats, minimums: Floats, searched: Floats, top: int, most: int
) -> tuple[Bytes, Bytes, Bytes]:
    """Quantise scales and minimums to codes up to `top`, then the values to codes up to `most`.

    Fills `d` and `dmin`; returns the codes of the scales, of the minimums and of the values.
    """
    d, scale_codes = _shared(scales, top)
    dmin, minimum_codes = _shared(minimums, top)
    blocks["d"], blocks["dmin"] = d, dmin
    d, dmin = f32(blocks["d"]), f32(blocks["dmin"])  # as rounded to float16
    shifted = x + per_run(dmin * minimum_codes)
    return scale_codes, minimum_codes, _codes(shifted, d * scale_codes, 0, most, searched)


def _write_q2_k(blocks: Blocks, columns: Floats) -> None:
    x = _runs(columns, 16)
    found = fit_affine(x, np.abs(x), 3, -0.5, 0.1, 15, absolute=True)
    scales, minimums, codes = _affine(blocks, x, *found, 15, 3)
    put(blocks, "scales", scales | minimums << np.uint8(4))
    put(blocks, "qs", pack(codes.reshape(2, 4, 32, -1), 2))


def _put_six_bit_pairs(blocks: Blocks, scales: Bytes, minimums: Bytes) -> None:
    """Undo `_six_bit_pairs`."""
    both = np.stack([scales, minimums]).reshape(2, 2, 4, -1)
    first, last = both[:, 0], both[:, 1]
    packed = np.concatenate([first | last >> np.uint8(4) << np.uint8(6), pack(last & np.uint8(15), 4)[None]])
    put(blocks, "scales", packed)


def _write_q4_k(blocks: Blocks, columns: Floats) -> None:
    x = _runs(columns, 32)
    found = fit_affine(x, _weights(x), 15, -1.0, 0.1, 20)
    scales, minimums, codes = _affine(blocks, x, *found, 63, 15)
    _put_six_bit_pairs(blocks, scales, minimums)
    put(blocks, "qs", pack(codes.reshape(4, 2, 32, -1), 4))


def _write_q5_k(blocks: Blocks, columns: Floats) -> None:
    x = _runs(columns, 32)
    found = fit_affine(x, _weights(x), 31, -0.5, 0.1, 15)
    scales, minimums, codes = _affine(blocks, x, *found, 63, 31)
    _put_six_bit_pairs(blocks, scales, minimums)
    put(blocks, "qh", pack(codes >> np.uint8(4), 1))
    put(blocks, "qs", pack((codes & np.uint8(15)).reshape(4, 2, 32, -1), 4))


def _write_q3_k(blocks: Blocks, columns: Floats) -> None:
    x = _runs(columns, 16)
    scales, searched = fit_signed_by_descent(x, 4)
    step = ratio(-32, peak(scales))
    scale_codes = rounded(scales * step, -32, 31)
    scale_codes[:, step == 0] = -32
    blocks["d"] = ratio(1, step)
    codes = _codes(x, scale_codes * f32(blocks["d"]), -4, 3, searched)
    packed = (scale_codes + np.float32(32)).astype(np.uint8)
    low = pack((packed & np.uint8(15)).reshape(2, 8, -1), 4)
    high = pack((packed >> np.uint8(4)).reshape(4, 4, -1), 2)
    put(blocks, "scales", np.concatenate([low, high]))
    put(blocks, "hmask", pack((codes >> np.uint8(2)).reshape(8, 32, -1), 1))
    put(blocks, "qs", pack((codes & np.uint8(3)).reshape(2, 4, 32, -1), 2))


def _write_q6_k(blocks: Blocks, columns: Floats) -> None:
    x = _runs(columns, 16)
    scales, searched = fit_signed(x, 32)
    top = peak(scales)
    step = ratio(-128, np.where(np.abs(top) < TINY, np.float32(0), top))
    blocks["d"] = ratio(1, step)
    scale_codes = np.minimum(np.rint(scales * step), np.float32(127))
    codes = _codes(x, scale_codes * f32(blocks["d"]), -32, 31, searched)
    codes[..., step == 0] = 0
    put(blocks, "scales", scale_codes.astype(np.int8))
    low = (codes & np.uint8(15)).reshape(2, 2, 2, 32, -1)
    put(blocks, "ql", pack(low.swapaxes(1, 2), 4))
    put(blocks, "qh", pack((codes >> np.uint8(4)).reshape(2, 4, 32, -1), 2))


Q2_K = Codec(layout(scales=("u1", 16), qs=runs(2, 32), d="<f2", dmin="<f2"), _read_q2_k, _write_q2_k)
Q3_K = Codec(layout(hmask=runs(1, 32), qs=runs(2, 32), scales=("<u4", 3), d="<f2"), _read_q3_k, _write_q3_k)
Q4_K = Codec(layout(d="<f2", dmin="<f2", scales=("<u4", 3), qs=runs(4, 32)), _read_q4_k, _write_q4_k)
Q5_K = Codec(
    layout(d="<f2", dmin="<f2", scales=("<u4", 3), qh=runs(1, 32), qs=runs(4, 32)), _read_q5_k, _write_q5_k
)
Q6_K = Codec(layout(ql=runs(4, 32), qh=runs(2, 32), scales=("i1", 16), d="<f2"), _read_q6_k, _write_q6_k)
