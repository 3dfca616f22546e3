"""The pages say what is: their programs run, their messages exist, their code is the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ggmlb
from ggmlb.cli.app import COMMANDS
from scripts.pages import commands, ops
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("page", "program"),
    [
        (page, program)
        for page in (
            "index.md",
            "getting-started.md",
            "debugging.md",
            "conformance.md",
            "onnx.md",
            "training.md",
        )
        for program in blocks(page, "python")
    ],
)
def test_programs_print_what_they_say(page: str, program: str, tmp_path: Path) -> None:
    if page == "onnx.md":
        pytest.importorskip("onnx")
    done = python("-W", "error", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"print\(.*\)\s+# (.*)", program):
        assert said in done.stdout


def test_the_page_on_backends_is_the_backend_that_is_tested() -> None:
    package = ROOT / "ggmlb/testing/template"
    module = (package / "__init__.py").read_text()
    typed_in = "\n\n\n".join(block.strip("\n") for block in blocks("backend.md", "python"))
    assert typed_in == module.strip("\n")
    assert blocks("backend.md", "toml") == [(package / "pyproject.toml").read_text()]


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module that a program may show: all but docstrings; values in them are `{}`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from texts(node)


SHOWN = "\n".join(
    text for path in (ROOT / "ggmlb").rglob("*.py") for text in texts(ast.parse(path.read_text()))
)


@pytest.mark.parametrize(
    "message", re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
)
def test_messages_exist(message: str) -> None:
    pattern = ".{0,80}".join(map(re.escape, message.split("…")))
    assert re.search(pattern, SHOWN), message


def test_all_environment_variables_are_told() -> None:
    told = "".join((DOCS / page).read_text() for page in ("debugging.md", "cuda.md"))
    assert set(re.findall(r"GGMLB_\w+", SHOWN)) == set(re.findall(r"^\| `(GGMLB_\w+)`", told, re.MULTILINE))


def test_each_op_is_in_one_family_and_in_the_index() -> None:
    families = [set(ops.methods(family)) for family in ops.families()]
    shown = [name for family in families for name in family]
    own = {*vars(ggmlb.Context), *vars(ggmlb.Context.__mro__[-2])}  # of all contexts, as `new_tensor`
    assert sorted(shown) == sorted(x for x in dir(ggmlb.Context) if not x.startswith("_") and x not in own)
    index = str(next(iter(ops.pages())).content)
    assert all(f"[ggmlb.Context.{name}]" in index for name in shown)


def test_each_command_has_a_page_with_its_options_and_statuses() -> None:
    pages = {page.title: str(page.content) for page in commands.pages()}
    assert list(pages) == ["ggmlb", *COMMANDS]
    assert all(
        "`-h, --help`" in page and f"\nggmlb {name} [OPTIONS]" in page
        for name, page in list(pages.items())[1:]
    )
    assert "`--mode MODE`" in pages["test"]
    assert "| `130, 143` | stopped" in pages["test"]
    assert all("## Exit status\n\n| status" in page for name, page in pages.items() if name != "ggmlb")
