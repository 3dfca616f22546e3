"""Loader of compiled kernels without LLVM, whose library takes 60 MB and slows down the start.

A kernel is an object file of one function and its constants. On x86-64 with ELF, LLVM's JIT code model refers
to constants by absolute addresses only: the loader copies the sections to memory, applies relocations, and
makes the memory executable. It declines other formats, and objects that call library functions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

from ggmlb.core.errors import BackendError

_HEADER: Final = Struct("<6s10xHHIQQQIHHHHHH")
_SECTION: Final = Struct("<IIQQQQIIQQ")
_SYMBOL: Final = Struct("<IBBHQQ")
_RELOCATION: Final = Struct("<QIIq")
_ADDRESS: Final = Struct("<Q")

_ELF_64: Final = b"\x7fELF\x02\x01"
"""ELF of 64 bits, little endian."""

_RELOCATABLE, _X86_64 = 1, 62
_PROGRAM, _SYMBOLS, _RELOCATIONS = 1, 2, 4
_WRITTEN, _IN_MEMORY = 1, 2
_ABSOLUTE: Final = 1
"""R_X86_64_64: the address of a symbol plus an addend."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def load(data: bytes, symbol: str) -> int | None:
    """Load the function `symbol` of an object file; never unloaded, as threads may be running it.

    Args:
        data: Content of the file, as LLVM wrote it.
        symbol: Name of the function.

    Returns:
        The address of the function; `None` if only LLVM can load the file.

    Raises:
        BackendError: The system allows no executable memory.
    """
    magic, kind, machine, _, _, _, at, _, _, _, _, _, n, _ = _HEADER.unpack_from(data)
    if (magic, kind, machine) != (_ELF_64, _RELOCATABLE, _X86_64):
        return None
    sections = [_Section(*_SECTION.unpack_from(data, at + i * _SECTION.size)) for i in range(n)]
    image, starts = bytearray(), {}
    for i, section in enumerate(sections):
        if section.flags & _IN_MEMORY and section.kind == _PROGRAM and section.size:
            if section.flags & _WRITTEN:
                return None
            image += bytes(-len(image) % section.alignment)
            starts[i] = len(image)
            image += data[section.offset : section.offset + section.size]
    table = next(section for section in sections if section.kind == _SYMBOLS)
    symbols = list(_entries(data, table, _SYMBOL))
    places = []
    for section in sections:
        if section.kind == _RELOCATIONS and section.info in starts:
            for offset, relocation, number, addend in _entries(data, section, _RELOCATION):
                home, value = symbols[number][3:5]
                if relocation != _ABSOLUTE or home not in starts:
                    return None
                places.append((starts[section.info] + offset, starts[home] + value + addend))
    names = sections[table.link].offset
    for name, _, _, home, value, _ in symbols:
        if home in starts and data.startswith(f"{symbol}\0".encode(), names + name):
            return _placed(image, places) + starts[home] + int(value)
    return None


def _entries(data: bytes, section: _Section, kind: Struct) -> Iterator[tuple[Any, ...]]:
    return kind.iter_unpack(data[section.offset : section.offset + section.size])


def _placed(image: bytearray, places: Iterable[tuple[int, int]]) -> int:
    """Copy an image to executable memory and apply relocations `(offset, target)`; return its address."""
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(len(image))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = system.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))
    if base != ctypes.c_void_p(-1).value:
        for at, target in places:
            _ADDRESS.pack_into(image, at, base + target)
        ctypes.memmove(base, bytes(image), len(image))
        if not system.mprotect(ctypes.c_void_p(base), size, mmap.PROT_READ | mmap.PROT_EXEC):
            return int(base)
    why = os.strerror(ctypes.get_errno())
    raise BackendError(f"LLVM: no executable memory for compiled kernels: {why}; use the CPU device")
