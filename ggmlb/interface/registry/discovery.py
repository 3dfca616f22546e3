"""Candidates: backends that are discovered by reading text, and imported only when opened.

A backend is a module that exports `backend_reg() -> BackendReg` and optionally `score() -> float`, its
fitness for this machine: 0 for none, 1 by default. Of several variants of one name, the highest score is
used.

Opening a candidate returns its registration or raises one of two errors. `BackendUnavailable`: a library,
driver or device is missing; automatic choice skips it. `BackendBroken`: the backend is installed but fails;
this is always reported.

Modules that `import ggmlb` does not need (entry points, packages) are imported inside functions.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import chain
from types import ModuleType
from typing import Any

from ggmlb.core.errors import BackendBroken, BackendUnavailable, MissingBackendError, RegistryError, one_line
from ggmlb.interface import API_VERSION, BackendReg
from ggmlb.system import env

GROUP = "ggmlb.backends"
"""The entry-point group. An entry reads `name = "package.module:backend_reg"`."""

FACTORY = "backend_reg"
"""Function that a backend's module exports, unless its entry point names another."""

_SHARED = frozenset({"common", "gpu"})
"""Folders of code shared by backends."""

_C_LIBRARY = re.compile(r"(lib|ggml).*\.(so[\d.]*|dylib|dll)")
"""File names of ggml's C libraries and of libraries that they load."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that was discovered but not imported.

    Attributes:
        name: The expected name of the registration, in any case. If right, the backend is found by name
            without importing others.
        target: `"package.module:factory"`, or the full path of a `.py` file or of a package's folder.
        group: Candidates of one group are opened together, and the best variant of each name is taken.
        origin: Where it was discovered, for messages.
    """

    name: str
    target: str
    group: str
    origin: str

    @property
    def key(self) -> str:
        """The name in lower case, for comparisons."""
        return self.name.casefold()

    def open(self) -> tuple[float, BackendReg]:
        """Import the module; return the results of its `score()` and `backend_reg()`.

        Raises:
            BackendUnavailable: A library, driver or device is missing, or the score is 0.
            BackendBroken: The module fails, or violates the contract of a backend.
        """
        with failing_as_broken(f"{self.target} fails to load"):
            try:
                return self._open()
            except ModuleNotFoundError as missing:
                if missing.name is None or self._is_own(missing.name):
                    raise
                raise BackendUnavailable(
                    f"the Python module {missing.name!r} is not installed; install it"
                ) from missing

    def _open(self) -> tuple[float, BackendReg]:
        module, factory_name = self._import()
        factory = getattr(module, factory_name, None)
        if factory is None:
            raise BackendBroken(f"{self.target} exports no {factory_name}() that returns its BackendReg")
        score = float(module.score()) if hasattr(module, "score") else 1.0
        if score <= 0:
            raise BackendUnavailable(f"its score() is {score:g}: it does not support this machine")
        return score, checked_reg(factory(), self.target)

    def _import(self) -> tuple[ModuleType, str]:
        if os.path.isabs(self.target):
            return _module_from_path(self.target), FACTORY
        module, _, factory = self.target.partition(":")
        return importlib.import_module(module), factory or FACTORY

    def _is_own(self, module: str) -> bool:
        """Whether a module belongs to the backend's own package; if missing, the backend is broken."""
        own = _path_module_name(self.target) if os.path.isabs(self.target) else self.target.partition(":")[0]
        return module.partition(".")[0] == own.partition(".")[0]


