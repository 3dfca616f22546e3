"""The direction of imports: data flows one way, and so do they.

Tensor -> Graph -> allocator -> Scheduler -> Backend -> array library. A module imports only what stands
before it in `LAYERS`; a backend imports neither another backend nor anything from the registry on.
Imports inside functions count too. Imports under TYPE_CHECKING do not: nothing runs by them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ggmlb

ROOT = Path(ggmlb.__file__).parents[1]

LAYERS = (
    "errors",
    "lifetime",
    "process",
    "html",
    "env",
    "disk_cache",
    "progress",
    "enums",
    "quants",
    "dtypes",
    "exchange",
    "placement",
    "tensor",
    "ops",
    "context",
    "graph",
    "fusion",
    "interface",
    "row_split",
    "registry",
    "arrays",
    "alloc",
    "meta",
    "compare",
    "sanitizer",
    "timeline",
    "trace",
    "scheduler",
    "evaluate",
    "kernels",
    "backends",
    "",
    "models",
    "testing",
    "cli",
    "__main__",
)
"""Top-level modules and packages, each above those that may import it; "" is `ggmlb` itself."""

FOR_BACKENDS = frozenset(LAYERS[: LAYERS.index("row_split") + 1]) | {"kernels"}
"""What a backend may import besides its own folder and `backends.array`."""

ALLOWED = {
    # `Tensor.copy_to` is a method for comfort; copying is the business of buffers.
    ("ggmlb.core.tensor", "ggmlb.interface"),
    # `Context.from_array` is a method for comfort as well; who can use an array's memory, the registry knows.
    ("ggmlb.core.context", "ggmlb.interface.arrays"),
    # The LLVM device computes in the CPU's buffers: it has no memory of its own.
    ("ggmlb.backends.llvm.device", "ggmlb.backends.cpu"),
}
"""Exceptions: (module, what it imports)."""

Sources = Mapping[str, str]


def sources() -> Sources:
    """The text of every module of ggmlb, by name."""
    texts = {}
    for path in sorted((ROOT / "ggmlb").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        texts[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return texts


def imports(module: str, text: str, known: Sources) -> Iterator[tuple[str, int]]:
    """Yield the modules of ggmlb that a module imports, with the line."""
    tree = ast.parse(text)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: import by the full name"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in full]
        else:
            continue
        for name in names:
            if name == "ggmlb" or name.startswith("ggmlb."):
                yield name, node.lineno


def layer(module: str) -> str:
    return ([*module.split("."), ""])[1]


def backend(module: str) -> str:
    """The backend folder that a module is in, or ""."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["backends"] and len(parts) > 2 else ""


def fault(module: str, imported: str) -> str | None:
    """Say why `module` must not import `imported`; `None` if it may."""
    here, there = layer(module), layer(imported)
    if there not in LAYERS or here not in LAYERS:
        return "is not in the list of layers"
    mine, theirs = backend(module), backend(imported)
    if mine and there == "backends":
        return None if theirs in (mine, "array") else f"is of the backend {theirs!r}, not of {mine!r}"
    if mine and there not in FOR_BACKENDS:
        return "is not for backends"
    if LAYERS.index(there) > LAYERS.index(here):
        return f"stands below {here!r} in the list of layers"
    return None


def faults(texts: Sources) -> list[str]:
    return [
        f"{module}:{line} imports {imported}, which {why}"
        for module, text in texts.items()
        for imported, line in imports(module, text, texts)
        if (module, imported) not in ALLOWED
        for why in [fault(module, imported)]
        if why
    ]


def test_imports_go_one_way() -> None:
    assert faults(sources()) == []


def test_the_documentation_lists_the_layers() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    listed = text[text.index("stands above it in this list:") : text.index("`tests/unit/test_layers.py`")]
    assert re.findall(r"`(\w+)`", listed) == [name for name in LAYERS if name]


def test_the_tree_is_as_drawn() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawn = text[text.index("    ggmlb/") : text.index("    tests/")]
    names = re.findall(r"(?:^ {6}| {4,})(\w+)/? {2,}\S", drawn, re.MULTILINE)
    in_backends = {path.parent.name for path in (ROOT / "ggmlb/backends").glob("*/__init__.py")}
    # `backends/` has a line of its own, with its folders below.
    assert [n for n in names if n not in in_backends] == [n for n in LAYERS if n and n != "backends"]
    assert in_backends <= set(names)
    tests = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name[0] not in "_."}
    assert tests <= set(re.findall(r"(\w+)/", text[text.index("    tests/") :]))


def test_no_exception_is_stale() -> None:
    texts = sources()
    real = {(module, name) for module, text in texts.items() for name, _ in imports(module, text, texts)}
    assert real >= ALLOWED


def test_models_use_public_names_only() -> None:
    found = []
    for module, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if layer(module) == "models" and isinstance(node, ast.ImportFrom) and node.module is not None:
                origin = layer(node.module) if node.module.startswith("ggmlb") else None
                if origin in (None, "errors", "models"):
                    continue
                public = {*ggmlb.__all__, "registry"}
                found += [f"{module}: {a.name}" for a in node.names if a.name not in public]
    assert found == []


@pytest.mark.parametrize(
    ("module", "text", "why"),
    [
        ("ggmlb.core.tensor", "from ggmlb.runtime.scheduler import Scheduler", "stands below 'tensor'"),
        ("ggmlb.core.tensor", "def f():\n    import ggmlb.core.graph", "stands below 'tensor'"),
        ("ggmlb.interface.registry", "from ggmlb.backends.cpu import backend_reg", "stands below 'registry'"),
        ("ggmlb.runtime.scheduler.x", "from ggmlb.backends import cpu", "stands below 'scheduler'"),
        ("ggmlb.backends.cpu", "from ggmlb.backends.opencl import queue", "of the backend 'opencl'"),
        ("ggmlb.backends.cpu.array.x", "from ggmlb.backends.cpu.y import z", "of the backend 'cpu'"),
        ("ggmlb.backends.cpu.x", "import ggmlb.interface.registry", "not for backends"),
        ("ggmlb.backends.cpu.x", "import ggmlb", "not for backends"),
        ("ggmlb.runtime.alloc", "import ggmlb", "stands below 'alloc'"),
        ("ggmlb.new", "import ggmlb.core.errors", "not in the list"),
    ],
)
def test_a_wrong_import_is_found(module: str, text: str, why: str) -> None:
    (told,) = faults({**dict.fromkeys(sources(), ""), module: text})
    assert why in told


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "ggmlb.core.tensor",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ggmlb.core.graph import Graph",
        ),
        (
            "ggmlb.backends.cpu.x",
            "from ggmlb.backends.cpu.array.plan import ArrayPlan\nimport ggmlb.backends.gpu",
        ),
        ("ggmlb.backends.cpu.x", "from ggmlb.backends.cpu.y import z"),
        (
            "ggmlb.runtime.scheduler.x",
            "from ggmlb.runtime.scheduler.y import z\nimport ggmlb.runtime.alloc\nimport numpy",
        ),
        ("ggmlb.models.x", "from ggmlb import Context"),
    ],
)
def test_a_right_import_passes(module: str, text: str) -> None:
    assert faults({**dict.fromkeys(sources(), ""), module: text}) == []


def test_the_environment_is_read_in_one_place() -> None:
    readers = [
        m for m, text in sources().items() if "GGMLB_" in text and re.search(r"os\.(environ|getenv)", text)
    ]
    assert readers == ["ggmlb.system.env"]
