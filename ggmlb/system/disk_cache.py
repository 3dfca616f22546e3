"""Disk cache of compiled code.

A file is named by a digest of everything that its content depends on, its key, and begins with the SHA-256
of that name and the content: a file that was damaged, renamed or swapped with another is not loaded. It is
written to a temporary file and renamed, so that processes may write concurrently. A file that cannot be read
or written is compiled again; the cache never raises.

Cached code is executed, so no other user may be able to write it. As OpenSSH requires of its files, the
folder and its parents must belong to the user or to root and must not be writable for group or others,
except parents with the sticky bit (`/tmp`). Otherwise the cache is off, and a RuntimeWarning names the
folder once.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG, S_ISVTX, S_IWGRP, S_IWOTH
from typing import Final

from ggmlb.core.errors import shown
from ggmlb.system import env

DIGEST_NBYTES: Final = 32

_checked: Final[dict[Path, Path | None]] = {}
"""The real path of each existing folder, or `None` if it must not be used."""


def folder(backend: str) -> Path:
    """Return a backend's folder in GGMLB_CACHE_DIR or the system's cache folder; it need not exist.

    Without either (a container whose user has no home, or no platformdirs) the path is relative, and nothing
    is cached.
    """
    root = env.text("GGMLB_CACHE_DIR")
    if root is not None:
        return Path(root).absolute() / backend
    try:
        import platformdirs

        return platformdirs.user_cache_path("ggmlb") / backend
    except (ImportError, RuntimeError):
        return Path(backend)


def load(path: Path) -> bytes | None:
    """Return the content that `save` wrote; `None` if missing, damaged or writable by other users."""
    home = trusted(path.parent)
    if home is None:
        return None
    try:
        # Neither block on a pipe nor follow a link to another user's file.
        handle = os.open(home / path.name, os.O_RDONLY | _OPEN_FLAGS)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not S_ISREG(status.st_mode) or _others_write(status):
                return None
            data = file.read()
    except OSError:
        return None
    digest, content = data[:DIGEST_NBYTES], data[DIGEST_NBYTES:]
    return content if _digest(path, content) == digest else None


def save(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    import tempfile  # slow to import, and not needed if the cache has all

    if not path.is_absolute():
        return
    with suppress(OSError):
        _make(path.parent)
        home = trusted(path.parent)
        if home is None:
            return
        handle, temporary = tempfile.mkstemp(dir=home)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(path, content) + content)
            os.replace(temporary, home / path.name)
        except BaseException:
            os.unlink(temporary)
            raise


def trusted(place: Path) -> Path | None:
    """Return the real path of an existing folder that only this user and root can change; else `None`."""
    if place in _checked:
        return _checked[place]
    if not place.is_absolute():
        return None
    try:
        found = place.resolve(strict=True)
        why = _why_not(found)
    except (OSError, RuntimeError):  # missing, unreadable, or circular links
        return None
    if why is not None:
        with suppress(RuntimeWarning):  # raised if a warning filter says so
            message = f"compiled kernels are not cached in {place}: {why}"
            warnings.warn(shown(message), RuntimeWarning, stacklevel=2)
    _checked[place] = found if why is None else None
    return _checked[place]


def _digest(path: Path, content: bytes) -> bytes:
    return sha256(os.fsencode(path.name) + b"\0" + content).digest()


_OPEN_FLAGS: Final = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def _make(place: Path) -> None:
    """Create a folder and its missing parents with mode 0700, whatever the umask."""
    missing = []
    while not place.exists():
        missing.append(place)
        place = place.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def _why_not(place: Path) -> str | None:
    """Return why other users can change a folder's contents; `None` if they cannot."""
    for each in (place, *place.parents):
        status = each.stat()
        if not _is_owned(status):
            return f"{each} belongs to another user; set GGMLB_CACHE_DIR to a folder of your own"
        if _others_write(status) and (each == place or not status.st_mode & S_ISVTX):
            return f"others can write in {each}; chmod go-w {each}, or set GGMLB_CACHE_DIR to another folder"
    return None


def _is_owned(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def _others_write(status: os.stat_result) -> bool:
    """Whether another user owns or can write a file or folder."""
    return not _is_owned(status) or (hasattr(os, "geteuid") and bool(status.st_mode & (S_IWGRP | S_IWOTH)))
