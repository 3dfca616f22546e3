"""Faults planted in kernels' texts, one at a time, to see that the programs of `programs.py` find them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ggmlb.backends.cuda.kernels import PACKAGE
from ggmlb.backends.cuda.program import text
from ggmlb.backends.gpu import Kernel, Launch
from ggmlb.backends.gpu.source import PORTABLE, source
from tests.support.ptx import build
from tests.support.ptx.programs import PROGRAMS

FILES = {
    PACKAGE: (
        "warps.h", "pieces.h", "quantize_q8.knl", "mul_mat_q8.knl", "mul_mat_vec16.knl", "flash_mma.knl",
        "dequantize.knl",
    ),
    PORTABLE: (
        "prelude_cuda.h", "copy.knl", "mul_mat.h", "mul_mat_vec.knl", "mul_mat_tile.knl", "flash_attn.knl",
        "norm.knl", "reduce.knl", "rope.knl", "softmax.knl", "sort.knl", "train.knl",
    ),
}  # fmt: skip
"""Texts that know of threads."""

KINDS = {
    "barrier": (r"(?<!\w)(?:BARRIER|BARRIER_ALL|__syncthreads|__syncwarp)\(\)", "(void)0"),
    "wait": (r"\bcopy_wait_but<[^>]*>\(\)", "(void)0"),
    "limit": (r"(?<=[\w)\]]) < (?=[\w(])", " <= "),
    "check": (r"\bif \((?=[^()]*(?:\([^()]*\)[^()]*)*\))", "if (1 || "),
    "least": (r"\bMIN_\(", "FIRST_OF_("),
    "index": (r"(?<=[\w])\[(?=[^\]\[]*\w[^\]\[]*\])", "[1 + "),
}
"""What is planted: a pattern in the text, and what takes its place."""

_DECLARED = re.compile(
    r"^\s*(?:const |static )*(?:float|uint4?|int|F8|U8|bool|i8_t|i64_t|double) \*?\w+$|CONSTANT|LOCAL_ARRAY"
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text with one fault.

    Attributes:
        package: Where the file is.
        file: Its name.
        kind: Of the fault, a key of `KINDS`.
        line: Where it is, from 1 on.
        code: That line, with the fault.
        text: The whole file, with the fault.
    """

    package: str
    file: str
    kind: str
    line: int
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.code}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have kernels built from this text."""
        texts = sys.modules["ggmlb.backends.gpu.source"]
        real: Callable[[str, str], str] = texts._text

        def changed(package: str, file: str) -> str:
            if file == self.file and real(package, file) == real(self.package, self.file):
                return self.text
            return real(package, file)

        texts._text = changed  # type: ignore[attr-defined]
        source.cache_clear()
        build.cache_clear()
        try:
            yield
        finally:
            texts._text = real  # type: ignore[attr-defined]
            source.cache_clear()
            build.cache_clear()


def mutants(kinds: tuple[str, ...] = tuple(KINDS)) -> list[Mutant]:
    """Return the texts with one fault each, of some kinds."""
    return [m for package, files in FILES.items() for file in files for m in _of_file(package, file, kinds)]


def _of_file(package: str, file: str, kinds: tuple[str, ...]) -> Iterator[Mutant]:
    text = (resources.files(package) / file).read_text(encoding="utf-8")
    commented = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    for kind in kinds:
        pattern, instead = KINDS[kind]
        for match in re.finditer(pattern, commented):
            start, end = commented.rfind("\n", 0, match.start()) + 1, commented.find("\n", match.start())
            before = commented[start : match.start()]
            if re.match(r"#define BARRIER|#if|#include|\s*enum|template", commented[start:end]):
                continue
            if kind == "index" and _is_declared(before):
                continue
            new = text[: match.start()] + instead + text[match.end() :]
            if kind == "least":
                new = "#define FIRST_OF_(a, b) (a)\n" + new
            code = (text[start : match.start()] + instead + text[match.end() : end]).strip()
            yield Mutant(package, file, kind, text.count("\n", 0, start) + 1, code, new)


def _is_declared(before: str) -> bool:
    """Whether what stands before a bracket declares an array."""
    last = re.split(r"[;{}(,]", before)[-1]
    first = before.split(";")[-1].split(",")[0]
    return bool(_DECLARED.search(last) or (_DECLARED.search(first) and "=" not in before))


Key = tuple["Kernel", tuple[tuple[str, str], ...], int]


@cache
def texts(name: str) -> dict[Key, str]:
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
