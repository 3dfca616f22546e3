"""Compiled programs, kept on disk for the next process.

The runtimes have caches of their own, but some look a program up only after the compiler's front end has
read its text: PoCL takes 50 ms for that, and 2 ms for a binary.

PoCL makes a binary by compiling the program once more, for work groups of any size. That is a third of what
a first process compiles, so only a program that is built a second time is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pyopencl as cl

from ggmlb.backends.opencl import pocl
from ggmlb.system import disk_cache


class Entry:
    """The place of a program, told by all that its binary depends on."""

    def __init__(self, device: cl.Device, text: str, options: Sequence[str]) -> None:
        platform = device.platform
        runtime = (platform.name, platform.version, device.name, device.vendor, device.driver_version)
        key = "\0".join([*map(str, runtime), *options, text])
        self._device = device
        self._path = disk_cache.folder("opencl") / f"{sha256(key.encode()).hexdigest()}.bin"
        self._built_before = self._path.with_suffix(".seen") if pocl.is_pocl(platform) else None

    def load(self, context: cl.Context, options: Sequence[str]) -> cl.Program | None:
        """Return the program, built, or `None` if it is not there or the runtime refuses it."""
        binary = disk_cache.load(self._path)
        if binary is None:
            return None
        with suppress(cl.Error):  # of another version of the driver, or of another machine's processor
            program = cl.Program(context, [self._device], [binary])
            program.build(list(options))
            return program
        return None

    def save(self, program: cl.Program) -> None:
        """Keep a program that was built for the device, and for no other; PoCL's, from the second time on."""
        if self._built_before is not None and disk_cache.load(self._built_before) is None:
            disk_cache.save(self._built_before, b"")
            return
        facts: Any = program
        with suppress(cl.Error):
            # Runtimes differ in whether the context's other devices have an empty binary, or none.
            binary = next((b for b in facts.binaries if b), None)
            if binary:
                disk_cache.save(self._path, binary)
