"""Kernels' texts with a barrier or a wait left out, to see that the programs of `programs.py` miss it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ggmlb.backends.cuda.driver import text
from ggmlb.backends.cuda.kernels import PACKAGE
from ggmlb.backends.gpu import Kernel, Launch
from ggmlb.backends.gpu.source import PORTABLE
from tests.support.ptx import build
from tests.support.ptx.programs import PROGRAMS

LEFT_OUT = re.compile(r"(?<!\w)(?:BARRIER(?:_ALL)?|__sync(?:threads|warp)|copy_wait_but<[^>]*>)\(\)")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text with one fault.

    Attributes:
        package: Where the file is.
        file: Its name.
        line: Where the fault is, from 1 on.
        code: That line, with the fault.
        text: The whole file, with the fault.
    """

    package: str
    file: str
    line: int
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have kernels built from this text."""
        texts: Any = sys.modules["ggmlb.backends.gpu.source"]
        real = texts._text

        def changed(package: str, file: str) -> str:
            is_here = file == self.file and real(package, file) == real(self.package, self.file)
            return self.text if is_here else str(real(package, file))

        def put(function: Any) -> None:
            texts._text = function
            texts._source.cache_clear()
            build.cache_clear()

        put(changed)
        try:
            yield
        finally:
            put(real)


def mutants() -> list[Mutant]:
    """Return the texts with one fault each."""
    found = []
    for package in (PACKAGE, PORTABLE):
        for path in sorted(resources.files(package).iterdir(), key=lambda path: path.name):
            if not path.name.endswith((".knl", ".h")) or "opencl" in path.name:
                continue
            whole = path.read_text(encoding="utf-8")
            for match in LEFT_OUT.finditer(whole):
                start, end = whole.rfind("\n", 0, match.start()) + 1, whole.find("\n", match.start())
                if not re.match(r"#define BARRIER|template|DEVICE_FN void copy_wait", whole[start:end]):
                    new = f"{whole[: match.start()]}(void)0{whole[match.end() :]}"
                    code = new[start : end + len(new) - len(whole)].strip()
                    found.append(Mutant(package, path.name, whole.count("\n", 0, start) + 1, code, new))
    return found


@cache
def texts(name: str) -> dict[tuple[Kernel, tuple[tuple[str, str], ...], int], str]:
    """Return the texts of the kernels that a program of `PROGRAMS` runs."""
    keys = {(s.kernel, s.defines, s.wg) for s in PROGRAMS[name]() if isinstance(s, Launch)}
    return {key: text(*key) for key in keys}


def found(mutant: Mutant) -> str | None:
    """Return what the first program says that fails, of those whose kernels have the fault."""
    without = {name: texts(name) for name in PROGRAMS}
    with mutant.planted():
        for name, kernels in without.items():
            if any(text(*key) != right for key, right in kernels.items()):
                try:
                    PROGRAMS[name]()
                except (AssertionError, RuntimeWarning) as error:
                    return f"{name}: {error}"
    return None
