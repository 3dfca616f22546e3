"""IQ1, IQ2 and IQ3: runs of four or eight elements are entries of a fixed grid, with signs or an offset.

Read only, because writing needs an importance matrix. `grids.npz` holds ggml's grids (iq1s_grid to iq3s_grid)
as bit maps: bit `n` is set if the digits of `n` (base 3 or 8, lowest first) index the levels of an entry.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ggmlb.core.quants.codec import Blocks, Codec, Floats, Ints, expand, f32, layout

_LEVELS = {
    "IQ1_S": (-1, 0, 1),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}
NAMES = tuple(_LEVELS)
"""Types with a grid of their own; IQ1_M has that of IQ1_S."""


@cache
def grid(name: str) -> Ints:
    """Return the grid of a type: each entry's int8 elements as one item, of 4 or 8 bytes."""
    levels = np.array(_LEVELS[name], np.int8)
    base, width = (3, 8) if len(levels) == 3 else (8, 4)
    with np.load(Path(__file__).with_name("grids.npz")) as file:
        numbers = np.flatnonzero(np.unpackbits(file[name], bitorder="little"))
    items: Ints = levels[numbers[:, None] // base ** np.arange(width) % base].view(f"u{width}")[:, 0]
    return items


@cache
def _signs() -> Ints:
    """Eight int8 signs as one item, for each byte of sign bits, the lowest first."""
    negative = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)
    return (1 - 2 * negative).astype(np.int8).view(np.uint64)[:, 0]


@cache
def _even_signs() -> Ints:
    """As `_signs` for 7 bits; the eighth sign makes the number of negatives even."""
    index = np.arange(128, dtype=np.uint8)
    odd = np.bitwise_xor.reduce(np.unpackbits(index[:, None], axis=1), axis=1)
    signs: Ints = _signs()[index | odd << np.uint8(7)]
    return signs


def _look_up(table: Ints, index: Ints) -> Ints:
    """Return the int8 elements of table entries, `(n_blocks, n_elements)`."""
    found = np.take(table, index.reshape(len(index), -1).astype(np.intp), mode="clip")
    return found.view(np.int8)


def _expand_signed(values: Floats, name: str, index: Ints, signs: Ints, scales: Floats) -> None:
    codes = _look_up(grid(name), index)
    codes *= signs
    expand(values, codes, scales)


def _parts(field: Ints, step: int, count: int) -> Ints:
    """Split integers `(n, k)` into numbers of `step` bits, lowest first: `(n, k * count)`."""
    field = np.ascontiguousarray(field)
    out = np.empty((*field.shape, count), field.dtype)
    for i in range(count):
        np.right_shift(field, field.dtype.type(i * step), out=out[..., i])
    out &= field.dtype.type((1 << step) - 1)
    return out.reshape(len(field), -1)


def _high(parts: Ints) -> Ints:
    """Shift parts to the upper bits of indices, above bit 8."""
    return parts.astype(np.uint16) << np.uint16(8)


def _signs_and_scales(words: Ints) -> tuple[Ints, Floats]:
    """Split the words of IQ2_XXS and IQ3_XXS, `(n, 8)`, into four sets of seven signs and a scale + 0.5."""
    signs = _look_up(_even_signs(), _parts(words, 7, 4))
    return signs, f32(words >> np.uint32(28)) + np.float32(0.5)


def _read_iq2_xxs(values: Floats, blocks: Blocks) -> None:
    signs, scales = _signs_and_scales(blocks["qs"][:, 1::2])
    scales *= f32(blocks["d"])[:, None] * np.float32(0.25)
    _expand_signed(values, "IQ2_XXS", _parts(blocks["qs"][:, ::2], 8, 4), signs, scales)


def _read_iq3_xxs(values: Floats, blocks: Blocks) -> None:
    signs, scales = _signs_and_scales(blocks["signs"])
    scales *= f32(blocks["d"])[:, None] * np.float32(0.5)
    _expand_signed(values, "IQ3_XXS", blocks["qs"], signs, scales)


