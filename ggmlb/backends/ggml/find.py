"""Search for the ggml libraries of this machine by their file names; none is loaded."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ggmlb.core.errors import BackendUnavailable
from ggmlb.system import env

PACKAGES: Final = (
    ("xllamacpp", "xllamacpp", ""),
    ("llama-cpp-python", "llama_cpp", "lib"),
    ("ggml-python", "ggml", "lib"),
)
"""Packages that hold a library: the name on PyPI, the module, and the folder in it."""

_ENDING = r"(\.so(\.\d+)*|(\.\d+)*\.dylib|\.dll)$"
_BASE = re.compile(r"(lib)?ggml-base.*" + _ENDING)
_MAIN = re.compile(r"(lib)?ggml(?!-)(\..*)?" + _ENDING)
_ANY = re.compile(r".*" + _ENDING)


@dataclass(frozen=True, slots=True)
class Found:
    """A ggml library found on disk.

    Attributes:
        parts: Paths of its shared libraries, in loading order.
        folder: Folder of its backend plugins; empty if they are built in.
        origin: Package, folder or variable that it was found by, for messages.
    """

    parts: tuple[str, ...]
    folder: str
    origin: str


def libraries() -> list[Found]:
    """Return the libraries in GGMLB_GGML_PATH, in installed packages and in system folders, each once.

    GGMLB_GGML_PATH has files or folders, separated as in PATH.
    """
    found: dict[tuple[str, ...], Found] = {}
    for library in (*_of_environment(), *_of_packages(), *_of_system()):
        found.setdefault(library.parts, library)
    return list(found.values())


def _of_environment() -> Iterator[Found]:
    for place in env.paths("GGMLB_GGML_PATH"):
        yield at(Path(place)) or Found((place,), "", f"GGMLB_GGML_PATH={place}")


def _of_packages() -> Iterator[Found]:
    for package, module, inner in PACKAGES:
        spec = find_spec(module)
        for folder in (spec and spec.submodule_search_locations) or ():
            try:
                origin = f"{package} {version(package)}"
            except PackageNotFoundError:  # its files alone are on the path, or another package has the name
                origin = package
            if (library := at(Path(folder, inner), origin)) is not None:
                yield library


def _of_system() -> Iterator[Found]:
    told = env.paths("DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH")
    distribution = map(str, Path("/usr/lib").glob("*-linux-gnu"))
    for folder in dict.fromkeys((*told, "/usr/local/lib", "/usr/lib", *distribution, "/opt/homebrew/lib")):
        if (library := _of_parts(Path(folder), f"the system's {folder}")) is not None:
            yield library


def at(place: Path, origin: str = "") -> Found | None:
    """Return the library at a path (file or folder), or `None`; `origin` names it in messages."""
    origin = origin or str(place)
    if place.is_dir():
        if (library := _of_parts(place, origin)) is not None:
            return library
        whole = (file for file in sorted(place.iterdir()) if _ANY.match(file.name) and _has_ggml(file))
        return next((Found((str(file.resolve()),), "", origin) for file in whole), None)
    if _MAIN.match(place.name) and (library := _of_parts(place.parent, origin)) is not None:
        return library
    return Found((str(place.resolve()),), "", origin) if place.is_file() and _has_ggml(place) else None


def _of_parts(folder: Path, origin: str) -> Found | None:
    """Return the library in a folder that has separate files for base, registry and backends."""
    try:
        names = sorted(os.listdir(folder), key=len)
    except OSError:
        return None
    base, main = (next(filter(kind.match, names), None) for kind in (_BASE, _MAIN))
    if base is None or main is None:
        return None
    return Found(tuple(str((folder / name).resolve()) for name in (base, main)), str(folder), origin)


def _has_ggml(file: Path) -> bool:
    """Whether a file contains the symbol `ggml_backend_dev_count`."""
    try:
        with file.open("rb") as binary, mmap.mmap(binary.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(b"ggml_backend_dev_count\0") >= 0
    except (OSError, ValueError):  # unreadable, or empty
        return False


def in_process(library: str | os.PathLike[str] | None = None) -> Found:
    """Return a library that this process uses or will use.

    Args:
        library: Name of its package on PyPI or of its module, or its file or folder. By default the one that
            is loaded; if none is, the one in GGMLB_GGML_PATH, else the one that is installed.

    Raises:
        BackendUnavailable: There is no such library, or more than one; the message has their names.
    """
    ask = "register_with_ggml"
    if library is not None:
        names = (name for name, module, _ in PACKAGES if library in (name, module))
        package = next(names, None)
        found = next((f for f in _of_packages() if package and f.origin.startswith(package)), None)
        found = found or (at(Path(library)) if package is None else None)
        if found is None:
            known = ", ".join(name for name, *_ in PACKAGES)
            raise BackendUnavailable(
                f"{ask}: {os.fspath(library)!r} holds no ggml library; give the path of libggml or of the "
                f"extension module that holds it, or an installed package ({known})"
            )
        return found
    installed = libraries()
    loaded = [each for each in installed if is_loaded(each)]
    choice = loaded or list(_of_environment()) or installed
    if len(choice) != 1:
        state = "loaded" if loaded else "found" if installed else ""
        found_here = "no ggml library was found" if not choice else (
            f"{len(choice)} ggml libraries are {state} ({', '.join(each.origin for each in choice)})"
        )  # fmt: skip
        raise BackendUnavailable(f'{ask}: {found_here}; name one: library="xllamacpp", or its path')
    return choice[0]


def is_loaded(library: Found) -> bool:
    """Whether this process has loaded a library; `False` where the system cannot tell."""
    mode = getattr(os, "RTLD_NOLOAD", None)
    if mode is None:
        return False
    try:
        for part in library.parts:
            ctypes.CDLL(part, mode | os.RTLD_LAZY)
    except OSError:
        return False
    return True
