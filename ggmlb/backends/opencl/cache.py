"""Compiled programs, kept on disk for the next process.

The runtimes have caches of their own, but some look a program up only after the compiler's front end has
read its text: PoCL takes 50 ms for that, and 2 ms for a binary. Entries are written whole and then renamed,
so that any number of processes may start at once. What cannot be read or written is compiled again: a cache
is no place to fail.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import pyopencl as cl

from ggmlb import env

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST_NBYTES = hashlib.sha256().digest_size


def folder() -> Path:
    """Return the folder of the compiled programs; it need not exist."""
    root = env.cache_dir()
    return (Path(root) if root is not None else platformdirs.user_cache_path("ggmlb", False)) / "opencl"


class Entry:
    """The place of a program, told by all that its binary depends on."""

    def __init__(self, device: cl.Device, text: str, options: Sequence[str]) -> None:
        platform = device.platform
        runtime = (platform.name, platform.version, device.name, device.vendor, device.driver_version)
        key = "\0".join([*map(str, runtime), *options, text])
        self._device = device
        self._path = folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.bin"

    def load(self, context: cl.Context, options: Sequence[str]) -> cl.Program | None:
        """Return the program, built, or `None` if it is not there or the runtime refuses it."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        digest, binary = data[:_DIGEST_NBYTES], data[_DIGEST_NBYTES:]
        if hashlib.sha256(binary).digest() != digest:
            return None
        with suppress(cl.Error):  # of another version of the driver, or of another machine's processor
            program = cl.Program(context, [self._device], [binary])
            program.build(list(options))
            return program
        return None

    def save(self, program: cl.Program) -> None:
        """Keep a program that was built for the device, and for no other."""
        with suppress(cl.Error, OSError):
            facts: Any = program
            # Runtimes differ in whether the context's other devices have an empty binary, or none.
            binary = next((b for b in facts.binaries if b), None)
            if binary:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=self._path.parent)
                try:
                    with os.fdopen(handle, "wb") as file:
                        file.write(hashlib.sha256(binary).digest() + binary)
                    os.replace(name, self._path)
                except BaseException:
                    os.unlink(name)
                    raise
