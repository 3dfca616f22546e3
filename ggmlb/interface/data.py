"""Callers' data as flat bytes: to be read, to be filled, or to be used where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb.errors import ArgumentError

Bytes = npt.NDArray[np.uint8]


def as_bytes(data: npt.ArrayLike | bytes | memoryview) -> Bytes:
    """View data as a flat uint8 array, copying only what is not contiguous."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def writable_bytes(call: str, data: npt.NDArray[Any]) -> Bytes:
    """View a caller's array as flat bytes to be filled.

    Raises:
        ArgumentError: It is not a writable C-contiguous NumPy array.
    """
    if not isinstance(data, np.ndarray) or not data.flags.c_contiguous or not data.flags.writeable:
        raise ArgumentError(f"{call}: the data is filled in place; give a writable C-contiguous NumPy array")
    return data.reshape(-1).view(np.uint8)


def host_bytes(array: npt.NDArray[Any], call: str) -> npt.NDArray[np.uint8]:
    """View an array's own memory as flat bytes, for `buffer_from_host_ptr`.

    Raises:
        ArgumentError: It is not a C-contiguous NumPy array.
    """
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise ArgumentError(f"{call}: give a C-contiguous NumPy array, whose memory can be used as it lies")
    return array.reshape(-1).view(np.uint8)
