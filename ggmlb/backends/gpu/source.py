"""Kernel sources: lookup, assembly of a compilable text, and the parameters that they declare."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final, Literal

import numpy as np

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendBroken
from ggmlb.core.quants import grids

Language = Literal["opencl", "cuda"]
ParamKind = Literal["tensor", "int", "float"]

PORTABLE: Final = "ggmlb.backends.gpu.kernels"
"""The package of the portable texts. A backend's own texts are in a package of its own."""

BLOCKS: Final = "blocks.h"
"""The header generated from the data types; see `_blocks`."""

GRIDS: Final = "grids.h"
"""The header generated from the grids of IQ1, IQ2 and IQ3; see `_grids`."""

WITH_GRIDS: Final = frozenset({"rows_iq.h", "sub_blocks_iq.h"})
"""Headers that need `GRIDS`. Kernels that read none of its types are compiled without them: it is large."""

FORMATS: Final[Mapping[Language, Mapping[ParamKind, str]]] = {
    "opencl": {"tensor": "q4i4q", "int": "i", "float": "f"},
    "cuda": {"tensor": "Pq4i4q", "int": "i", "float": "f"},
}
"""Layout of each kind of parameter, as a `struct` format; a tensor's is `TENSOR_` in tensors.h."""

_INCLUDE = re.compile(r'^\s*#include "([\w.]+)"\s*$', re.MULTILINE)
_KERNEL = re.compile(r"^KERNEL (\w+)\(((?:[^()]|\(\w+\))*)\)", re.MULTILINE)
HEAD: Final = re.compile(_KERNEL.pattern + r"\s*\{\n", re.MULTILINE)
"""A kernel's declaration, up to the beginning of its body."""

_TYPES: Final = {"tensor": "tensor_t_", "int": "int", "float": "float"}
_BODY = re.compile(r"^KERNEL (\w+)\(.*?^}\n", re.MULTILINE | re.DOTALL)
_PARAM = re.compile(r"(?:(?:IN|OUT)\((?P<tensor>\w+)\)|(?P<kind>int|float) (?P<scalar>\w+))$")


@dataclass(frozen=True, slots=True)
class Param:
    """A kernel parameter; a tensor is passed as buffer, i64 offset, four int extents, four i64 strides.

    In OpenCL, all parameters but the buffers are one struct (PACKED_ARGS in tensors.h).
    """

    kind: ParamKind
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel declared in a kernel file.

    Attributes:
        name: Its name, unique over all families.
        family: The file that holds it, without the ending.
        params: Its parameters.
        package: The package of that file.
    """

    name: str
    family: str
    params: tuple[Param, ...]
    package: str = PORTABLE


@cache
def families(package: str = PORTABLE) -> tuple[str, ...]:
    """Return the names of the kernel files (`*.knl`) of a backend's package, sorted, without the ending."""
    folder = resources.files(package)
    return tuple(sorted(f.name.removesuffix(".knl") for f in folder.iterdir() if f.name.endswith(".knl")))


@cache
def kernels(package: str = PORTABLE) -> dict[str, Kernel]:
    """Return all kernels of a backend's package, by name.

    Raises:
        BackendBroken: A text declares a parameter of another kind, or a name twice.
    """
    found: dict[str, Kernel] = {}
    for family in families(package):
        for name, params in _KERNEL.findall(_text(package, f"{family}.knl")):
            if name in found:
                raise BackendBroken(
                    f"kernel {name} is defined in both {found[name].family}.knl and {family}.knl"
                )
            found[name] = Kernel(name, family, tuple(_param(name, p) for p in params.split(",")), package)
    return found


def _param(kernel: str, text: str) -> Param:
    match = _PARAM.match(" ".join(text.split()))
    if match is None:
        raise BackendBroken(
            f"kernel {kernel}: parameter {text!r}; declare it as IN(x), OUT(x), int x or float x"
        )
    if match["tensor"]:
        return Param("tensor", match["tensor"])
    return Param("int" if match["kind"] == "int" else "float", match["scalar"])


def source(
    kernel: Kernel, language: Language, defines: Iterable[tuple[str, str]], *, outlined: bool = False
) -> str:
    """Return a kernel's text to compile: prelude, needed headers, kernel (`outlined`: its body a function).

    The file's other kernels are left out: they need not compile with this one's macros.

    Args:
        kernel: The kernel.
        language: The compiler's language.
        defines: Its macros, which the text does not contain.
        outlined: In OpenCL, for groups of one work-item: the kernel calls a function that has its body, so
            that a compiler that copies kernels (PoCL: three times) compiles it once.
    """
    has_grids = not _types_with_grids().isdisjoint(value for _, value in defines)
    return _source(kernel, language, has_grids, outlined)


@cache
def _types_with_grids() -> frozenset[str]:
    return frozenset(dtype.name.lower() for dtype in types_with("DEQ8_FN", "rows_iq.h"))


@cache
def _source(kernel: Kernel, language: Language, has_grids: bool, outlined: bool) -> str:
    text = _assembled(kernel, f"prelude_{language}.h", has_grids)
    if language != "opencl":
        return text
    text = _with_packed_args(kernel, text, outlined)
    return f"#define OUTLINED\n{text}" if outlined else text


