"""TensorFile: the tensors of a safetensors file, read from the mapped file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import DTypeError, ModelError
from ggmlb.models.mapped_file import FLOATS, Extent, MappedFile, failing


class Entry(NamedTuple):
    """The header entry of a tensor in a safetensors file: type, shape and position.

    Attributes:
        dtype: The file's name of its type, such as `F32`.
        shape: NumPy order.
        offset: Offset of its first byte in `TensorFile.data` [bytes].
        nbytes: Its size [bytes].
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorFile(Mapping[str, Entry]):
    """A safetensors file, mapped into memory: tensors are read from disk when used.

    Attributes:
        path: The file.
        data: The bytes of all tensors, as a read-only map of the file.

    Raises:
        ModelError: The file is missing, truncated or corrupt, cannot be read, or changes while it is
            opened; or `safetensors` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path, _check_header)
        header_nbytes = 8 + int.from_bytes(self._file.data[:8].tobytes(), "little")
        header = json.loads(self._file.data[8:header_nbytes].tobytes())
        self.data = self._file.data[header_nbytes:]
        self._entries = {
            name: Entry(facts["dtype"], tuple(facts["shape"]), start, end - start)
            for name, facts in header.items()
            if name != "__metadata__"
            for start, end in [facts["data_offsets"]]
        }

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def check_unchanged(self) -> None:
        """Raise a ModelError if the file was truncated, extended or overwritten since it was opened."""
        self._file.check_unchanged()

    def entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return the header entry of a weight; raise a ModelError if it is missing or has another `shape`.

        Raises:
            ModelError: There is no such tensor, or it has another shape, or a type not in `FLOATS`.
        """
        found = self._entries.get(name)
        if found is None:
            raise ModelError(
                f"{self.path} has no tensor {name!r} among its {len(self)}; the file belongs to another "
                "kind of model, or to another config.json"
            )
        if found.shape != shape:
            raise ModelError(
                f"{self.path}: tensor {name!r} has shape {list(found.shape)}, but config.json asks for "
                f"{list(shape)}; use the config.json that came with the file"
            )
        if self.dtype(name) not in FLOATS:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {found.dtype}; weights must be floating point: "
                "convert the file to F32, F16 or BF16"
            )
        return found

    def weight(self, name: str, shape: tuple[int, ...]) -> Extent:
        """Return the extent (place in the mapped file) of a weight; raise unless it has this `shape`."""
        found = self.entry(name, shape)
        return Extent(self.dtype(name), shape, self._file, self.data, found.offset, found.nbytes)

    def dtype(self, name: str) -> DType:
        """Return the ggml type of a tensor.

        Raises:
            ModelError: ggml has no such type.
        """
        try:
            return DType.parse(self._entries[name].dtype)
        except DTypeError:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {self._entries[name].dtype}, which ggml does not "
                "have; convert the file to F32, F16 or BF16"
            ) from None

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor's values in the file as a read-only array, not copied.

        Raises:
            ModelError: ggml has no such type.
        """
        entry = self._entries[name]
        raw = self.data[entry.offset : entry.offset + entry.nbytes]
        return raw.view(self.dtype(name).numpy).reshape(entry.shape)


def _check_header(path: Path, fd: int) -> None:
    """Let `safetensors` check the whole file."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ModelError(f"reading {path} needs safetensors: pip install 'ggmlb[models]'") from None
    nbytes = os.fstat(fd).st_size
    with (
        failing(f"{path} is not a whole safetensors file ({nbytes:,} bytes)"),
        safe_open(path, framework="numpy"),
    ):
        pass
