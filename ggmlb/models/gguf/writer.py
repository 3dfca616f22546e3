"""GGUF files written from metadata and tensors, a part of a tensor at a time.

Source: ggml's docs/gguf.md, version 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from struct import Struct, pack
from typing import IO, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ArgumentError, DTypeError, ShapeError, kind_of
from ggmlb.core.tensor import Tensor
from ggmlb.models.gguf.metadata import GgufType, Metadata, RawValue
from ggmlb.models.gguf.reader import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME
from ggmlb.system.replaced_file import replaced

Bytes = npt.NDArray[np.uint8]

Writable = bool | int | float | str | np.generic | npt.NDArray[Any] | Sequence[Any] | RawValue
"""A metadata value to write."""

Blocks = tuple[Bytes | Iterable[Bytes], DType | str, Sequence[int]]
"""Bytes (one array, or several pieces), their type, extents in ggml order."""

TensorData = npt.NDArray[Any] | Tensor | Blocks

VERSION: Final = 3

MAX_TENSOR_NAME: Final = 63
"""Longest tensor name that ggml reads [bytes] (GGML_MAX_NAME, with its end)."""

PIECE: Final = 1 << 24
"""Bytes written at a time."""

_FORMATS: Final = dict(
    zip(GgufType, ["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "-", "-", "<Q", "<q", "<d"], strict=True)
)
_KINDS: Final = {
    kind.dtype: kind for kind in GgufType if kind not in (GgufType.BOOL, GgufType.STRING, GgufType.ARRAY)
}

_INTEGERS: Final = (
    (GgufType.INT32, -(1 << 31), 1 << 31), (GgufType.UINT32, 0, 1 << 32),
    (GgufType.INT64, -(1 << 63), 1 << 63), (GgufType.UINT64, 0, 1 << 64),
)  # fmt: skip
"""Kinds of integers with their ranges, in the order in which lists try them."""


def save_gguf(
    path: str | os.PathLike[str], metadata: Mapping[str, Writable], tensors: Mapping[str, TensorData]
) -> None:
    """Write a GGUF file (version 3) from `metadata` values by key and `tensors` by name.

    It is written to a temporary file in the same folder, which then takes the name: on an error, an earlier
    file of that name stays. Tensors are written in pieces, so that memory-mapped ones need little memory.

    Args:
        path: The file.
        metadata: Values by key. Whole numbers become uint32, int32, uint64 or int64, the first in whose range
            they are; floats float32; NumPy's numbers and arrays keep their type; lists become arrays. Those
            of an open file (`file.metadata`, or `file.metadata | {...}`) keep their types.
            `general.alignment` is obeyed, 32 bytes by default.
        tensors: By name: NumPy arrays, placed tensors, or `(blocks, type, ne)` with the bytes as one array of
            uint8 or an iterable of several.

    Raises:
        ArgumentError: A key, name or value that the format does not have.
        DTypeError: ggml has no such type.
        ShapeError: More than four dimensions, rows that are not whole blocks, or more or fewer bytes than the
            extents say.
        ModelError: The file cannot be written.

    Source: gguf_write_to_file.
    """
    entries = [_entry(name, data) for name, data in tensors.items()]
    alignment = _alignment(metadata)
    header = bytearray(_HEADER.pack(MAGIC, VERSION, len(entries), len(metadata)))
    for key in metadata:
        value = metadata.raw(key) if isinstance(metadata, Metadata) else metadata[key]
        header += _name(key, "key", 1, MAX_NAME - 1) + _encoded(key, value)
    offset = 0
    for entry in entries:
        n_dims = len(entry.ne)
        header += _name(entry.name, "tensor name", 0, MAX_TENSOR_NAME)
        header += pack(f"<I{n_dims}QIQ", n_dims, *entry.ne, entry.dtype, offset)
        offset += entry.nbytes + -entry.nbytes % alignment
    header += bytes(-len(header) % alignment)
    with replaced(path) as file:
        file.write(header)
        for entry in entries:
            _write(file, entry)
            file.write(bytes(-entry.nbytes % alignment))


_HEADER: Final = Struct("<4sIQQ")


# -- metadata ------------------------------------------------------------------------------------


def _alignment(metadata: Mapping[str, Writable]) -> int:
    key = "general.alignment"
    found: Any = metadata.get(key, DEFAULT_ALIGNMENT)
    if isinstance(found, RawValue):
        found = found.value()
    if isinstance(found, np.integer):
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1 or found & (found - 1):
        raise ArgumentError(f"save_gguf: {key} is {found!r}; give a power of two, as 32")
    return found


def _name(name: object, what: str, least: int, most: int) -> bytes:
    """Encode a key or a tensor's name."""
    if not isinstance(name, str):
        raise ArgumentError(f"save_gguf: a {what} is {kind_of(name)}; give text")
    raw = _utf8(name, f"the {what} {name!r}")
    if not least <= len(raw) <= most:
        raise ArgumentError(
            f"save_gguf: a {what} has {len(raw):,} bytes; give {least} to {most:,}: {name[:80]!r}"
        )
    return pack("<Q", len(raw)) + raw


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"save_gguf: {what} cannot be written in UTF-8: {error}") from None


