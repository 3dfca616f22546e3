"""Disk cache of compiled programs, for runtimes other than PoCL.

PoCL has a cache of its own, in which it finds a program in 7 ms; a binary would cost another compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pyopencl as cl

from ggmlb.system import disk_cache


class Entry:
    """The cache entry of a program, keyed by everything that its binary depends on."""

    def __init__(self, device: cl.Device, text: str, options: Sequence[str]) -> None:
        platform = device.platform
        runtime = (platform.name, platform.version, device.name, device.vendor, device.driver_version)
        key = "\0".join([*map(str, runtime), *options, text])
        self._device = device
        self._path = disk_cache.folder("opencl") / f"{sha256(key.encode()).hexdigest()}.bin"

    def load(self, context: cl.Context, options: Sequence[str]) -> cl.Program | None:
        """Return the built program, or `None` if it is not cached or the runtime refuses it."""
        binary = disk_cache.load(self._path)
        if binary is None:
            return None
        with suppress(cl.Error):  # of another version of the driver, or of another machine's processor
            program = cl.Program(context, [self._device], [binary])
            program.build(list(options))
            return program
        return None

    def save(self, program: cl.Program) -> None:
        """Cache a program built for this device only."""
        facts: Any = program
        with suppress(cl.Error):
            # For the context's other devices, runtimes return an empty binary or none.
            binary = next((b for b in facts.binaries if b), None)
            if binary:
                disk_cache.save(self._path, binary)
