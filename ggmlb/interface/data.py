"""Views of callers' data as flat bytes, for contiguous and strided transfers."""

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
"""Data that a caller may write to a tensor, as raw bytes."""


class Pieces(NamedTuple):
    """A strided transfer: pieces of equal size, evenly spaced in the tensor and in the data.

    Attributes:
        offset: Start of the first piece in the tensor [bytes]; in the data, it is 0.
        size: Size of a piece [bytes].
        n: Number of pieces.
        stride_tensor: Distance of pieces in the tensor [bytes].
        stride_data: Distance of pieces in the data [bytes].
    """

    offset: int
    size: int
    n: int
    stride_tensor: int
    stride_data: int

    def starts(self) -> Iterator[int]:
        """Yield the start of each piece in the tensor [bytes]."""
        return (self.offset + i * self.stride_tensor for i in range(self.n))

    def cut(self, data: Bytes) -> Iterator[tuple[Bytes, int]]:
        """Yield each piece as a view of the data, and its start in the tensor [bytes]."""
        for i, start in enumerate(self.starts()):
            yield data[i * self.stride_data :][: self.size], start


def whole_bytes(call: str, tensor: Tensor, number: object) -> int:
    """Convert a caller's number of bytes, of any integer type, to a Python int.

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
    """View data as a flat uint8 array; copied if not contiguous.

    Raises:
        ArgumentError: The data has no buffer of bytes (a list, a str, objects).
    """
    if isinstance(data, (bytes, bytearray)):
        return np.frombuffer(data, np.uint8)
    array = None if isinstance(data, (list, tuple, str)) else np.ascontiguousarray(data)
    if array is None or array.dtype.hasobject:
        raise ArgumentError(
            f"{kind_of(data)} has no buffer of bytes; give bytes or an array of numbers, or let set_array "
            "convert"
        )
    return array.reshape(-1).view(np.uint8)


def first_bytes(call: str, tensor: Tensor, data: Source, size: int | None) -> Bytes:
    """View the first `size` bytes (by default all) of the data to write into a tensor.

    Raises:
        ArgumentError: `size` is not a whole number.
        BoundsError: The data has fewer bytes, or `size` is negative.
    """
    raw = as_bytes(data)
    if size is not None and not 0 <= (size := whole_bytes(call, tensor, size)) <= raw.size:
        raise BoundsError(f"{call} on {tensor.describe()}: {size} bytes asked for, the data has {raw.size}")
    return raw[:size]


def writable_bytes(call: str, data: npt.NDArray[Any]) -> Bytes:
    """View a caller's output array as flat bytes.

    Raises:
        ArgumentError: It is not a writable C-contiguous NumPy array, or holds objects.
    """
    fits = isinstance(data, np.ndarray) and data.flags.c_contiguous and data.flags.writeable
    if not fits or data.dtype.hasobject:
        raise ArgumentError(f"{call}: the data is written in place; give a writable C-contiguous NumPy array")
    return data.reshape(-1).view(np.uint8)


def host_bytes(array: npt.NDArray[Any], call: str) -> npt.NDArray[np.uint8]:
    """View an array's own memory as flat bytes, for `buffer_from_host_ptr`.

    Raises:
        ArgumentError: It is not a C-contiguous NumPy array, or holds objects.
    """
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or array.dtype.hasobject:
        raise ArgumentError(f"{call}: the array's memory is used in place; give a C-contiguous NumPy array")
    return array.reshape(-1).view(np.uint8)
