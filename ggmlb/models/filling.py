"""Placement of a file's tensors in device memory: in place, or copied in slices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import Lock, Thread
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType, dequantize, quantize
from ggmlb.core.errors import ModelError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, Device, tensor_alloc
from ggmlb.models.mapped_file import Extent
from ggmlb.parallel.meta import MetaBuffer

SLICE: Final = 1 << 22
"""Bytes copied or converted at a time."""

MAX_THREADS: Final = 8
"""More do not copy faster."""

GROUP: Final = 64
"""Slices have a multiple of this many rows, because memory may interleave groups of rows."""


def map_tensors(device: Device, tensors: Iterable[tuple[Tensor, Extent]]) -> list[Buffer]:
    """Place tensors inside their mapped files, not copied, if the device can compute from mapped memory.

    Args:
        device: The device.
        tensors: Unplaced tensors with their extents in files. Tensors of another type than in the file, or
            not aligned for the device, stay unplaced.

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


def fill(tensors: Iterable[tuple[Tensor, Sequence[Extent]]]) -> None:
    """Copy or convert tensors of files into weights; several tensors of one weight are stacked along rows."""
    copies: list[Callable[[], None]] = []
    for tensor, parts in tensors:
        buffer = tensor.placed("fill")
        if isinstance(buffer, MetaBuffer):  # a partial write would read the split weight back
            pieces = [
                converted(rows, part.dtype, tensor.dtype, tensor.name).reshape(-1)
                for part in parts
                for rows in slices(part)
            ]
            tensor.set(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
            continue
        own = list(_copies(tensor, parts))
        if not buffer.buft.device.buffer_type.is_host:
            _run_in_order(own)
        elif any(part.rows().shape[0] % GROUP for part in parts[:-1]):  # slices share groups of rows
            copies.append(partial(_run_in_order, own))
        else:
            copies += own
    _run(copies)


def _run_in_order(copies: Iterable[Callable[[], None]]) -> None:
    for copy in copies:
        copy()


def _copies(tensor: Tensor, parts: Sequence[Extent]) -> Iterator[Callable[[], None]]:
    """Yield functions that each write some rows of a weight."""
    offset = 0
    for part in parts:
        row_size = tensor.dtype.row_size(part.shape[-1])
        for start, stop in _cuts(part):
            yield partial(_copy, tensor, offset + start * row_size, part, start, stop)
        offset += part.rows().shape[0] * row_size


def _copy(tensor: Tensor, offset: int, part: Extent, start: int, stop: int) -> None:
    rows = part.rows()[start:stop]
    tensor.set(converted(rows, part.dtype, tensor.dtype, tensor.name), offset)
    part.release(start * rows.shape[1], rows.nbytes)


def _run(copies: Sequence[Callable[[], None]]) -> None:
    """Run functions in any order, on as many threads as there are processors and the system allows."""
    todo, lock = iter(copies), Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                copy = next(todo, None)
            if copy is None:
                return
            try:
                copy()
            except BaseException as error:
                errors.append(error)

    threads = []
    for _ in range(min(os.cpu_count() or 1, len(copies), MAX_THREADS) - 1):
        thread = Thread(target=work, name="ggmlb fill")
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads
            break
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def slices(extent: Extent, nbytes: int | None = None) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield a tensor's rows in slices of about `nbytes`; the system may reclaim a slice's pages after use.

    Args:
        extent: The tensor.
        nbytes: Size of a slice [bytes], `SLICE` by default; less than `GROUP` rows are not cut.
    """
    rows = extent.rows()
    for start, stop in _cuts(extent, nbytes):
        piece = rows[start:stop]
        yield piece
        extent.release(start * rows.shape[1], piece.nbytes)


def _cuts(extent: Extent, nbytes: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the rows at which slices begin and end."""
    n_rows, row_size = extent.rows().shape
    step = max((nbytes or SLICE) // max(row_size, 1) // GROUP, 1) * GROUP
    return ((start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def values_of(rows: npt.NDArray[np.uint8], dtype: DType) -> npt.NDArray[Any]:
    """View the bytes of a tensor's rows as numbers; if the type is quantised, dequantise to float32."""
    return dequantize(rows, dtype) if dtype.is_quantized else rows.view(dtype.numpy)


def converted(rows: npt.NDArray[np.uint8], dtype: DType, to: DType, name: str) -> npt.NDArray[np.uint8]:
    """Convert the bytes of a tensor's rows from type `dtype` to type `to`; `name` is for error messages.

    Raises:
        ModelError: A value is NaN or infinite, and blocks have no such values.
    """
    if dtype is to:
        return rows
    values = values_of(rows, dtype)
    if to.is_quantized and not np.isfinite(values).all():
        n = values.size - np.count_nonzero(np.isfinite(values))
        raise ModelError(
            f"tensor {name!r} has {n} NaN or infinite values in a slice of {values.size}, which {to.name} "
            "cannot store; check the model, or keep the tensor in a floating-point type"
        )
    return quantize(values, to)
