"""Codec, the description of a block format, and the unpacking functions of all readers.

Packed codes are read as *planes*, bytes of shape `(n_planes, n_blocks, width)`, so that one NumPy call masks
or shifts many bytes; `blockwise` then restores the order of the elements. Bytes are moved as items of a void
type, which NumPy copies about five times as fast as short rows of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[Any]
"""`(n_blocks,)` of a structured type, the codec's layout."""

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[Any]
Floats = npt.NDArray[Any]
"""float32; NumPy's type hints mistake many float32 expressions for float64."""


@dataclass(frozen=True, slots=True)
class Codec:
    """The layout, reader and writer of one block format.

    Attributes:
        layout: The fields of a block.
        read: `read(values, blocks)` fills float32 `(n_blocks, block_size)`.
        write: `write(blocks, columns)` fills the blocks from float32 `(block_size, n_blocks)`, two blocks
            or more; may overwrite `columns`. `None` where ggml needs an importance matrix.
        levels: Values of 4-bit codes, if not the codes themselves.
    """

    layout: np.dtype[Any]
    read: Callable[[Floats, Blocks], None]
    write: Callable[[Blocks, Floats], None] | None = None
    levels: tuple[int, ...] = ()

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each field in a block."""
        return {name: field[1] for name, field in (self.layout.fields or {}).items()}


def runs(k: int, width: int) -> tuple[str, int]:
    """Return the `(type, count)` that `layout` takes for a field: `k` strings of `width` bytes."""
    return f"V{width}", k


def layout(**fields: str | tuple[str, int]) -> np.dtype[Any]:
    """Return a block's structured dtype, unpadded; each field is a type or, for an array, `(type, count)`."""
    return np.dtype(
        [
            (name, spec) if isinstance(spec, str) else (name, spec[0], (spec[1],))
            for name, spec in fields.items()
        ]
    )


def f32(field: npt.NDArray[Any]) -> Floats:
    """Return a field of numbers as float32."""
    return field.astype(np.float32)


def planes(field: Blocks) -> Bytes:
    """Return a field of `(n_blocks, k)` byte strings, transposed to uint8 `(k, n_blocks, width)`."""
    out = np.ascontiguousarray(field.T)
    return out.view(np.uint8).reshape(*out.shape, -1)


def blockwise(codes: Bytes) -> Bytes:
    """Reorder planes, bytes of shape `(k, n_blocks, width)`, to `(n_blocks, k, width)`, block after block."""
    k, n, width = codes.shape
    out = np.empty((n, k), f"V{width}")
    for i, plane in enumerate(codes.reshape(k, n * width).view(out.dtype)):
        out[:, i] = plane
    return out.view(np.uint8).reshape(n, k, width)


def split(packed: Bytes, n_bits: int) -> Bytes:
    """Split each byte of planes `(k, n, width)` into `(k, 8 / n_bits, n, width)` codes, lowest bits first."""
    k, n, width = packed.shape
    out = np.empty((k, 8 // n_bits, n, width), np.uint8)
    for i in range(1, out.shape[1]):
        np.right_shift(packed, np.uint8(i * n_bits), out=out[:, i])
    mask = np.uint8((1 << n_bits) - 1)
    np.bitwise_and(packed, mask, out=out[:, 0])
    if n_bits < 4:
        out[:, 1:-1] &= mask
    return out


def expand(values: Floats, codes: Ints, scale: Floats, minimum: Floats | None = None) -> None:
    """Fill `values` with `codes * scale - minimum`.

    Args:
        values: `(n_blocks, block_size)`.
        codes: Equally many integers, in the order of the elements.
        scale: One for each run of equal length: `(n_blocks,)` or `(n_blocks, n_runs)`.
        minimum: Like `scale`.
    """
    n = len(values)
    parts = values.reshape(n, scale.size // n, -1)
    np.copyto(parts, codes.reshape(parts.shape))
    parts *= scale.reshape(n, -1, 1)
    if minimum is not None:
        parts -= minimum.reshape(n, -1, 1)


def pair_table(levels: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """Return a table to decode two neighbouring 4-bit codes in one look-up."""
    one = np.array(levels, np.int8).view(np.uint8).astype(np.uint16)
    table = np.zeros((16, 256), np.uint16)
    table[:, :16] = one[:, None] << np.uint16(8) | one
    return table.reshape(-1)


def look_up(table: npt.NDArray[np.uint16], codes: Bytes) -> Ints:
    """Decode 4-bit codes by a `pair_table`: int8 of the same shape."""
    pairs = codes.view("<u2")
    return np.take(table, pairs.astype(np.intp), mode="clip").astype("<u2", copy=False).view(np.int8)
