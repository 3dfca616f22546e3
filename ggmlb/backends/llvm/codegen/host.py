"""Targets of code generation: instruction sets, and LLVM's target machine.

LLVM is imported only when needed, as that is slow: its description of the processor is cached on disk.
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
_BF16 = _AVX512 | {"avx512bf16"}
_AMX = frozenset({"amx-tile", "amx-int8"})

LEVELS = (
    Level(
        "amx", 16, "vnni", True, _BF16 | _AMX, "x86-64-v4",
        "+avx512vnni,+avx512bf16,+amx-tile,+amx-int8", tiles=True, bf16=True,
    ),
    Level("avx512bf16", 16, "vnni", True, _BF16, "x86-64-v4", "+avx512vnni,+avx512bf16", bf16=True),
    Level("avx512", 16, "vnni", True, _AVX512, "x86-64-v4", "+avx512vnni"),
    Level("avxvnni", 8, "vnni", True, _AVX2 | {"avxvnni"}, "x86-64-v3", "+avxvnni"),
    Level("avx2", 8, "maddubs", True, _AVX2, "x86-64-v3", ""),
    Level("neon", 4, "sdot", True, frozenset({"dotprod"}), "generic", "+neon,+dotprod"),
    Level("plain", 8, "widen", False, frozenset(), "", ""),
)  # fmt: skip
"""Instruction sets, the widest first: the host uses the first whose needs it meets."""


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A compile target: an instruction set, and LLVM's processor and features.

    Attributes:
        triple: LLVM's target triple; the host's if empty.
    """

    level: Level
    cpu: str
    features: str
    triple: str = ""

    @property
    def key(self) -> str:
        """Cache key of code compiled for the target."""
        return f"{self.level.name}|{self.cpu}|{self.features}|{self.triple}"

    def machine(self, jit: bool = True) -> Any:
        """Return LLVM's `TargetMachine`; `jit`: whether with LLVM's code model for JIT compilation."""
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


_WRITES_PAST_CACHES = frozenset({"sapphirerapids", "emeraldrapids"})
"""Processors (LLVM's names) on which non-temporal stores of large results are faster, even if the result is
read next: measured on the first, whose last-level cache is behind a mesh."""


@cache
def cached_nbytes() -> float:
    """Size of a thread's operands above which stores bypass the caches [bytes]; may be infinite."""
    cpu, _, _ = _host()
    if cpu not in _WRITES_PAST_CACHES:
        return float("inf")
    return max(0, cache_nbytes(2)) or 2 << 20


def cache_nbytes(level: int) -> int:
    """Size of the processor's cache of a level [bytes]; 0 or less if unknown."""
    name = f"SC_LEVEL{level}_CACHE_SIZE"
    return os.sysconf(name) if name in getattr(os, "sysconf_names", ()) else 0


@cache
def _host() -> tuple[str, Mapping[str, bool], str]:
    """LLVM's name of the processor, and its features as a dict and as LLVM's text."""
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
"""Lines of /proc/cpuinfo that determine LLVM's description of an x86 processor."""


def _processor() -> str:
    """Return these lines of the first processor; empty if the system lists no features."""
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
"""Linux on x86-64: `SYS_arch_prctl`, `ARCH_REQ_XCOMP_PERM`, and `XFEATURE_XTILEDATA`."""


@cache
def _may_use_tiles() -> bool:
    """Ask the Linux kernel for permission to use AMX tiles in this process; return whether it agrees."""
    if not sys.platform.startswith("linux"):
        return False
    ask = ctypes.CDLL(None, use_errno=True).syscall
    return bool(ask(_ARCH_PRCTL, _REQUEST_PERMISSION, ctypes.c_ulong(_TILE_DATA)) == 0)


def levels_here() -> tuple[Level, ...]:
    """Return the instruction sets that this processor supports, the widest first."""
    _, features, _ = _host()
    have = {name for name, on in features.items() if on}
    if not (have >= _AMX and _may_use_tiles()):
        have -= _AMX
    return tuple(level for level in LEVELS if level.needs <= have)


@cache
def target_for(name: str | None) -> CompileTarget:
    """Return the compile target of an instruction set by its name; `None`: the host's widest.

    Raises:
        ArgumentError: The name is unknown, or the processor does not support it.
    """
    cpu, _, features = _host()
    here = levels_here()
    if name is None:
        best = here[0]
        # LLVM may use all features of the host, even if only the plain level is supported.
        return CompileTarget(best, cpu, features)
    for level in here:
        if level.name == name:
            return CompileTarget(level, level.cpu or _baseline(), level.features)
    names = [level.name for level in here]
    raise ArgumentError(
        f"no instruction set {name!r} (simd=, GGMLB_SIMD): this processor runs {', '.join(names)}"
        f"{did_you_mean(name, names)}"
    )


def _baseline() -> str:
    return "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
