"""Discovery of candidates by reading text, without importing any backend.

Modules that `import ggmlb` does not need (entry points, packages) are imported inside functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import PathFinder
from itertools import chain

from ggmlb.core.errors import MissingBackendError, RegistryError
from ggmlb.interface.registry.candidate import FACTORY, Candidate
from ggmlb.system import env

GROUP = "ggmlb.backends"
"""The entry-point group. An entry reads `name = "package.module:backend_reg"`."""

_SHARED = frozenset({"common", "gpu"})
"""Folders of code shared by backends."""


def in_tree() -> Iterator[Candidate]:
    """Return the backends of ggmlb itself; the package need not be installed."""
    from importlib.util import find_spec
    from pkgutil import iter_modules

    spec = find_spec("ggmlb.backends")
    for info in iter_modules(spec.submodule_search_locations if spec else ()):
        if info.ispkg and info.name not in _SHARED:
            yield Candidate(info.name, f"ggmlb.backends.{info.name}:{FACTORY}", info.name, "ggmlb")


def installed(known: Collection[str] = ()) -> Iterator[Candidate]:
    """Return the backends with an entry point of an installed package, without known targets.

    A package's name and version take long to read: they are in a file of their own.
    """
    if not _may_name_others(known):
        return
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        module, _, factory = point.value.partition("[")[0].partition(":")  # as it stands: it may be malformed
        target = f"{module.strip()}:{factory.strip() or FACTORY}"
        if target not in known:
            origin = f"{point.dist.name} {point.dist.version}" if point.dist else "an entry point"
            yield Candidate(point.name, target, point.name.casefold(), origin)


def _may_name_others(known: Collection[str]) -> bool:
    """Whether an installed package may have an entry point with another target than the known ones.

    Reads files as text, where `importlib.metadata` would take longer than all other imports.
    """
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    for folder in sys.path:
        try:
            names = [name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info"))]
        except OSError:
            if os.path.isfile(folder):  # an archive, which may hold packages
                return True
            continue
        for name in names:
            try:
                with open(os.path.join(folder, name, "entry_points.txt"), encoding="utf-8") as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError):
                continue
            if GROUP in text:
                section = text.partition(f"[{GROUP}]")[2].partition("\n[")[0]
                lines = [line.partition("=")[2].strip() for line in section.splitlines() if line.strip()]
                if not lines or not {*lines} <= {*known}:
                    return True
    return False


def in_folder(folder: str | os.PathLike[str]) -> Iterator[Candidate]:
    """Return the backends of a folder: its `.py` files and packages that mention `backend_reg`.

    The expected name is the file's, without the prefix `ggmlb_` and anything after a `-`: `ggmlb_echo.py`,
    `echo-avx2.py`. Other Python files are ignored.

    Raises:
        RegistryError: There is no such folder, or it cannot be read.
    """
    root = os.fspath(folder)
    if not os.path.isdir(root):
        raise MissingBackendError(f"there is no folder {root!r} to load backends from")
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise RegistryError(f"the folder {root!r} cannot be read to load backends: {error}") from error
    for name in names:
        path = os.path.join(root, name)
        file = os.path.join(path, "__init__.py") if os.path.isdir(path) else path
        if name.startswith((".", "_")) or not file.endswith(".py") or not os.path.isfile(file):
            continue
        if _is_backend(file):
            yield _at_path(path, group=os.path.realpath(root))


def at(where: str | os.PathLike[str]) -> Candidate:
    """Return the candidate of a path, or of a module's name with or without `:factory`.

    Text with a path separator or the ending `.py` is a path.

    Raises:
        RegistryError: There is no such file, or no package in such a folder.
    """
    text = os.fspath(where)
    if isinstance(where, os.PathLike) or "/" in text or os.sep in text or text.endswith(".py"):
        if not (os.path.isfile(text) or _is_package(text)):
            raise MissingBackendError(
                f"there is no backend at {text!r}; give a .py file, a package folder or a module"
            )
        return _at_path(text, group=text)
    module, _, factory = text.partition(":")
    return Candidate(module.rpartition(".")[2], f"{module}:{factory or FACTORY}", text, "load")


def from_environment() -> Iterator[Candidate]:
    """Return the candidates of `GGMLB_BACKEND_PATH`; if it does not exist, one that fails to open."""
    where = env.text("GGMLB_BACKEND_PATH")
    if where is None:
        return
    if os.path.isdir(where) and os.access(where, os.R_OK) and not _is_package(where):
        yield from in_folder(where)
    elif os.path.isfile(where) or _is_package(where):
        yield _at_path(where, group=where)
    else:
        yield Candidate("GGMLB_BACKEND_PATH", os.path.abspath(where), where, "GGMLB_BACKEND_PATH")


def discover() -> list[Candidate]:
    """Return all candidates: ggmlb's own, installed, and of the environment; each target once."""
    found = {candidate.target: candidate for candidate in in_tree()}
    for candidate in chain(installed(frozenset(found)), from_environment()):
        found.setdefault(candidate.target, candidate)
    return list(found.values())


def _is_backend(file: str) -> bool:
    """Whether a file mentions `backend_reg`; true if it cannot be read, so that opening it reports that."""
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            return FACTORY in text.read()
    except OSError:
        return True


def _is_package(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "__init__.py"))


def _at_path(path: str, group: str) -> Candidate:
    target = os.path.realpath(path)
    stem = os.path.basename(target).partition(".")[0]
    return Candidate(stem.partition("-")[0].removeprefix("ggmlb_"), target, group, path)
