"""Candidates: discovered backends, before and while they are imported.

A backend is a module that exports `backend_reg() -> BackendReg` and optionally `score() -> float`, its
fitness for this machine: 0 for none, 1 by default. Of several variants of one name, the highest score is
used.

Opening a candidate returns its registration or raises one of two errors. `BackendUnavailable`: a library,
driver or device is missing; automatic choice skips it. `BackendBroken`: the backend is installed but fails;
the user is told.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ggmlb.core.errors import BackendBroken, BackendUnavailable
from ggmlb.interface import API_VERSION, BackendReg

FACTORY = "backend_reg"
"""Function that a backend's module exports, unless its entry point names another."""


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
        """The name in the form used for comparisons."""
        return self.name.casefold()

    def open(self) -> Variant:
        """Import the module, and call its `score` and `backend_reg`.

        Raises:
            BackendUnavailable: A library, driver or device is missing, or the score is 0.
            BackendBroken: The module fails, or violates the contract of a backend.
        """
        try:
            return self._open()
        except (BackendUnavailable, BackendBroken):
            raise
        except ModuleNotFoundError as missing:
            if missing.name is None or self._is_own(missing.name):
                raise self._broken(missing) from missing
            raise BackendUnavailable(
                f"it needs the Python module {missing.name!r}, which is not installed"
            ) from missing
        except (Exception, SystemExit) as error:
            raise self._broken(error) from error

    def _open(self) -> Variant:
        module, factory_name = self._import()
        factory = getattr(module, factory_name, None)
        if factory is None:
            raise BackendBroken(f"{self.target} exports no {factory_name}() that returns its BackendReg")
        score = float(module.score()) if hasattr(module, "score") else 1.0
        if score <= 0:
            raise BackendUnavailable(f"its score() is {score:g}: it does not support this machine")
        reg = factory()
        check_reg(reg, self.target)
        return Variant(self, score, reg)

    def _import(self) -> tuple[ModuleType, str]:
        if os.path.isabs(self.target):
            return _module_from_path(self.target), FACTORY
        module, _, factory = self.target.partition(":")
        return importlib.import_module(module), factory or FACTORY

    def _is_own(self, module: str) -> bool:
        """Whether a module belongs to the backend's own package; if missing, the backend is broken."""
        root = module.partition(".")[0]
        if os.path.isabs(self.target):
            return root == _path_module_name(self.target)
        return root == self.target.partition(":")[0].partition(".")[0]

    def _broken(self, error: BaseException) -> BackendBroken:
        return BackendBroken(f"{self.target} fails to load: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Variant:
    """An opened candidate: its score and its registration."""

    candidate: Candidate
    score: float
    reg: BackendReg


@contextmanager
def whole_imports() -> Iterator[None]:
    """Context manager that removes partly imported packages if Ctrl-C interrupts an import.

    If the import of a package fails, Python drops it but keeps its imported modules. Importing it again would
    fail, as these are not bound to it ("partially initialized module").
    """
    before = {*sys.modules}
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            for name in {*sys.modules} - before:
                package = name.rpartition(".")[0]
                while package and package in sys.modules:
                    package = package.rpartition(".")[0]
                if package:
                    sys.modules.pop(name, None)
        raise


def check_reg(reg: Any, source: str) -> None:
    """Check the result of a factory, API version first.

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
    sys.modules[name] = module  # before it runs, as a package's own imports ask for it
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
