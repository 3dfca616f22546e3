"""Files on a shared file system: a node reads weights from them itself, instead of receiving them.

The driver finds the memory-mapped file of an array by its address (/proc/self/maps on Linux), and sends path
and offset. The node only reads files of the shared folders whose size and modification time equal the
driver's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.backends.ray.wire import MAX_EXTENT, number_below, refuse
from ggmlb.core.errors import BackendError

Bytes = npt.NDArray[np.uint8]


class FilePart(NamedTuple):
    """A part of a file.

    Attributes:
        path: The file, links resolved.
        offset: Start of the part in the file [bytes].
        size: Size of the file [bytes].
        mtime_ns: Modification time of the file [ns].
    """

    path: str
    offset: int
    size: int
    mtime_ns: int


class SharedFiles:
    """The files in folders shared by all machines.

    Args:
        folders: Paths of the folders, the same on all machines.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = tuple(os.path.realpath(folder) for folder in folders)

    def holds(self, path: str) -> bool:
        """Whether a file, links resolved, is in one of the folders."""
        real = os.path.realpath(path)
        return any(os.path.commonpath([real, folder]) == folder for folder in self.folders)

    def part_of(self, data: Bytes) -> FilePart | None:
        """Return the part of a shared file that an array memory-maps, or `None`."""
        if not self.folders:
            return None
        first = data.ctypes.data
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
                for line in maps:
                    place, access, offset, _, _, path = (*line.split(maxsplit=5), "")[:6]
                    start, end = (int(n, 16) for n in place.split("-"))
                    if start <= first < end:
                        path = path.strip()
                        if first + data.nbytes > end or "w" in access or not self.holds(path):
                            return None
                        stat = os.stat(path)
                        return FilePart(path, int(offset, 16) + first - start, stat.st_size, stat.st_mtime_ns)
        except OSError:  # no Linux, or the file was removed
            return None
        return None

    def read(self, nbytes: int, path: str, offset: int, size: int, mtime_ns: int) -> Bytes:
        """Read a part of a shared file, if its size and modification time are those on the driver.

        Raises:
            BackendError: The file cannot be read, or differs from the driver's.
            RefusedError: It is in no shared folder, or the part is beyond its end.
        """
        if not self.holds(path):
            refuse(f"{path!r} is in none of the shared folders {list(self.folders)}")
        start = number_below(offset, MAX_EXTENT, "an offset")
        try:
            with open(os.path.realpath(path), "rb") as file:
                stat = os.fstat(file.fileno())
                if (stat.st_size, stat.st_mtime_ns) != (size, mtime_ns):
                    raise BackendError(
                        f"{path} differs in size or modification time from the driver's; copy it again"
                    )
                if start + nbytes > stat.st_size:
                    refuse(f"bytes {start} to {start + nbytes} of {path}, which has {stat.st_size}")
                file.seek(start)
                data = np.empty(nbytes, np.uint8)
                if file.readinto(data.data) != nbytes:
                    raise BackendError(f"{path} became shorter while it was read; load the model again")
                return data
        except OSError as error:
            raise BackendError(
                f"{path} cannot be read here: {error}; mount the folder, or leave out shared="
            ) from None
