"""TensorFile: the tensors of a safetensors file, read where they lie in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import DTypeError, ModelError


class Entry(NamedTuple):
    """What the header says of one tensor.

    Attributes:
        dtype: The name that the file gives its type, as `F32`.
        shape: NumPy order.
        offset: Of its first byte in `TensorFile.data` [bytes].
        nbytes: Its size [bytes].
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorFile(Mapping[str, Entry]):
    """A safetensors file, mapped into memory: a tensor is read from disk when its values are used.

    Attributes:
        path: The file.
        data: The bytes of all tensors, as a read-only map of the file.

    Raises:
        ModelError: The file is missing, cut short or corrupt, or `safetensors` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header_nbytes = _validated_header_nbytes(path)
        file = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        header = json.loads(file[8:header_nbytes].tobytes())
        self.data: npt.NDArray[np.uint8] = file[header_nbytes:]
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

    def entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return what the header says of a tensor that a model needs.

        Raises:
            ModelError: There is no such tensor, or it has another shape.
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
        return found

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
        """Return a tensor's values as they lie in the file: a read-only array, nothing copied.

        Raises:
            ModelError: ggml has no such type.
        """
        entry = self._entries[name]
        raw = self.data[entry.offset : entry.offset + entry.nbytes]
        return raw.view(self.dtype(name).numpy).reshape(entry.shape)


def _validated_header_nbytes(path: Path) -> int:
    """Let `safetensors` check the file from end to end; return where its tensors begin."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ModelError(f"reading {path} needs safetensors: pip install 'ggmlb[models]'") from None
    if not path.is_file():
        raise ModelError(f"there is no file {path}; give a model folder that holds model.safetensors")
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            return 8 + int.from_bytes(file.read(8), "little")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({path.stat().st_size:,} bytes): {error}; "
            "copy or download it again"
        ) from error