@cache
def layout(kernel: Kernel, language: Language) -> struct.Struct:
    """Return the layout of a kernel's arguments, each aligned to its size as in a C struct.

    In OpenCL, it is that of the last argument, which has all but the buffers. The padding at its end is a
    member: rusticl 22.3 does not count a struct's own in the argument's size.
    """
    found = "@" + "".join(FORMATS[language][param.kind] for param in kernel.params)
    return struct.Struct(f"{found}{-struct.calcsize(found) % 8}x" if language == "opencl" else found)


@cache
def tensor_words(kernel: Kernel, language: Language) -> list[int]:
    """Return the positions of tensors in a kernel's argument block, in words of 8 bytes."""
    found, words = "@", list[int]()
    for param in kernel.params:
        if param.kind == "tensor":
            words.append(struct.calcsize(f"{found}0q") // 8)
        found += FORMATS[language][param.kind]
    return words


def _with_packed_args(kernel: Kernel, text: str, outlined: bool) -> str:
    """Replace a kernel's scalar parameters and tensor layouts by one struct, `args_t_`."""
    members = " ".join(f"{_TYPES[p.kind]} {p.name};" for p in kernel.params)
    if layout(kernel, "opencl").format.endswith("4x"):  # all members are of 4 or 8 bytes
        members += " int pad_;"
    unpack = " ".join(
        f"UNPACK({p.name})" if p.kind == "tensor" else f"const {p.kind} {p.name} = args_.{p.name};"
        for p in kernel.params
    )

    buffers = [p.name for p in kernel.params if p.kind == "tensor"]

    def head(match: re.Match[str]) -> str:
        declared = ",".join(p for p in match[2].split(",") if p.endswith(")"))
        entry = f"KERNEL {match[1]}({declared}, const args_t_ args_)\n{{\n"
        start = f"typedef struct {{ {members} }} args_t_;\n"
        if not outlined:
            return f"{start}{entry}    {unpack}\n"
        given = "".join(f"{name}_buf, " for name in buffers)
        return (
            f"{start}BODY({declared});\n"
            f"{entry}    body_({given}&args_, IDS_);\n}}\n"
            f"BODY({declared})\n{{\n    const args_t_ args_ = *given_;\n    {unpack}\n"
        )

    return HEAD.sub(head, text)


def _assembled(kernel: Kernel, prelude: str, has_grids: bool) -> str:
    """Return a kernel's text with prelude and headers; headers missing in its package are portable ones."""
    seen = set[str]() if has_grids else {*WITH_GRIDS}

    def put(file: str) -> str:
        """Insert each header where it is first included."""
        if file in seen:
            return ""
        seen.add(file)
        return _INCLUDE.sub(lambda m: put(m[1]), _text(kernel.package, file))

    text = put(prelude) + put(f"{kernel.family}.knl")
    return _BODY.sub(lambda m: m[0] if m[1] == kernel.name else "", text)


def types_with(macro: str, *files: str, package: str = PORTABLE) -> frozenset[DType]:
    """Return the types that header files define `macro` for: they have lines such as `DEQ8_FN(f32)`."""
    text = "".join(_text(package, file) for file in files)
    names = re.findall(rf"^{macro}\((\w+)\)", text, re.MULTILINE)
    return frozenset(t for t in DType if t.name.lower() in names)


@cache
def _blocks() -> str:
    """Return the header blocks.h: constants of the block formats.

    For each type T: `GROUPS_T` of eight elements in a block (eight plain elements make one), its `BYTES_T`,
    byte offsets of its fields, such as `QS_T`; the values of its codes, `LEVELS_T`, or words `LEVEL_WORDS_T`.
    """
    lines = []
    for dtype in DType:
        name, n = dtype.name.lower(), max(8, dtype.block_size)
        codec = dtype.codec if dtype.is_quantized else None
        facts = {"groups": n // 8, "bytes": n // dtype.block_size * dtype.type_size}
        facts |= codec.offsets if codec else {}
        lines.append(f"enum {{ {', '.join(f'{k.upper()}_{name} = {v}' for k, v in facts.items())} }};")
        if codec and codec.levels:
            words = np.array(codec.levels, "i1").view("<u4")
            lines.append(f"#define LEVELS_{name} {', '.join(map(str, codec.levels))}")
            lines.append(f"#define LEVEL_WORDS_{name} {', '.join(f'{word:#x}u' for word in words)}")
    return "\n".join([*lines, ""])


def _grids() -> str:
    """Return the header grids.h: `GRID_T` for each type with a grid, the words of its entries."""
    return "".join(
        f"#define GRID_{name.lower()} {', '.join(map(hex, grids.grid(name)))}\n" for name in grids.NAMES
    )


@cache
def _text(package: str, file: str) -> str:
    if file in (BLOCKS, GRIDS):
        return _blocks() if file == BLOCKS else _grids()
    path = resources.files(package) / file
    if package != PORTABLE and not path.is_file():
        path = resources.files(PORTABLE) / file
    return path.read_text(encoding="utf-8")
