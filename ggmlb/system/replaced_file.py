"""Atomic replacement of a file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ggmlb.core.errors import ModelError


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context manager that opens a temporary file beside `path`, and renames it to `path` at the end.

    On an error, the old file stays. Of a symbolic link, the target is replaced.

    Raises:
        ModelError: The file cannot be written, or `path` is a folder, device or pipe.
    """
    path = Path(path)
    if not path.name:
        raise ModelError(f"cannot write {path}: it has no file name; give one, such as model.gguf")
    beside: Path | None = None
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"cannot write {path}: it is no regular file; give another path")
        target = Path(os.path.realpath(path))
        beside = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException as error:
        if beside is not None:
            with suppress(OSError):
                beside.unlink()
        if isinstance(error, OSError):
            why = error.strerror or error
            raise ModelError(f"cannot write {path}: {why}; free space, or choose another folder") from error
        raise