def _encoded(key: str, value: object) -> bytes:
    """Encode a value, with its kind before it."""
    what = f"the value of {key!r}"
    if isinstance(value, RawValue):
        return value.encoded()
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ArgumentError(f"save_gguf: {what} is an array of {value.ndim} dimensions; give one of 1")
        kind = _kind_of_numbers(value.dtype, what)
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return pack("<IIQ", GgufType.ARRAY, kind, value.size) + little.tobytes()
    if isinstance(value, (list, tuple)):
        kind = _kind_of_items(value, what)
        items = b"".join(_payload(kind, item, what) for item in value)
        return pack("<IIQ", GgufType.ARRAY, kind, len(value)) + items
    kind = _kind_of(value, what)
    return pack("<I", kind) + _payload(kind, value, what)


def _payload(kind: GgufType, value: Any, what: str) -> bytes:
    if kind is GgufType.STRING:
        raw = _utf8(value, what)
        return pack("<Q", len(raw)) + raw
    try:
        return pack(_FORMATS[kind], value)
    except OverflowError:  # floats only: integers are in range
        raise ArgumentError(
            f"save_gguf: {what}: {value} is too large for float32; give numpy.float64"
        ) from None


def _kind_of(value: object, what: str) -> GgufType:
    if isinstance(value, (bool, np.bool_)):
        return GgufType.BOOL
    if isinstance(value, np.generic):
        return _kind_of_numbers(value.dtype, what)
    if isinstance(value, str):
        return GgufType.STRING
    if isinstance(value, float):
        return GgufType.FLOAT32
    if isinstance(value, int):
        order = (1, 0, 3, 2)  # unsigned first
        for kind, least, end in (_INTEGERS[i] for i in order):
            if least <= value < end:
                return kind
        raise ArgumentError(f"save_gguf: {what} is {value}; the format has numbers of at most 64 bits")
    raise ArgumentError(
        f"save_gguf: {what} is {kind_of(value)}; give a number, text, truth value, or a list or array"
    )


def _kind_of_numbers(dtype: np.dtype[Any], what: str) -> GgufType:
    if dtype == np.bool_:
        return GgufType.BOOL
    kind = _KINDS.get(dtype.newbyteorder("<"))
    if kind is None:
        raise ArgumentError(f"save_gguf: {what} has numbers of type {dtype}, which the format does not have")
    return kind


def _kind_of_items(items: Sequence[Any], what: str) -> GgufType:
    """Return the kind of the elements of a list."""
    if not items:
        raise ArgumentError(f"save_gguf: {what} is an empty list of no type; give an empty NumPy array")
    kinds = {_kind_of(item, what) for item in items}
    if len(kinds) == 1 and not all(type(item) is int for item in items):
        return kinds.pop()
    if all(type(item) is int for item in items):
        least, most = min(items), max(items)
        for kind, first, end in _INTEGERS:
            if first <= least and most < end:
                return kind
    elif all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items):
        return GgufType.FLOAT32
    names = ", ".join(sorted(kind.name.lower() for kind in kinds))
    raise ArgumentError(f"save_gguf: {what} is a list of several types, {names}; give one")


