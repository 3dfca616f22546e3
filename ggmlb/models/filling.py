"""Tensors of mapped files in the memory of devices: in place, or copied some rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType, dequantize, quantize
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, Device, tensor_alloc
from ggmlb.models.mapped_file import Extent
from ggmlb.parallel.meta import MetaBuffer

SLICE: Final = 1 << 22
"""Bytes copied or converted at a time."""

GROUP: Final = 64
"""Slices have a multiple of this many rows, because memory may interleave groups of rows."""


def map_tensors(device: Device, tensors: Iterable[tuple[Tensor, Extent]]) -> list[Buffer]:
    """Place tensors inside the mapped files, as far as the device can use them there.

    Args:
        device: The device.
        tensors: Tensors in no buffer yet, with their places. Those of another type than in the file, or that
            are not aligned as the device needs it, are left in no buffer.

    Returns:
        A buffer for each file; empty where the device cannot use mapped files.
    """
    if not (device.caps.buffer_from_host_ptr and device.caps.mmap_support):
        return []
    by_file: dict[int, list[tuple[Tensor, Extent]]] = {}
    for tensor, extent in tensors:
        if extent.dtype is tensor.dtype:
            by_file.setdefault(id(extent.memory), []).append((tensor, extent))
    buffers = []
    for inside in by_file.values():
        largest = max(tensor.nbytes for tensor, _ in inside)
        buffer = device.buffer_from_host_ptr(inside[0][1].memory, largest)
        aligned = [(t, extent) for t, extent in inside if extent.offset % buffer.alignment == 0]
        for tensor, extent in aligned:
            tensor_alloc(buffer, tensor, extent.offset)
        if aligned:
            buffers.append(buffer)
        else:
            buffer.free()
    return buffers


def fill(tensor: Tensor, parts: Sequence[Extent]) -> None:
    """Write the tensors of a file into a weight, one below the other."""
    pieces = (converted(rows, part.dtype, tensor.dtype) for part in parts for rows in slices(part))
    if isinstance(tensor.buffer, MetaBuffer):  # it reads a weight that is cut back for each piece
        whole = [piece.reshape(-1) for piece in pieces]
        tensor.set(whole[0] if len(whole) == 1 else np.concatenate(whole))
        return
    offset = 0
    for piece in pieces:
        tensor.set(piece, offset)
        offset += piece.nbytes


def slices(extent: Extent, nbytes: int | None = None) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield slices of a tensor's rows; release a slice's pages before the next.

    Args:
        extent: The tensor.
        nbytes: Size of a slice [bytes], `SLICE` by default; less than `GROUP` rows are not cut.
    """
    rows = extent.rows()
    step = max((nbytes or SLICE) // max(rows.shape[1], 1) // GROUP, 1) * GROUP
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        yield piece
        extent.release(start * rows.shape[1], piece.nbytes)


def values_of(rows: npt.NDArray[np.uint8], dtype: DType) -> npt.NDArray[Any]:
    """Return rows of bytes as numbers; blocks become float32."""
    return dequantize(rows, dtype) if dtype.is_quantized else rows.view(dtype.numpy)


def converted(rows: npt.NDArray[np.uint8], dtype: DType, to: DType) -> npt.NDArray[np.uint8]:
    """Return rows of bytes in another type."""
    return rows if dtype is to else quantize(values_of(rows, dtype), to)
