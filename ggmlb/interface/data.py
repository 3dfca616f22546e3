"""Views of callers' data as flat bytes, for contiguous and strided transfers."""

from __future__ import annotations

from collections.abc import Iterator
from operator import index
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import AllocationError, ArgumentError, BoundsError, kind_of
from ggmlb.core.tensor import Tensor

Bytes = npt.NDArray[np.uint8]

Source = npt.ArrayLike | bytes | memoryview
"""Data that a caller may write to a tensor, as raw bytes."""

NEW: Final = np.empty(0, np.uint8)
"""Placeholder: the transfer allocates the array."""


class Pieces(NamedTuple):
    """A strided transfer: pieces of equal size, at equal distances in the tensor and in the data.

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

    def checked(self, call: str, tensor: Tensor, data: Bytes) -> Pieces:
        """Return the pieces as Python ints, checked against `data`; errors begin with `call`.

        Raises:
            BoundsError: A number is negative, or a piece ends beyond the data.
        """
        pieces = Pieces(*map(index, self))
        if min(pieces) < 0:
            raise BoundsError(
                f"{call} on {tensor.describe()}: offset, size, count and strides must not be negative"
            )
        needed = pieces.extent(pieces.stride_data)
        if needed > data.size:
            raise BoundsError(
                f"{call} on {tensor.describe()}: the data has {data.size} bytes, {needed} are needed"
            )
        return pieces

    def extent(self, stride: int) -> int:
        """Return the bytes from the first piece's start to the last's end, pieces `stride` bytes apart."""
        return (self.n - 1) * stride + self.size if self.n else 0

    def starts(self) -> Iterator[int]:
        """Yield the start of each piece in the tensor [bytes]."""
        return (self.offset + i * self.stride_tensor for i in range(self.n))

    def cut(self, data: Bytes) -> Iterator[tuple[Bytes, int]]:
        """Yield each piece as a view of the data, and its start in the tensor [bytes]."""
        for i, start in enumerate(self.starts()):
            yield data[i * self.stride_data :][: self.size], start


def as_bytes(data: Source) -> Bytes:
    """View data as a flat uint8 array; copied if not contiguous.

    Raises:
        ArgumentError: The data is not raw bytes (a list, a str, objects).
    """
    if isinstance(data, (bytes, bytearray)):
        return np.frombuffer(data, np.uint8)
    array = None if isinstance(data, (list, tuple, str)) else np.ascontiguousarray(data)
    if array is None or array.dtype.hasobject:
        raise ArgumentError(
            f"{kind_of(data)} is not raw bytes; give bytes or a numeric array, or convert values by set_array"
        )
    return array.reshape(-1).view(np.uint8)


def new_bytes(call: str, tensor: Tensor, size: int) -> Bytes:
    """Return a new, uninitialised array for `size` bytes of a tensor; errors begin with `call`.

    Raises:
        AllocationError: There is not enough memory.
    """
    try:
        return np.empty(size, np.uint8)
    except MemoryError as error:
        raise AllocationError(
            f"{call} on {tensor.describe()}: {error}; read it in parts", asked=size
        ) from None


def host_bytes(array: Source, call: str, *, is_written: bool = False) -> Bytes:
    """View an array's own memory as flat bytes, to be read or, if `is_written`, written; errors name `call`.

    Raises:
        ArgumentError: It is not a C-contiguous NumPy array, holds objects, or is read-only but to be written.
    """
    is_flat = isinstance(array, np.ndarray) and array.flags.c_contiguous and not array.dtype.hasobject
    if not isinstance(array, np.ndarray) or not is_flat or (is_written and not array.flags.writeable):
        use, kind = ("written", "writable C-contiguous") if is_written else ("used", "C-contiguous")
        raise ArgumentError(f"{call}: {kind_of(array)} cannot be {use} in place; give a {kind} NumPy array")
    return array.reshape(-1).view(np.uint8)
