"""Candidates: backends known as text, and how one is opened.

A backend is a module that exports `backend_reg() -> BackendReg`, and optionally `score() -> float`: how
well it fits this machine. 0 means not at all; of several variants of one name the highest is taken; a
module without it scores 1.

Opening a candidate either gives its registration, or raises one of two errors. `BackendUnavailable`:
a library, driver or device is missing, so that an automatic choice moves on. `BackendBroken`: the
backend is there and fails, which the user must hear of.
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
"""What a backend's module exports, unless an entry point names something else."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that was found but not imported.

    Attributes:
        name: What it is expected to be called, in any case: the registration's name. It need not be
            right, but where it is, the backend is found by name without importing the others.
        target: `"package.module:factory"`, or the full path of a `.py` file or of a package's folder.
        group: Candidates of one group are opened together, and the best variant of each name is taken.
        origin: Where it was found, for messages.
    """

    name: str
    target: str
    group: str
    origin: str

    @property
    def key(self) -> str:
        """The name as names are compared."""
        return self.name.casefold()

    def open(self) -> Variant:
        """Import the module, and ask it for its score and its registration.

        Raises:
            BackendUnavailable: A library, driver or device is missing, or the score is 0.
            BackendBroken: The module fails, or breaks the contract of a backend.
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
            raise BackendBroken(f"{self.target} exports no {factory_name}() that gives its BackendReg")
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
        """Whether a module is of the backend's own package, so that its absence is a fault of it."""
        root = module.partition(".")[0]
        if os.path.isabs(self.target):
            return root == _path_module_name(self.target)
        return root == self.target.partition(":")[0].partition(".")[0]

    def _broken(self, error: BaseException) -> BackendBroken:
        return BackendBroken(f"{self.target} fails to load: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Variant:
    """An opened candidate: its score, and its registration."""

    candidate: Candidate
    score: float
    reg: BackendReg


@contextmanager
def whole_imports() -> Iterator[None]:
    """Where Ctrl-C interrupts imports in a `with` block, forget the parts of packages that came no further.

    Python drops a package whose import fails, but keeps those of its modules that were imported. When the
    package is imported again, they are not bound to it, and it fails ("partially initialized module").
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
    """Check what a factory returned, the API version first.

    Raises:
        BackendBroken: It speaks another API version (`found`, `expected`), or is no registration.
    """
    version = getattr(reg, "api_version", None)
    if version is not None and version != API_VERSION:
        raise BackendBroken(
            f"{source} was written for API version {version}; this ggmlb has API version {API_VERSION}: "
            "install versions of the two that fit",
            found=version,
            expected=API_VERSION,
        )
    if not isinstance(reg, BackendReg):
        raise BackendBroken(f"{source} gave {reg!r}; it must give a ggmlb.BackendReg")
    for fact, kind in (("name", str), ("priority", int)):
        if not isinstance(value := getattr(reg, fact), kind):
            raise BackendBroken(
                f"{source} gave a backend whose {fact} is {value!r}; it must be {kind.__name__}"
            )


def _module_from_path(path: str) -> ModuleType:
    """Import a `.py` file or a package's folder, once: by a module name made from its full path."""
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
