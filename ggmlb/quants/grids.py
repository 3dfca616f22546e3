"""IQ1, IQ2 and IQ3: runs of four or eight elements are entries of a fixed grid, with signs or an offset.

Read only: ggml writes them with an importance matrix alone. The grids are those of the `gguf` package.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ggmlb.quants.codec import Blocks, Bytes, Codec, Floats, Ints, expand, f32, layout


@cache
def _grid(name: str) -> Ints:
    """The grid of a type: each entry's int8 elements as one item, of 4 or 8 bytes."""
    import gguf.quants

    codec = getattr(gguf.quants, name)
    codec.init_grid()
    entries = codec.grid[0, 0].astype(np.int8)
    items: Ints = entries.view(f"u{entries.shape[1]}")[:, 0]
    return items


@cache
def _signs() -> Ints:
    """Eight int8 signs as one item, for each byte of sign bits, the lowest first."""
    negative = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)
    return (1 - 2 * negative).astype(np.int8).view(np.uint64)[:, 0]


@cache
def _even_signs() -> Ints:
    """The same for 7 bits; the eighth sign makes the number of negatives even."""
    index = np.arange(128, dtype=np.uint8)
    odd = np.bitwise_xor.reduce(np.unpackbits(index[:, None], axis=1), axis=1)
    signs: Ints = _signs()[index | odd << np.uint8(7)]
    return signs


def _look_up(table: Ints, index: Ints) -> Ints:
    """Return the int8 elements of table entries, `(n_blocks, n_elements)`."""
    found = np.take(table, index.reshape(len(index), -1).astype(np.intp), mode="clip")
    return found.view(np.int8)


def _expand_signed(values: Floats, grid: str, index: Ints, signs: Ints, scales: Floats) -> None:
    codes = _look_up(_grid(grid), index)
    codes *= signs
    expand(values, codes, scales)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low and high halves of bytes `(n, k)` as `(n, 2 k)`."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(len(packed), -1)


def _bytes(field: Ints) -> Bytes:
    return np.ascontiguousarray(field).view(np.uint8)


_SEVENS = np.array([0, 7, 14, 21], np.uint32)
"""Where in a word the four sets of sign bits start; a scale lies above them."""


def _signs_and_scales(words: Ints) -> tuple[Ints, Floats]:
    """Take apart the words of IQ2_XXS and IQ3_XXS, `(n, 8)`, into signs and scales counted in halves."""
    signs = _look_up(_even_signs(), words[..., None] >> _SEVENS & np.uint32(127))
    return signs, f32(words >> np.uint32(28)) + np.float32(0.5)


def _read_iq2_xxs(values: Floats, blocks: Blocks) -> None:
    signs, scales = _signs_and_scales(blocks["qs"][:, 1::2])
    scales *= f32(blocks["d"])[:, None] * np.float32(0.25)
    _expand_signed(values, "IQ2_XXS", _bytes(blocks["qs"][:, ::2]), signs, scales)


def _read_iq3_xxs(values: Floats, blocks: Blocks) -> None:
    signs, scales = _signs_and_scales(blocks["signs"])
    scales *= f32(blocks["d"])[:, None] * np.float32(0.5)
    _expand_signed(values, "IQ3_XXS", blocks["qs"], signs, scales)


def _iq2_scales(blocks: Blocks) -> Floats:
    scales = f32(_nibbles(blocks["scales"])) + np.float32(0.5)
    scales *= f32(blocks["d"])[:, None] * np.float32(0.25)
    return scales


def _read_iq2_xs(values: Floats, blocks: Blocks) -> None:
    codes = blocks["qs"]
    signs = _look_up(_even_signs(), codes >> np.uint16(9))
    _expand_signed(values, "IQ2_XS", codes & np.uint16(511), signs, _iq2_scales(blocks))


def _read_iq2_s(values: Floats, blocks: Blocks) -> None:
    high = blocks["qh"][..., None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    index = blocks["qs"] | high.reshape(len(blocks), -1).astype(np.uint16) << np.uint16(8)
    _expand_signed(values, "IQ2_S", index, _look_up(_signs(), blocks["signs"]), _iq2_scales(blocks))


def _read_iq3_s(values: Floats, blocks: Blocks) -> None:
    high = np.unpackbits(_bytes(blocks["qh"]), axis=-1, bitorder="little")
    index = blocks["qs"] | high.astype(np.uint16) << np.uint16(8)
    scales = f32(_nibbles(blocks["scales"])) * np.float32(2) + np.float32(1)
    scales *= f32(blocks["d"])[:, None]
    _expand_signed(values, "IQ3_S", index, _look_up(_signs(), blocks["signs"]), scales)


def _expand_shifted(values: Floats, index: Ints, negative: Ints, scales: Floats) -> None:
    """Add 1/8 to each entry of the grid of IQ1, or take it away: 8 * entry + 1 or - 1 is an integer."""
    codes = _look_up(_grid("IQ1_S"), index)
    codes <<= np.int8(3)
    eights = codes.reshape(len(codes), -1, 8)
    eights += (1 - 2 * negative.astype(np.int8)).reshape(len(codes), -1, 1)
    expand(values, codes, scales * np.float32(0.125))


def _read_iq1_s(values: Floats, blocks: Blocks) -> None:
    words = blocks["qh"]
    high = words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    index = blocks["qs"] | high.reshape(len(blocks), -1) << np.uint16(8)
    scales = f32(words >> np.uint16(12) & np.uint16(7)) * np.float32(2) + np.float32(1)
    scales *= f32(blocks["d"])[:, None]
    _expand_shifted(values, index, np.repeat(words >> np.uint16(15), 4, axis=1), scales)


def _read_iq1_m(values: Floats, blocks: Blocks) -> None:
    words = blocks["scales"]
    bits = words >> np.array([12, 8, 4, 0], np.uint16) & np.array([0xF, 0xF0, 0xF00, 0xF000], np.uint16)
    d = f32(np.bitwise_or.reduce(bits, axis=1).view(np.float16))
    scales = f32(words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7))
    scales = (scales * np.float32(2) + np.float32(1)).reshape(len(blocks), -1) * d[:, None]
    high = _nibbles(blocks["qh"])
    index = blocks["qs"] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    _expand_shifted(values, index, high >> np.uint8(3), scales)


def _codec(read: Any, **fields: str | tuple[str, int]) -> Codec:
    return Codec(layout(**fields), read)


IQ2_XXS = _codec(_read_iq2_xxs, d="<f2", qs=("<u4", 16))
IQ2_XS = _codec(_read_iq2_xs, d="<f2", qs=("<u2", 32), scales=("u1", 8))
IQ2_S = _codec(_read_iq2_s, d="<f2", qs=("u1", 32), signs=("u1", 32), qh=("u1", 8), scales=("u1", 8))
IQ3_XXS = _codec(_read_iq3_xxs, d="<f2", qs=("u1", 64), signs=("<u4", 8))
IQ3_S = _codec(_read_iq3_s, d="<f2", qs=("u1", 64), qh=("u1", 8), signs=("u1", 32), scales=("u1", 4))
IQ1_S = _codec(_read_iq1_s, d="<f2", qs=("u1", 32), qh=("<u2", 8))
IQ1_M = _codec(_read_iq1_m, qs=("u1", 32), qh=("u1", 16), scales=("<u2", 4))
