"""Look-up of the unevenly spaced levels of four-bit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ggmlb.core.quants.codec import Bytes, Ints

Table = npt.NDArray[np.uint16]


def pair_table(levels: tuple[int, ...]) -> Table:
    """Return a table of two levels (int8) by a byte of two codes, which halves the look-ups."""
    one = np.array(levels, np.int8).view(np.uint8).astype(np.uint16)
    table = np.zeros((16, 256), np.uint16)
    table[:, :16] = one[:, None] << np.uint16(8) | one
    return table.reshape(-1)


def look_up(table: Table, codes: Bytes) -> Ints:
    """Return the levels of codes, int8 of the same shape."""
    pairs = codes.view("<u2")
    return np.take(table, pairs.astype(np.intp), mode="clip").astype("<u2", copy=False).view(np.int8)
