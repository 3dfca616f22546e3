"""OpenCL programs, built once for a device and a set of macros, and pools of kernel objects.

Programs are cached on disk, except on PoCL, which has its own cache: it loads a program in 7 ms, and would
compile a binary again.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pyopencl as cl

from ggmlb.backends.gpu import Defines, Kernel, source
from ggmlb.backends.opencl import pocl
from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.system import disk_cache, progress

ProgramKey = tuple[Kernel, Defines, int, bool]
"""Kernel, macros, work-items of a group, and whether the work split is the CPU's."""

Loan = tuple[ProgramKey, "cl.Kernel"]


class CacheEntry:
    """A compiled program's file in the disk cache, named by a hash of everything its binary depends on."""

    def __init__(self, device: cl.Device, text: str, options: Sequence[str]) -> None:
        platform = device.platform
        runtime = (platform.name, platform.version, device.name, device.vendor, device.driver_version)
        key = "\0".join([*map(str, runtime), *options, text])
        self._device = device
        self._path = disk_cache.folder("opencl") / f"{sha256(key.encode()).hexdigest()}.bin"

    def load(self, context: cl.Context, options: Sequence[str]) -> cl.Program | None:
        """Return the program built from its cached binary; `None` without one, or if it is refused."""
        binary = disk_cache.load(self._path)
        if binary is None:
            return None
        with suppress(cl.Error):  # binary of another driver version or processor
            program = cl.Program(context, [self._device], [binary])
            program.build(list(options))
            return program
        return None

    def save(self, program: cl.Program) -> None:
        """Save the binary that a program has for this device; not those for other devices of the context."""
        facts: Any = program
        with suppress(cl.Error):
            # For the context's other devices, runtimes return an empty binary or none.
            binary = next((b for b in facts.binaries if b), None)
            if binary:
                disk_cache.save(self._path, binary)


class Programs:
    """The device's compiled programs, built when first needed, and kernel objects, lent to plans."""

    def __init__(self, context: cl.Context, device: cl.Device, name: str) -> None:
        self._context = context
        self._device = device
        self._name = name
        self._is_pocl = pocl.is_pocl(device.platform)
        self._building = threading.Lock()
        self._built: dict[ProgramKey, cl.Program] = {}
        self._idle: dict[ProgramKey, list[cl.Kernel]] = {}

    def borrow(self, keys: Sequence[ProgramKey]) -> list[Loan]:
        """Build missing programs; return a kernel object per key, lent to nobody else until `give_back`."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._built]
        if missing:
            self._build_all(missing)
        return [(key, self._kernel(key)) for key in keys]

    def give_back(self, loans: list[Loan]) -> None:
        """Take back kernel objects for reuse; commands that were queued with them keep their arguments."""
        for key, kernel in loans:
            self._idle.setdefault(key, []).append(kernel)
        loans.clear()

    def _kernel(self, key: ProgramKey) -> cl.Kernel:
        try:
            return self._idle.setdefault(key, []).pop()
        except IndexError:
            with cl_errors(f"create kernel {key[0].name}", device=self._name):
                return cl.Kernel(self._built[key], key[0].name)

    def _build_all(self, keys: Sequence[ProgramKey]) -> None:
        about = f"{self._name}: compiling kernels"
        with self._building, progress.task(about, len(keys)) as task, warnings.catch_warnings():
            # PoCL's and Intel's compilers write a log, without messages, that PyOpenCL warns about.
            warnings.simplefilter("ignore", cl.CompilerWarning)
            # Not by threads: Intel's and Mesa's are no faster, PoCL locks its compiler, Oclgrind crashes.
            for key in keys:
                if key not in self._built:
                    task.step(key[0].name)
                    what = f"build kernel {key[0].name} with {dict(key[1])}"
                    with cl_errors(what, device=self._name):
                        self._built[key] = self._build(key)

    def _build(self, key: ProgramKey) -> cl.Program:
        kernel, defines, wg, on_cpu = key
        options = ["-w", "-cl-std=CL1.2", f"-DWG={wg}", *(f"-D{name}={value}" for name, value in defines)]
        if on_cpu:
            options.append("-DON_CPU")
        if self._is_pocl:
            text = source(kernel, "opencl", defines, outlined=wg == 1)
            with suppress(cl.RuntimeError):  # of another version of PoCL
                return self._compile(text, [*options, *pocl.QUICK_OPTIONS])
            return self._compile(text, options)
        text = source(kernel, "opencl", defines)
        entry = CacheEntry(self._device, text, options)
        program = entry.load(self._context, options)
        if program is None:
            program = self._compile(text, options)
            entry.save(program)
        return program

    def _compile(self, text: str, options: Sequence[str]) -> cl.Program:
        # Without PyOpenCL's own cache, which would store the binary again and checks no owner.
        program: cl.Program = cl.Program(self._context, text).build(
            options,
            [self._device],
            cache_dir=False,  # type: ignore[arg-type]
        )
        return program
