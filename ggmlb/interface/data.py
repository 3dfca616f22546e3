"""Callers' data as flat bytes: to be read, to be filled, or to be used where it lies; whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import ArgumentError, BoundsError, kind_of
from ggmlb.core.tensor import Tensor

Bytes = npt.NDArray[np.uint8]

Source = npt.ArrayLike | bytes | memoryview
"""What a caller may give to be written: its raw bytes count."""


class Pieces(NamedTuple):
    """What a strided transfer moves: pieces of equal size, evenly spaced in the tensor and in the data.

    Attributes:
        offset: Where the first begins in the tensor [bytes]; in the data, it begins at 0.
        size: Of each [bytes].
        n: How many.
        stride_tensor: From one to the next in the tensor [bytes].
        stride_data: From one to the next in the data [bytes].
    """

    offset: int
    size: int
    n: int
    stride_tensor: int
    stride_data: int

    def starts(self) -> Iterator[int]:
        """Yield where each begins in the tensor [bytes]."""
        return (self.offset + i * self.stride_tensor for i in range(self.n))

    def cut(self, data: Bytes) -> Iterator[tuple[Bytes, int]]:
        """Yield each as a view of the data, with where it begins in the tensor [bytes]."""
        for i, start in enumerate(self.starts()):
            yield data[i * self.stride_data :][: self.size], start


def whole_bytes(call: str, tensor: Tensor, number: object) -> int:
    """Return a caller's number of bytes, of any integer type, as Python's.

    Raises:
        ArgumentError: It is not a whole number.
    """
    try:
        return index(number)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(
            f"{call} on {tensor.describe()}: {number!r} is no offset, size, count or stride; give whole "
            "numbers of bytes"
        ) from None


def as_bytes(data: Source) -> Bytes:
    """View data as a flat uint8 array, copying only what is not contiguous.

    Raises:
        ArgumentError: It has no bytes of its own, as lists, texts and objects.
    """
    if isinstance(data, (bytes, bytearray)):
        return np.frombuffer(data, np.uint8)
    array = None if isinstance(data, (list, tuple, str)) else np.ascontiguousarray(data)
    if array is None or array.dtype.hasobject:
        raise ArgumentError(
            f"{kind_of(data)} has no bytes of its own; give bytes or an array of numbers, or let set_array "
            "convert"
        )
    return array.reshape(-1).view(np.uint8)


def first_bytes(call: str, tensor: Tensor, data: Source, size: int | None) -> Bytes:
    """View the first `size` bytes of what is to be written into a tensor, by default all.

    Raises:
        ArgumentError: `size` is no whole number.
        BoundsError: There are fewer, or `size` is negative.
    """
    raw = as_bytes(data)
    if size is not None and not 0 <= (size := whole_bytes(call, tensor, size)) <= raw.size:
        raise BoundsError(f"{call} on {tensor.describe()}: {size} bytes asked for, the data has {raw.size}")
    return raw[:size]


def writable_bytes(call: str, data: npt.NDArray[Any]) -> Bytes:
    """View a caller's array as flat bytes to be filled.

    Raises:
        ArgumentError: It is not a writable C-contiguous NumPy array, or holds objects.
    """
    fits = isinstance(data, np.ndarray) and data.flags.c_contiguous and data.flags.writeable
    if not fits or data.dtype.hasobject:
        raise ArgumentError(f"{call}: the data is filled in place; give a writable C-contiguous NumPy array")
    return data.reshape(-1).view(np.uint8)


def host_bytes(array: npt.NDArray[Any], call: str) -> npt.NDArray[np.uint8]:
    """View an array's own memory as flat bytes, for `buffer_from_host_ptr`.

    Raises:
        ArgumentError: It is not a C-contiguous NumPy array, or holds objects.
    """
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or array.dtype.hasobject:
        raise ArgumentError(f"{call}: give a C-contiguous NumPy array, whose memory can be used as it lies")
    return array.reshape(-1).view(np.uint8)
