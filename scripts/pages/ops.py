"""Pages of the ops: one for each family, and all ops by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import FunctionType, ModuleType

from ggmlb.core import ops
from ggmlb.core.ops.base import OpBase
from scripts.pages.page import Page


def families() -> list[ModuleType]:
    """The modules of `ggmlb.core.ops` that have methods of `Context`."""
    modules = [import_module(f"{ops.__name__}.{found.name}") for found in iter_modules(ops.__path__)]
    return [module for module in modules if methods(module)]


def methods(family: ModuleType) -> dict[str, FunctionType]:
    """The methods that a family gives to `Context`, in the order of their definition."""
    classes = [c for c in vars(family).values() if inspect.isclass(c) and c.__module__ == family.__name__]
    return {
        name: method
        for cls in classes
        if issubclass(cls, OpBase) and cls is not OpBase
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def pages() -> Iterator[Page]:
    """The index of ops, then the families by title."""
    rows, found = {}, []
    for family in families():
        about = str(family.__doc__).strip()
        title = re.split(r"[:;(]|\.(?:\s|$)", about)[0].strip()
        path = f"{family.__name__.rpartition('.')[2]}.md"
        names = methods(family)
        told = about.removeprefix(f"{title}.").strip()
        listed = "\n\n".join(f"::: ggmlb.Context.{name}" for name in names)
        found.append(Page(f"reference/ops/{path}", title, f"# {title}\n\n{told}\n\n{listed}\n"))
        for name, method in names.items():
            does = re.sub(r" \(ggml_\w+\)", "", str(method.__doc__).partition("\n")[0])
            twin = f"{name}_inplace"
            also = f", [`_inplace`][ggmlb.Context.{twin}]" if twin in names else ""
            if not name.endswith("_inplace") or name.removesuffix("_inplace") not in names:
                rows[name] = f"| [`{name}`][ggmlb.Context.{name}]{also} | {does} | [{title}]({path}) |"
    text = (
        "# Ops by name\n\nEach is a method of [`Context`][ggmlb.Context], with the name and the order of "
        "arguments of `ggml.h`; `_inplace` writes into the memory of its first operand.\n"
    )
    table = "\n".join(["| op | does | family |", "|---|---|---|", *(rows[name] for name in sorted(rows))])
    yield Page("reference/ops/index.md", "Ops by name", f"{text}\n{table}\n")
    yield from sorted(found, key=lambda page: page.title.lower())