def _iq2_scales(blocks: Blocks) -> Floats:
    scales = f32(_parts(blocks["scales"], 4, 2)) + np.float32(0.5)
    scales *= f32(blocks["d"])[:, None] * np.float32(0.25)
    return scales


def _read_iq2_xs(values: Floats, blocks: Blocks) -> None:
    codes = blocks["qs"]
    signs = _look_up(_even_signs(), codes >> np.uint16(9))
    _expand_signed(values, "IQ2_XS", codes & np.uint16(511), signs, _iq2_scales(blocks))


def _read_iq2_s(values: Floats, blocks: Blocks) -> None:
    index = blocks["qs"] | _high(_parts(blocks["qh"], 2, 4))
    _expand_signed(values, "IQ2_S", index, _look_up(_signs(), blocks["signs"]), _iq2_scales(blocks))


def _read_iq3_s(values: Floats, blocks: Blocks) -> None:
    index = blocks["qs"] | _high(_parts(blocks["qh"], 1, 8))
    scales = f32(_parts(blocks["scales"], 4, 2)) * np.float32(2) + np.float32(1)
    scales *= f32(blocks["d"])[:, None]
    _expand_signed(values, "IQ3_S", index, _look_up(_signs(), blocks["signs"]), scales)


@cache
def _shifted_grid() -> Ints:
    """The grid of IQ1 plus 1/8, then minus 1/8, in units of 1/8."""
    eighths = 8 * grid("IQ1_S").view(np.int8)
    both: Ints = np.concatenate([eighths + np.int8(1), eighths - np.int8(1)]).view(np.uint64)
    return both


def _expand_shifted(values: Floats, index: Ints, scales: Floats) -> None:
    expand(values, _look_up(_shifted_grid(), index), scales * np.float32(0.125))


def _read_iq1_s(values: Floats, blocks: Blocks) -> None:
    words = blocks["qh"]
    shift = np.repeat(words >> np.uint16(15), 4, axis=1) << np.uint16(11)
    scales = f32(words >> np.uint16(12) & np.uint16(7)) * np.float32(2) + np.float32(1)
    scales *= f32(blocks["d"])[:, None]
    _expand_shifted(values, blocks["qs"] | _high(_parts(words, 3, 4)) | shift, scales)


def _read_iq1_m(values: Floats, blocks: Blocks) -> None:
    words = blocks["scales"]
    top = _parts(words, 4, 4)[:, 3::4]  # a digit of the block's scale in each word
    d = f32((top << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16).view(np.float16))
    scales = f32(_parts(words, 3, 4)) * np.float32(2) + np.float32(1)
    scales *= d[:, None]
    _expand_shifted(values, blocks["qs"] | _high(_parts(blocks["qh"], 4, 2)), scales)


def _codec(read: Any, **fields: str | tuple[str, int]) -> Codec:
    return Codec(layout(**fields), read)


IQ2_XXS = _codec(_read_iq2_xxs, d="<f2", qs=("<u4", 16))
IQ2_XS = _codec(_read_iq2_xs, d="<f2", qs=("<u2", 32), scales=("u1", 8))
IQ2_S = _codec(_read_iq2_s, d="<f2", qs=("u1", 32), signs=("u1", 32), qh=("u1", 8), scales=("u1", 8))
IQ3_XXS = _codec(_read_iq3_xxs, d="<f2", qs=("u1", 64), signs=("<u4", 8))
IQ3_S = _codec(_read_iq3_s, d="<f2", qs=("u1", 64), qh=("u1", 8), signs=("u1", 32), scales=("u1", 4))
IQ1_S = _codec(_read_iq1_s, d="<f2", qs=("u1", 32), qh=("<u2", 8))
IQ1_M = _codec(_read_iq1_m, qs=("u1", 32), qh=("u1", 16), scales=("<u2", 4))
