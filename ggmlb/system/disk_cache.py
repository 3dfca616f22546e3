"""Compiled code, kept on disk for the next process.

A file is named by a digest of all that its content depends on, and begins with the SHA-256 of the rest. It is
written whole and then renamed, so that any number of processes may start at once. What cannot be read or
written is compiled again: a cache is no place to fail.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

import platformdirs

from ggmlb.system import env

DIGEST_NBYTES: Final = 32


def folder(backend: str) -> Path:
    """Return a backend's folder: in GGMLB_CACHE_DIR, or where the system keeps caches; it need not exist."""
    root = env.cache_dir()
    return (Path(root) if root is not None else platformdirs.user_cache_path("ggmlb", False)) / backend


def load(path: Path) -> bytes | None:
    """Return what `save` wrote; `None` if there is no such file, or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:DIGEST_NBYTES], data[DIGEST_NBYTES:]
    return content if sha256(content).digest() == digest else None


def save(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(sha256(content).digest() + content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
