"""The direction of imports: data flows one way, and so do they.

A module imports only from its own room and from those that stand before it in `ROOMS`; a backend imports of
the rooms beside it only what backends share. Imports inside functions count too. Imports under TYPE_CHECKING
do not: nothing runs by them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ggmlb

ROOT = Path(ggmlb.__file__).parents[1]

ROOMS = {
    "core": "programs: types, tensors, one method per op, graphs, blocks, errors",
    "system": "services of the process: environment, forks, files, progress",
    "interface": "interfaces: registry, devices, buffers, streams, events, plans",
    "runtime": "execution: allocators, the scheduler, evaluate",
    "parallel": "tensor parallelism: the meta device, weights split by rows",
    "inspect": "inspection: drawings, traces, the sanitizer, comparison",
    "backends.common": "shared code: rules, kinds, fusion, strided memory, scratch memory, packed weights",
    "backends.gpu": "shared code of OpenCL and CUDA: portable kernels, their launches, base classes",
    "backends.cpu": "NumPy, the reference",
    "backends.opencl": "PyOpenCL",
    "backends.cuda": "CuPy, cuBLAS, and kernels for CUDA only",
    "backends.llvm": "machine code for processors",
    "backends.ggml": "compiled ggml libraries: their devices here, ours there",
    "backends.ray": "devices of other machines, over Ray",
    "backends": "the package of the backends above",
    "": "ggmlb's public names, and what an upper room gives to the classes of a lower one",
    "optimize": "training, on public names only: losses, optimizers, epochs, checkpoints",
    "models": "models, on public names only",
    "testing": "the conformance kit with cases for each op, its pytest plugin, the fake device",
    "serve": "the HTTP server of text models",
    "cli": "the `ggmlb` command",
    "__main__": "`python -m ggmlb`",
}
"""Every room, what it holds, and their order: each stands before those that may import it."""

FOR_BACKENDS = frozenset({"core", "system", "interface", "backends.common", "backends.gpu"})
"""What a backend may import besides its own room."""

SPLIT_WEIGHTS = "ggmlb.parallel.row_split"
"""Of `parallel`, what a backend may import: it offers the memory for weights that are split by rows."""

ALLOWED = {
    # The LLVM device computes in the CPU's buffers: it has no memory of its own.
    ("ggmlb.backends.llvm.device", "ggmlb.backends.cpu"),
    # `ggmlb.open_gguf`, imported when it is called.
    ("ggmlb", "ggmlb.models.gguf"),
}
"""Exceptions: (module, what it imports)."""

BESIDE_PUBLIC_NAMES = (
    "ggmlb.core.arguments", "ggmlb.core.errors", "ggmlb.core.lifetime", "ggmlb.inspect.compare",
    "ggmlb.inspect.html", "ggmlb.interface.memory_table", "ggmlb.optimize", "ggmlb.system.progress",
    "ggmlb.system.replaced_file",
)  # fmt: skip
"""What models and training may import besides public names: checks, errors, closing, sizes, tables, files."""

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
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "_typing.TYPE_CHECKING")
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


def room(module: str) -> str:
    """The room that a module is in; "" for `ggmlb` itself."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["backends"] else 1])


def fault(module: str, imported: str) -> str | None:
    """Say why `module` must not import `imported`; `None` if it may."""
    here, there = room(module), room(imported)
    if there not in ROOMS or here not in ROOMS:
        return "is in no room of the table"
    if here == there:
        return None
    if here.startswith("backends.") and there not in FOR_BACKENDS and not imported.startswith(SPLIT_WEIGHTS):
        return f"is not for {here!r}"
    if list(ROOMS).index(there) > list(ROOMS).index(here):
        return f"stands below {here!r} in the table"
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


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The sets of modules each of which imports, by way of the others, itself."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, todo = set(), [start]
        while todo:
            more = graph[todo.pop()] - found
            found |= more
            todo += more
        reached[start] = found
    found = [{m for m in reached[start] if start in reached[m]} for start in graph if start in reached[start]]
    return [circle for i, circle in enumerate(found) if circle not in found[:i]]


def test_no_file_imports_itself_by_way_of_others() -> None:
    texts = sources()
    graph = {
        module: {name for name, _ in imports(module, text, texts) if name in texts and name != module}
        for module, text in texts.items()
    }
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_a_public_class_name_is_defined_once() -> None:
    found: dict[str, set[str]] = {}
    for module, text in sources().items():
        for name in re.findall(r"^class ([A-Z]\w*)", text, re.MULTILINE):
            found.setdefault(name, set()).add(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_the_documentation_draws_this_table() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert "\n".join(f"| `{name}` | {what} |" for name, what in ROOMS.items() if name) in text


def test_every_folder_of_tests_is_told() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
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
            of_models = room(module) in ("optimize", "models")
            if of_models and isinstance(node, ast.ImportFrom) and node.module is not None:
                if not node.module.startswith("ggmlb") or node.module in BESIDE_PUBLIC_NAMES:
                    continue
                if room(node.module) == room(module):
                    continue
                public = {*ggmlb.__all__, "registry"}
                found += [f"{module}: {a.name}" for a in node.names if a.name not in public]
    assert found == []


@pytest.mark.parametrize(
    ("module", "text", "why"),
    [
        ("ggmlb.core.tensor", "from ggmlb.runtime.scheduler import Scheduler", "stands below 'core'"),
        ("ggmlb.core.tensor", "def f():\n    import ggmlb.interface", "stands below 'core'"),
        ("ggmlb.backends.cpu", "from ggmlb.backends.opencl import queue", "not for 'backends.cpu'"),
        ("ggmlb.backends.common.x", "from ggmlb.backends.gpu.y import z", "stands below 'backends.common'"),
        ("ggmlb.backends.cpu.x", "import ggmlb.runtime.alloc", "not for 'backends.cpu'"),
        ("ggmlb.new", "import ggmlb.core.errors", "in no room"),
        ("ggmlb.backends.new", "import ggmlb.core.errors", "in no room"),
    ],
)
def test_a_wrong_import_is_found(module: str, text: str, why: str) -> None:
    (told,) = faults({**dict.fromkeys(sources(), ""), module: text})
    assert why in told


def test_the_environment_is_read_in_one_place() -> None:
    readers = [
        m for m, text in sources().items() if "GGMLB_" in text and re.search(r"os\.(environ|getenv)", text)
    ]
    assert readers == ["ggmlb.system.env"]