@contextmanager
def failing_as_broken(what: str) -> Iterator[None]:
    """Context manager that re-raises errors of a backend's code, except Ctrl-C, as BackendBroken."""
    try:
        yield
    except (BackendUnavailable, BackendBroken, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BackendBroken(f"{what}: {one_line(error)}") from error


@contextmanager
def whole_imports() -> Iterator[None]:
    """Context manager that removes partly imported packages if Ctrl-C interrupts an import.

    If the import of a package fails, Python drops it but keeps its imported modules. Importing it again would
    fail, as these are not bound to it ("partially initialized module").
    """
    before = {*sys.modules}
    try:
        yield
    except KeyboardInterrupt:
        for name in {*sys.modules} - before:
            package = name.rpartition(".")[0]
            while package and package in sys.modules:
                package = package.rpartition(".")[0]
            if package:
                sys.modules.pop(name, None)
        raise


def checked_reg(reg: Any, source: str) -> BackendReg:
    """Return the registration `reg` after checking its type and API version; errors begin with its `source`.

    Raises:
        BackendBroken: It has another API version (`found`, `expected`), or is not a registration.
    """
    version = getattr(reg, "api_version", None)
    if version is not None and version != API_VERSION:
        raise BackendBroken(
            f"{source} was written for API version {version}; this ggmlb has API version {API_VERSION}: "
            "install matching versions",
            found=version,
            expected=API_VERSION,
        )
    if not isinstance(reg, BackendReg):
        raise BackendBroken(f"{source} returned {reg!r}; it must return a ggmlb.BackendReg")
    for fact, kind in (("name", str), ("priority", int)):
        if not isinstance(value := getattr(reg, fact), kind):
            raise BackendBroken(
                f"{source} returned a backend whose {fact} is {value!r}; it must be {kind.__name__}"
            )
    return reg


# -- where candidates are found --------------------------------------------------------------------------


def discover() -> list[Candidate]:
    """Return the candidates of ggmlb, installed packages and `GGMLB_BACKEND_PATH`, without duplicates."""
    found = {candidate.target: candidate for candidate in in_tree()}
    for candidate in chain(installed(frozenset(found)), from_environment()):
        found.setdefault(candidate.target, candidate)
    return list(found.values())


def in_tree() -> Iterator[Candidate]:
    """Return the backends of ggmlb itself; the package need not be installed."""
    from importlib.util import find_spec
    from pkgutil import iter_modules

    spec = find_spec("ggmlb.backends")
    for info in iter_modules(spec.submodule_search_locations if spec else ()):
        if info.ispkg and info.name not in _SHARED:
            yield Candidate(info.name, f"ggmlb.backends.{info.name}:{FACTORY}", info.name, "ggmlb")


def installed(known: Collection[str] = ()) -> Iterator[Candidate]:
    """Return the backends in entry points of installed packages, except targets in `known`.

    Names and versions of packages take long to read, so they are read only if needed.
    """
    if not _may_name_others(known):
        return
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        module, _, factory = point.value.partition("[")[0].partition(":")  # not parsed: may be malformed
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


def from_environment() -> Iterator[Candidate]:
    """Return the candidates in `GGMLB_BACKEND_PATH`; for a missing path, one that fails when opened."""
    where = env.text("GGMLB_BACKEND_PATH")
    if where is None:
        return
    if os.path.isdir(where) and os.access(where, os.R_OK) and not _is_package(where):
        yield from in_folder(where)
    elif os.path.isfile(where) or _is_package(where):
        yield _at_path(where, group=where)
    else:
        yield Candidate("GGMLB_BACKEND_PATH", os.path.abspath(where), where, "GGMLB_BACKEND_PATH")


def in_folder(folder: str | os.PathLike[str]) -> Iterator[Candidate]:
    """Return the backends of a folder: its `.py` files and packages that mention `backend_reg`.

    The expected name is the file's, without the prefix `ggmlb_` and anything after a `-`: `ggmlb_echo.py`,
    `echo-avx2.py`. Other Python files are ignored.

    Raises:
        RegistryError: There is no such folder, it cannot be read, or it holds only ggml's C libraries.
    """
    root = os.fspath(folder)
    if not os.path.isdir(root):
        raise MissingBackendError(f"there is no folder {root!r} to load backends from")
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise RegistryError(f"the folder {root!r} cannot be read: {error}; check its permissions") from error
    found = []
    for name in names:
        path = os.path.join(root, name)
        file = os.path.join(path, "__init__.py") if os.path.isdir(path) else path
        if not name.startswith((".", "_")) and file.endswith(".py") and os.path.isfile(file):
            found += [_at_path(path, group=os.path.realpath(root))] if _is_backend(file) else []
    if not found and any(_is_c_library(name) for name in names):
        raise _c_library(root, root)
    return iter(found)


def at(where: str | os.PathLike[str]) -> Candidate:
    """Return the backend `where`: a path, `module` or `module:factory` (a function), not yet imported.

    Text with a path separator or the ending `.py` is a path.

    Raises:
        RegistryError: There is no such file, no package in such a folder, or it is a library of ggml's.
    """
    text = os.fspath(where)
    if _is_c_library(text):
        raise _c_library(text, os.path.dirname(text) or ".")
    if isinstance(where, os.PathLike) or "/" in text or os.sep in text or text.endswith(".py"):
        if not (os.path.isfile(text) or _is_package(text)):
            raise MissingBackendError(
                f"there is no backend at {text!r}; give a .py file, a package folder or a module"
            )
        return _at_path(text, group=text)
    module, _, factory = text.partition(":")
    return Candidate(module.rpartition(".")[2], f"{module}:{factory or FACTORY}", text, "load")


def _is_c_library(path: str) -> bool:
    return _C_LIBRARY.fullmatch(os.path.basename(path)) is not None


def _c_library(path: str, folder: str) -> RegistryError:
    return RegistryError(
        f"{path!r} is no backend in Python; for the devices of ggml's own libraries, set the environment "
        f"variable GGMLB_GGML_PATH to {folder!r}"
    )


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


def _module_from_path(path: str) -> ModuleType:
    """Import a `.py` file or a package's folder once, under a module name derived from its full path."""
    name = _path_module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    if not os.path.exists(path):
        raise BackendBroken(f"there is no file or folder {path!r}")
    from importlib.util import module_from_spec, spec_from_file_location

    file, inside = (os.path.join(path, "__init__.py"), [path]) if os.path.isdir(path) else (path, None)
    spec = spec_from_file_location(name, file, submodule_search_locations=inside)
    if spec is None or spec.loader is None:
        raise BackendBroken(f"{file} is not Python source")
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs, because a package's imports look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _path_module_name(path: str) -> str:
    from hashlib import sha256

    stem = os.path.basename(path).partition(".")[0]
    return f"ggmlb_loaded_{stem}_{sha256(path.encode()).hexdigest()[:12]}"
