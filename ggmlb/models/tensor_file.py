"""TensorFile: the tensors of a safetensors file, read where they lie in the file.

The file stays mapped, so it must stay as it is while it is in use: a program that reads a part of it that
was cut off is ended by the system (SIGBUS), and bytes that are overwritten in place change the weights. A
file that is replaced by another of its name, as downloads do, is no such change. `check_unchanged` tells,
unless the change comes later.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import DTypeError, ModelError

FLOATS: Final = (DType.F32, DType.F16, DType.BF16, DType.F64)
"""Types that weights may have in a file."""


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
        ModelError: The file is missing, cut short or corrupt, cannot be read, or is changed while it is
            opened; or `safetensors` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with failing(f"cannot read {path}", OSError):
            if not path.is_file():
                raise ModelError(f"there is no file {path}; give a model folder that holds model.safetensors")
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._fd)
            self._opened = _state(os.fstat(self._fd))
        header_nbytes = _validated_header_nbytes(path, self._fd)
        with failing(f"cannot map {path}", OSError, ValueError), os.fdopen(os.dup(self._fd), "rb") as source:
            file = np.memmap(source, np.uint8, mode="r").view(np.ndarray)
            is_same = _state(os.stat(path)) == self._opened
        self.check_unchanged()
        if not is_same:
            raise self._changed()
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

    def check_unchanged(self) -> None:
        """Raise a ModelError if the file was cut, extended or overwritten since it was opened."""
        with failing(f"cannot read {self.path}", OSError):
            now = _state(os.fstat(self._fd))
        if now != self._opened:
            raise self._changed()

    def _changed(self) -> ModelError:
        return ModelError(
            f"{self.path} was changed while it was in use; copy or download it again if it is not whole, and "
            "open the model anew"
        )

    def entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return what the header says of a weight that a model needs.

        Raises:
            ModelError: There is no such tensor, or it has another shape, or a type that is none of `FLOATS`.
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


@contextmanager
def failing(
    what: str, *kinds: type[BaseException], cure: str = "copy or download it again"
) -> Iterator[None]:
    """Turn failures of these kinds, within a `with` block, into a ModelError that says what failed.

    Without kinds, of every kind that a library written in Rust has: it panics with a class that is no
    `Exception`, and passes the handlers of those who call.
    """
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not (isinstance(error, kinds) if kinds else isinstance(error, Exception) or is_panic):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(f"{what}: {why}; {cure}") from error


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """What tells whether a file is the one that it was."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _validated_header_nbytes(path: Path, fd: int) -> int:
    """Let `safetensors` check the file from end to end; return where its tensors begin."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ModelError(f"reading {path} needs safetensors: pip install 'ggmlb[models]'") from None
    nbytes = os.fstat(fd).st_size
    with (
        failing(f"{path} is not a whole safetensors file ({nbytes:,} bytes)"),
        safe_open(path, framework="numpy"),
    ):
        return 8 + int.from_bytes(os.read(fd, 8), "little")
