"""GGUF files for tests: whole ones, split ones, and ones that are wrong in one place.

Written from ggml's docs/gguf.md with `struct` alone, apart from the package's own writer, so that its reader
and its writer are both judged.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ggmlb import DType, quantize

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64 = 4, 5, 6, 7, 8, 9, 10, 11

FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<B", UINT64: "<Q",
    INT64: "<q", 12: "<d",
}  # fmt: skip

KINDS = {np.dtype(f).newbyteorder("<"): kind for kind, f in FORMATS.items() if kind != BOOL}
"""The kinds of numbers by their NumPy types."""


@dataclass(frozen=True)
class Typed:
    """A value with its kind, for those that Python's types do not tell: `Typed(INT64, 5)`.

    Attributes:
        kind: Its number in the format, also one that the format does not have.
        value: A number or text, or bytes, which are written as they are.
    """

    kind: int
    value: Any


@dataclass(frozen=True)
class Data:
    """A tensor as the file has it; `None` stands for the right value.

    Attributes:
        blocks: Its bytes.
        type: The number of its type.
        ne: Extents, innermost first.
        offset: Where its entry says that it begins, from the start of the data [bytes].
    """

    blocks: bytes
    type: int
    ne: tuple[int, ...]
    offset: int | None = None


Value = bool | int | float | str | Sequence[Any] | np.ndarray[Any, Any] | Typed
TensorData = Data | np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], DType | str, tuple[int, ...]]


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value] | Sequence[tuple[str | bytes, Value]],
    tensors: Mapping[str, TensorData] | Sequence[tuple[str | bytes, TensorData]],
    version: int = 3,
    alignment: int = 32,
    **wrong: Any,
) -> Path:
    """Write a file of `gguf_bytes`; return its path."""
    path.write_bytes(gguf_bytes(metadata, tensors, version, alignment, **wrong))
    return path


def gguf_bytes(
    metadata: Mapping[str, Value] | Sequence[tuple[str | bytes, Value]],
    tensors: Mapping[str, TensorData] | Sequence[tuple[str | bytes, TensorData]],
    version: int = 3,
    alignment: int = 32,
    *,
    magic: bytes = b"GGUF",
    n_values: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """Return the bytes of a GGUF file.

    Args:
        metadata: Values by key, or pairs (keys may come twice). Whole numbers become uint32, or what holds
            them; Python's floats float32; lists arrays; NumPy arrays arrays of their type.
        tensors: By name, or pairs: arrays of a plain type, `(blocks, type, ne)`, or `Data`.
        version: Of the format.
        alignment: Of the tensors [bytes]; `general.alignment` is written unless it is 32, or given.
        magic: What the file begins with.
        n_values: What the header says of the number of values; the right one by default.
        n_tensors: The same of tensors.
    """
    values = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    entries = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
    if alignment != 32 and "general.alignment" not in dict(values):
        values.append(("general.alignment", Typed(UINT32, alignment)))
    counts = (len(entries) if n_tensors is None else n_tensors, len(values) if n_values is None else n_values)
    head = [magic, struct.pack("<IQQ", version, *counts)]
    head += [text(key) + typed(value) for key, value in values]
    data = b""
    for name, given in entries:
        tensor = given if isinstance(given, Data) else data_of(given)
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        n_dims = len(tensor.ne)
        head.append(text(name) + struct.pack(f"<I{n_dims}QIQ", n_dims, *tensor.ne, tensor.type, offset))
        data += tensor.blocks
    header = b"".join(head)
    return header + bytes(-len(header) % alignment) + data + bytes(-len(data) % alignment)


def data_of(given: Any) -> Data:
    """Return an array, or blocks with their type and extents, as the file has them."""
    if isinstance(given, tuple):
        blocks, dtype, ne = given
        return Data(np.ascontiguousarray(blocks).tobytes(), int(DType.parse(dtype)), tuple(ne))
    array = np.asarray(given)
    return Data(np.ascontiguousarray(array).tobytes(), int(DType.parse(array.dtype)), array.shape[::-1])


def quantized(
    values: np.ndarray[Any, Any], dtype: DType | str
) -> tuple[np.ndarray[Any, Any], DType, tuple[int, ...]]:
    """Return values as blocks, for `write_gguf`."""
    return quantize(values, dtype), DType.parse(dtype), values.shape[::-1]


def random_blocks(rng: np.random.Generator, dtype: DType | str, ne: tuple[int, ...]) -> TensorData:
    """Return normally distributed values as blocks of a type that can be written."""
    return quantized(rng.standard_normal(ne[::-1]).astype(np.float32), dtype)


def text(value: str | bytes) -> bytes:
    """Return a string with its length."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Value) -> bytes:
    """Return a value behind its kind."""
    kind = kind_of(value)
    if kind == ARRAY:
        return struct.pack("<I", ARRAY) + array(value)
    return struct.pack("<I", kind) + payload(kind, value.value if isinstance(value, Typed) else value)


def array(value: Any) -> bytes:
    """Return an array's kind, length and elements."""
    if isinstance(value, Typed):
        return payload(ARRAY, value.value)
    if isinstance(value, np.ndarray):
        kind = BOOL if value.dtype == bool else KINDS[value.dtype.newbyteorder("<")]
        return struct.pack("<IQ", kind, value.size) + value.astype(value.dtype.newbyteorder("<")).tobytes()
    kinds = {kind_of(item) for item in value} or {INT32}
    kind = INT32 if kinds == {UINT32} else max(kinds)
    return struct.pack("<IQ", kind, len(value)) + b"".join(payload(kind, item) for item in value)


def kind_of(value: Value) -> int:
    """Return the kind that a value is written as."""
    if isinstance(value, Typed):
        return value.kind
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        small = INT32 if value < 0 else UINT32
        large = INT64 if value < 0 else UINT64
        return small if -(1 << 31) <= value < 1 << 32 else large
    if isinstance(value, float):
        return FLOAT32
    return STRING if isinstance(value, str) else ARRAY


def payload(kind: int, value: Any) -> bytes:
    """Return a value without its kind; bytes as they are."""
    if isinstance(value, bytes):
        return value
    return text(value) if kind == STRING else struct.pack(FORMATS[kind], value)


def write_split(
    folder: Path,
    name: str,
    metadata: Mapping[str, Value],
    parts: Sequence[Mapping[str, TensorData]],
    alignment: int = 32,
) -> list[Path]:
    """Write a model that is split into files, as llama.cpp's gguf-split names them; return their paths."""
    n = len(parts)
    total = sum(map(len, parts))
    paths = []
    for i, tensors in enumerate(parts):
        split: dict[str, Value] = {
            "split.no": Typed(2, i), "split.count": Typed(2, n), "split.tensors.count": Typed(INT32, total)
        }  # fmt: skip
        path = folder / f"{name}-{i + 1:05}-of-{n:05}.gguf"
        paths.append(write_gguf(path, {**(metadata if i == 0 else {}), **split}, tensors, 3, alignment))
    return paths
