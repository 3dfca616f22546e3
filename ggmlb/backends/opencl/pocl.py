"""Workarounds for PoCL: slow compilation, and processors unknown to its compiler.

**Declarations.** PoCL parses Clang's 18,000 lines of builtin functions before each program, twice: 55 of the
65 ms that a small program takes. `QUICK_OPTIONS` skip that header by its include guard; our kernels then
declare the builtins that they call.

**Unknown processors.** PoCL 3.0, the newest on PyPI, gets the processor's name from its LLVM. LLVM 14 calls
unknown ones (AMD's Zen 5) `generic`, and then refuses that name as a target: every build fails with "unknown
target CPU 'generic'" (PoCL's issues 512 and 1049), and neither an option nor an environment variable sets
another.
"""

from __future__ import annotations

import os
from struct import unpack_from
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyopencl as cl

QUICK_OPTIONS: Final = ("-D_OPENCL_H_", "-DOWN_BUILTINS")
"""Options for programs that declare the builtin functions they call (kernels/builtins.h)."""

UNKNOWN: Final = b"generic"
HASWELL: Final = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
"""Linux CPU flags required by LLVM's target `haswell`."""

_STRUCT: Final = 1024
"""Bytes searched of PoCL's device structure; 3.0 has the name's address at offset 640."""

_named: Final[set[int]] = set()
"""Devices of this process that were renamed; PoCL's info still reports `generic`."""


def is_pocl(platform: cl.Platform) -> bool:
    """Whether the platform is PoCL, by its version, because distributions may change the name."""
    return " PoCL " in f"{platform.version} "


def is_of_unknown_processor(device: cl.Device) -> bool:
    """Whether the device is PoCL's, on a processor that its compiler does not know, so that builds fail."""
    unknown = is_pocl(device.platform) and device.version.endswith(f"-{UNKNOWN.decode()}")
    return unknown and device.int_ptr not in _named


def name_processor(device: cl.Device) -> bool:
    """Overwrite the processor's name in PoCL's memory by one that its compiler knows.

    The name is found by its text and overwritten in place; unreadable memory is skipped.

    Returns:
        Whether the device can build now; `False` if the name was not found.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDWR)
    except OSError:
        return False
    try:
        at = next((a for a in _pointers(memory, device.int_ptr) if _text(memory, a) == UNKNOWN), None)
        if at is None:
            return False
        os.pwrite(memory, _known_name() + b"\0", at)
        _named.add(device.int_ptr)
        return True
    except OSError:
        return False
    finally:
        os.close(memory)


def _pointers(memory: int, start: int) -> list[int]:
    words = os.pread(memory, _STRUCT, start)
    return [unpack_from("=Q", words, i)[0] for i in range(0, len(words) - 7, 8)]


def _text(memory: int, address: int) -> bytes:
    try:
        return os.pread(memory, len(UNKNOWN) + 1, address).partition(b"\0")[0]
    except (OSError, OverflowError):
        return b""


def _known_name() -> bytes:
    """Return the best known name that is not longer than the name it replaces."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
            flags = next((line.split() for line in info if line.startswith("flags")), [])
    except OSError:
        flags = []
    return b"haswell" if frozenset(flags) >= HASWELL else b"x86-64"