# -- tensors -------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Its name.
        dtype: Its type.
        ne: Extents in ggml order.
        nbytes: Its size [bytes].
        pieces: Returns its bytes in pieces.
    """

    name: str
    dtype: DType
    ne: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterable[Bytes]]


def _entry(name: str, data: object) -> _Entry:
    if isinstance(data, Tensor):
        ne = data.ne[: data.n_dims]
        tensor = data
        tensor.placed("save_gguf")
        return _sized(name, tensor.dtype, ne, lambda: _pieces_of_tensor(tensor))
    if isinstance(data, tuple) and len(data) == 3:
        blocks, dtype, given = data
        if isinstance(blocks, np.ndarray):
            if blocks.dtype != np.uint8:
                raise DTypeError(f"save_gguf: the blocks of {name!r} are {blocks.dtype}; give uint8")
            return _sized(name, DType.parse(dtype), tuple(given), lambda: _pieces_of_array(blocks))
        return _sized(name, DType.parse(dtype), tuple(given), lambda: blocks)
    if not isinstance(data, np.ndarray):
        raise ArgumentError(
            f"save_gguf: tensor {name!r} is {kind_of(data)}; give an array, a tensor, or (blocks, type, ne)"
        )
    try:
        dtype = DType.parse(data.dtype)
    except DTypeError:
        raise DTypeError(
            f"save_gguf: tensor {name!r} is an array of {data.dtype}, a type that ggml does not have; "
            "convert it, or give (blocks, type, ne)"
        ) from None
    return _sized(name, dtype, data.shape[::-1], lambda: _pieces_of_array(data))


def _sized(name: str, dtype: DType, ne: tuple[int, ...], pieces: Callable[[], Iterable[Bytes]]) -> _Entry:
    ne = ne or (1,)
    if len(ne) > MAX_DIMS or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in ne):
        raise ShapeError(
            f"save_gguf: tensor {name!r} has extents {ne}; give one to {MAX_DIMS}, 0 or more each"
        )
    if ne[0] % dtype.block_size:
        raise ShapeError(
            f"save_gguf: rows of {ne[0]} elements of tensor {name!r} are not whole {dtype.name} blocks of "
            f"{dtype.block_size}"
        )
    return _Entry(name, dtype, ne, prod(ne) // dtype.block_size * dtype.type_size, pieces)


def _pieces_of_tensor(tensor: Tensor) -> Iterator[Bytes]:
    if not tensor.is_contiguous():
        yield tensor.packed()
        return
    for start in range(0, tensor.nbytes, PIECE):
        yield tensor.get(start, min(PIECE, tensor.nbytes - start))


def _pieces_of_array(array: npt.NDArray[Any]) -> Iterator[Bytes]:
    if array.flags.c_contiguous:
        flat = array.reshape(-1).view(np.uint8)
        yield from (flat[start : start + PIECE] for start in range(0, flat.size, PIECE))
    elif array.nbytes <= PIECE or array.ndim < 2:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    else:
        yield from chain.from_iterable(map(_pieces_of_array, array))


def _write(file: IO[bytes], entry: _Entry) -> None:
    n_written = 0
    for piece in entry.pieces():
        if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8:
            raise DTypeError(f"save_gguf: a piece of tensor {entry.name!r} is no array of uint8")
        n_written += piece.nbytes
        if n_written > entry.nbytes:
            break
        file.write(np.ascontiguousarray(piece).data)
    if n_written != entry.nbytes:
        found = f"more than {entry.nbytes:,}" if n_written > entry.nbytes else f"{n_written:,}"
        raise ShapeError(
            f"save_gguf: tensor {entry.name!r} has {found} bytes; {entry.dtype.name} of extents "
            f"{list(entry.ne)} has {entry.nbytes:,}"
        )
