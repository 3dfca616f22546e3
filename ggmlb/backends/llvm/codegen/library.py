"""Library of kernels, compiled at first use, cached on disk, and loaded once per process.

The disk cache has one file of machine code per kernel. Its key is the processor, the version of LLVM, the
source of the emitters, and the kernel's name and parameters. LLVM is imported only to compile a kernel, or
to load one that `loader` cannot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any

import llvmlite
from llvmlite import ir

from ggmlb.backends.common import formulas
from ggmlb.backends.llvm.codegen import host, loader
from ggmlb.backends.llvm.codegen.emit import Emitter
from ggmlb.core import dtypes, quants
from ggmlb.core.errors import BackendError
from ggmlb.system import disk_cache, env
from ggmlb.system.progress import Task

Emit = Callable[..., None]
"""Emits a kernel's body: `emit(emitter, *params)`."""

_lock = RLock()


class Library:
    """The kernels of one compile target.

    Attributes:
        target: The target.
        n_compiled: Number of kernels compiled, instead of read from the disk cache.
    """

    def __init__(self, target: host.CompileTarget) -> None:
        self.target = target
        self.n_compiled = 0
        self._addresses: dict[Hashable, int] = {}
        self._folder = disk_cache.folder("llvm")
        self._salt = f"{target.key}|{llvmlite.__version__}|{_sources()}"

    @cached_property
    def _machine(self) -> Any:
        return self.target.machine()

    @cached_property
    def _engine(self) -> Any:
        """MCJIT, for code that `loader` cannot load."""
        from llvmlite import binding

        return binding.create_mcjit_compiler(binding.parse_assembly(""), self._machine)

    def address(self, emit: Emit, params: tuple[Any, ...] = (), task: Task | None = None) -> int:
        """Return the address of the kernel `emit(emitter, *params)`, compiled or loaded at first use.

        Args:
            emit: A function of this package that emits its body: `emit(emitter, *params)`.
            params: Compile-time parameters, with distinct `repr`.
            task: Progress task, notified of compilation.
        """
        key = (emit, params)
        found = self._addresses.get(key)
        if found is None:
            with _lock:
                found = self._addresses.get(key) or self._load(emit, params, task)
                self._addresses[key] = found
        return found

    def _load(self, emit: Emit, params: tuple[Any, ...], task: Task | None) -> int:
        name = f"{emit.__module__.rpartition('.')[2]}.{emit.__name__}{params!r}"
        path = self.path(name, "o")
        symbol = f"ggmlb_{path.stem}"
        code = disk_cache.load(path)
        if code is None:
            if task is not None:
                task.step(name)
            code = self.compile(emit, params, symbol)
            self.n_compiled += 1
            disk_cache.save(path, code)
        address = loader.load(code, symbol)
        if address is not None:
            return address
        from llvmlite import binding

        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        return int(self._engine.get_function_address(symbol))

    def path(self, name: str, suffix: str) -> Path:
        """Return the path in the disk cache of a kernel's code or of measurements, by their name."""
        digest = sha256(f"{self._salt}|{name}".encode()).hexdigest()[:32]
        return self._folder / f"{digest}.{suffix}"

    def compile(self, emit: Emit, params: tuple[Any, ...], symbol: str) -> bytes:
        """Compile the kernel `emit(emitter, *params)` as function `symbol`; return its object file."""
        code: bytes = self._machine.emit_object(optimised(self.target, self._machine, emit, params, symbol))
        return code


def optimised(
    target: host.CompileTarget, machine: Any, emit: Emit, params: tuple[Any, ...], symbol: str
) -> Any:
    """Return an optimised LLVM module with the kernel `emit(emitter, *params)` as function `symbol`."""
    from llvmlite import binding

    module = ir.Module(symbol)
    module.triple = machine.triple
    kernel = Emitter(module, symbol, target.level)
    emit(kernel, *params)
    kernel.finish()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_unrolling = False
    tuning.loop_vectorization = False
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(parsed, passes)
    return parsed


def source_files() -> list[Path]:
    """Return the source files that the machine code of kernels depends on."""
    room = Path(__file__).parents[1]
    folders = room / "codegen", room / "kernels", Path(quants.__file__).parent
    files = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    return [*files, Path(dtypes.__file__), Path(formulas.__file__)]


@cache
def _sources() -> str:
    digest = sha256()
    for path in source_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def library(level: str | None = None) -> Library:
    """Return the kernels for an instruction set (default from GGMLB_SIMD, else the host's widest).

    Raises:
        ArgumentError: The name is unknown, or the processor does not support it.
        BackendError: The source of the kernels, the key of the disk cache, cannot be read.
    """
    return _library(level or env.text("GGMLB_SIMD"))


@cache
def _library(level: str | None) -> Library:
    try:
        return Library(host.target_for(level))
    except OSError as error:
        raise BackendError(f"LLVM: the source files of ggmlb's kernels cannot be read: {error}") from error


def function(address: int, n_args: int) -> Any:
    """Return the function at an address as a ctypes callable of 64-bit integers; it releases the GIL."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_args)(address)
