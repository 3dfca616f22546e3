"""Targets of code generation: instruction sets, and LLVM's target machine.

LLVM itself is imported where it must answer: what it knows of the processor is cached on disk.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

import llvmlite

from ggmlb.backends.llvm.codegen.emit import Level
from ggmlb.core.errors import ArgumentError, did_you_mean
from ggmlb.system import disk_cache

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"}
_AMX = frozenset({"amx-tile", "amx-int8"})

LEVELS = (
    Level(
        "amx", 16, "vnni", True, _AVX512 | _AMX, "x86-64-v4", "+avx512vnni,+amx-tile,+amx-int8", tiles=True
    ),
    Level("avx512", 16, "vnni", True, _AVX512, "x86-64-v4", "+avx512vnni"),
    Level("avxvnni", 8, "vnni", True, _AVX2 | {"avxvnni"}, "x86-64-v3", "+avxvnni"),
    Level("avx2", 8, "maddubs", True, _AVX2, "x86-64-v3", ""),
    Level("neon", 4, "sdot", True, frozenset({"dotprod"}), "generic", "+neon,+dotprod"),
    Level("plain", 8, "widen", False, frozenset(), "", ""),
)  # fmt: skip
"""Instruction sets, the widest first: the host uses the first whose needs it meets."""


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A target of compilation: a level and LLVM's parameters.

    Attributes:
        triple: LLVM's name of architecture and system; the host's if empty.
    """

    level: Level
    cpu: str
    features: str
    triple: str = ""

    @property
    def key(self) -> str:
        """Key of the target's compiled code."""
        return f"{self.level.name}|{self.cpu}|{self.features}|{self.triple}"

    def machine(self, jit: bool = True) -> Any:
        """Return LLVM's machine that emits the code."""
        from llvmlite import binding

        initialize()
        triple = self.triple or binding.get_process_triple()
        target = binding.Target.from_triple(triple)
        model = "jitdefault" if jit else "default"
        return target.create_target_machine(
            cpu=self.cpu, features=self.features, opt=3, codemodel=model, jit=jit
        )


@cache
def initialize() -> None:
    """Initialize all of LLVM's targets, once per process."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()


_L2 = "SC_LEVEL2_CACHE_SIZE"
_WRITES_PAST_CACHES = frozenset({"sapphirerapids", "emeraldrapids"})
"""Processors, by LLVM's names, that write what their caches cannot keep faster to memory than to the last of
the caches, even where it is read next: measured on the first, whose last cache is reached by a mesh."""


@cache
def kept_nbytes() -> float:
    """Bytes of a thread's operands up to which its result is better kept in the caches; perhaps infinity."""
    cpu, _, _ = _host()
    if cpu not in _WRITES_PAST_CACHES:
        return float("inf")
    known = os.sysconf(_L2) if _L2 in getattr(os, "sysconf_names", ()) else 0
    return known if known > 0 else 2 << 20


@cache
def _host() -> tuple[str, Mapping[str, bool], str]:
    """LLVM's name of the processor, and its features, also as one text."""
    facts = _processor()
    digest = sha256(f"{llvmlite.__version__}|{facts}".encode()).hexdigest()[:32]
    path = disk_cache.folder("llvm") / f"{digest}.host"
    kept = disk_cache.load(path) if facts else None
    if kept is None:
        from llvmlite import binding

        initialize()
        cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
        if facts:
            disk_cache.save(path, json.dumps([cpu, features]).encode())
    else:
        cpu, features = json.loads(kept)
    return cpu, {flag[1:]: flag[0] == "+" for flag in features.split(",") if flag}, features


_TELLING = ("vendor_id", "cpu family", "model", "stepping", "flags")
"""Lines of Linux' description of an x86 processor that LLVM's answers depend on."""


def _processor() -> str:
    """Return what the system tells of the first processor; empty where it tells no features."""
    lines = []
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(_TELLING):
                    lines.append(line)
                if line.startswith("flags"):
                    return "".join(lines)
    except OSError:
        pass
    return ""


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Of Linux on x86-64: a system call, what is asked of it, and for which part of the processor's state."""


@cache
def _may_use_tiles() -> bool:
    """Ask the kernel that the threads of this process may use tiles: it keeps room for them only then."""
    if not sys.platform.startswith("linux"):
        return False
    ask = ctypes.CDLL(None, use_errno=True).syscall
    return bool(ask(_ARCH_PRCTL, _REQUEST_PERMISSION, ctypes.c_ulong(_TILE_DATA)) == 0)


def levels_here() -> tuple[Level, ...]:
    """Return the levels that this processor can run, the widest first."""
    _, features, _ = _host()
    have = {name for name, on in features.items() if on}
    if not (have >= _AMX and _may_use_tiles()):
        have -= _AMX
    return tuple(level for level in LEVELS if level.needs <= have)


@cache
def target_for(name: str | None) -> CompileTarget:
    """Return the target of a level by its name; of the host's widest by `None`.

    Raises:
        ArgumentError: There is no such level, or the processor cannot run it.
    """
    cpu, _, features = _host()
    here = levels_here()
    if name is None:
        best = here[0]
        # Where only the plain level is left, LLVM's own choice of instructions stays open to it.
        return CompileTarget(best, cpu, features)
    for level in here:
        if level.name == name:
            return CompileTarget(level, level.cpu or _baseline(), level.features)
    names = [level.name for level in here]
    raise ArgumentError(
        f"no instruction set {name!r} (GGMLB_SIMD): this processor runs {', '.join(names)}"
        f"{did_you_mean(name, names)}"
    )


def _baseline() -> str:
    return "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
