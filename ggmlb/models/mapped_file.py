"""MappedFile: a file mapped into memory, with a check for later changes.

A mapped file must not be modified while it is in use. If it is truncated, the system ends a program that
reads beyond its end (SIGBUS); bytes overwritten in place change the data. Replacing the file by another
of its name, as downloads do, is safe. `check_unchanged` detects changes made so far.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import MissingModelError, ModelError

FLOATS: Final = (DType.F32, DType.F16, DType.BF16, DType.F64)
"""Supported plain types of weights in a file."""

PAGE: Final = mmap.PAGESIZE


class MappedFile:
    """A file mapped read-only: a page is read from disk when first used.

    Attributes:
        path: The file.
        data: Its bytes.
        view: Its bytes as a memoryview, for `struct`.

    Args:
        path: The file.
        check: Called with the path and an open descriptor before the file is mapped.

    Raises:
        ModelError: The file is missing, empty or cannot be read, or is changed while it is opened.
    """

    def __init__(self, path: Path, check: Callable[[Path, int], None] | None = None) -> None:
        self.path = path
        with failing(f"cannot read {path}", OSError):
            if not path.is_file():
                raise MissingModelError(f"there is no file {path}; give the path of a model file")
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._fd)
            self._opened = _state(os.fstat(self._fd))
        if check is not None:
            check(path, self._fd)
        with failing(f"cannot map {path}", OSError, ValueError):
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
            self.view = memoryview(self._map)
            self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
            is_same = _state(os.stat(path)) == self._opened
        self.check_unchanged()
        if not is_same or self.data.size != self._opened[2]:
            raise self._changed()

    def check_unchanged(self) -> None:
        """Raise a ModelError if the file was truncated, extended or overwritten since it was opened."""
        with failing(f"cannot read {self.path}", OSError):
            now = _state(os.fstat(self._fd))
        if now != self._opened:
            raise self._changed()

    def release(self, offset: int, nbytes: int) -> None:
        """Let the system reclaim the memory of whole pages in a range of the file.

        They are read from the file again if they are used again.
        """
        first, end = -(-offset // PAGE) * PAGE, (offset + nbytes) // PAGE * PAGE
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _changed(self) -> ModelError:
        return ModelError(
            f"{self.path} was changed while it was in use; copy or download it again if it is not whole, and "
            "open the model anew"
        )


class Extent(NamedTuple):
    """The place of a tensor in a mapped file.

    Attributes:
        dtype: Its type.
        shape: NumPy order.
        file: The file.
        memory: The bytes of the file, or those of them that hold tensors.
        offset: Of the tensor's first byte in `memory` [bytes].
        nbytes: Its size [bytes].
    """

    dtype: DType
    shape: tuple[int, ...]
    file: MappedFile
    memory: npt.NDArray[np.uint8]
    offset: int
    nbytes: int

    def rows(self) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, read-only and not copied, shape `(n_rows, row_size)`."""
        raw = self.memory[self.offset : self.offset + self.nbytes]
        return raw.reshape(math.prod(self.shape[:-1]), self.dtype.row_size((self.shape or (1,))[-1]))

    def release(self, start: int, nbytes: int) -> None:
        """Let the system reclaim the pages of `nbytes` bytes of the tensor from byte `start` on."""
        before = self.file.data.nbytes - self.memory.nbytes
        self.file.release(before + self.offset + start, nbytes)


@contextmanager
def failing(
    what: str, *kinds: type[BaseException], cure: str = "copy or download it again"
) -> Iterator[None]:
    """Context manager: turn exceptions (of `kinds`, if given) into the ModelError "`what`: reason; `cure`".

    Without kinds: all exceptions, and panics of Rust libraries, which do not derive from `Exception`.
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
        kind = MissingModelError if isinstance(error, FileNotFoundError) else ModelError
        raise kind(f"{what}: {why}; {cure}") from error


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """Return the identity of a file's content: device, inode, size and time of change."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
