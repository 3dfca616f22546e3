"""`ggmlb diff`: the first node at which two devices differ, in programs or a language model."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, Row, console, print_table
from ggmlb.cli.model_options import ModelFileOption, model_file
from ggmlb.cli.options import JsonOption, complete_devices, count, device_names
from ggmlb.cli.passages import PASSAGES
from ggmlb.core.errors import ArgumentError, Error, shown
from ggmlb.inspect.compare import Difference, differences, first_above
from ggmlb.testing.names import device_names as split_names

if TYPE_CHECKING:
    from ggmlb.core.graph import Graph
    from ggmlb.core.tensor import Tensor
    from ggmlb.interface import Backend
    from ggmlb.models.text.compare import Differences, NodeDifference
    from ggmlb.testing.programs import Case

LIMIT = 1e-5
"""NMSE above which a node differs, far above rounding errors; a golden program may allow more."""

N_PASSAGES = 2
"""Passages that a model computes where no prompt is given."""

ERRORS = (Column("NMSE", right=True), Column("Max error", right=True, drop=1))


@dataclass(frozen=True, slots=True)
class DiffProgram:
    """A graph to compute on two devices, with its inputs.

    Attributes:
        name: Name in the table.
        limit: The allowed NMSE.
        graph: Its graph, unplaced tensors included.
        fill: Writes the inputs of the placed graph.
    """

    name: str
    limit: float
    graph: Graph
    fill: Callable[[], None]


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The result of a program: its nodes, or why it was not computed."""

    program: str
    nodes: list[Difference]
    limit: float
    skipped: str = ""

    @property
    def first(self) -> Difference | None:
        """The first node that differs."""
        return first_above(self.nodes, self.limit)


def diff(
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            "-d",
            metavar="A,B",
            help="Two devices; A is the reference.",
            autocompletion=complete_devices,
        ),
    ],
    program: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|PROGRAM",
            help="Language model, a GGUF file. Or a program: a folder or .jsonl file of golden programs, or "
            "FILE.py[:FUNCTION] or MODULE:FUNCTION, which returns a Graph, or a Graph and a dict of its "
            "leafs' values by name.",
        ),
    ] = None,
    model: ModelFileOption = None,
    pattern: Annotated[
        str,
        typer.Option(
            "--pattern",
            "-p",
            metavar="REGEX",
            help="Regular expression that selects golden programs by id (default: all).",
        ),
    ] = "",
    nmse: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=f"NMSE above which a node differs (default: {LIMIT:g}, or a golden program's own; 0.05 for "
            "models).",
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="Prompt for a model (default: a built-in text).")
    ] = "",
    max_tokens: Annotated[
        int,
        count(
            "--max-tokens",
            "-n",
            help="Number of tokens that a model generates, to find the first that differs. ",
            least=0,
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compute a model or program on two devices, node by node, and show the first difference.

    The exit status is 1 if they differ. A leaf without values from the program gets random numbers, a leaf of
    integers zeros. Ops of a model that a device does not support run on the CPU.

    Examples:
      ggmlb diff -d CPU,LLVM model.gguf --max-tokens 64
      ggmlb diff -d CPU,OpenCL0 model.py:build
      ggmlb diff -d CPU,OpenCL0 tests/golden/programs -p rope
    """
    names = split_names(devices)
    if len(names) != 2:
        raise ArgumentError(f"--devices {devices}: give two devices, as CPU,OpenCL0")
    program = str(model_file(Path(program) if program else None, model))
    is_model = program.endswith(".gguf")
    if is_model and pattern:
        raise ArgumentError(
            f"--pattern {pattern}: {program} is a model, without golden programs; leave it out"
        )
    if not is_model and (prompt or max_tokens):
        raise ArgumentError(f"{program} is no GGUF file; leave out --prompt and --max-tokens")
    programs = [] if is_model else list(_programs(program, pattern))  # which may register a device
    device_names(devices)
    if is_model:
        parted = _diff_model(Path(program), names, prompt, max_tokens, nmse, as_json)
    else:
        parted = _diff_programs(programs, names, nmse, as_json)
    if parted:
        raise typer.Exit(1)


def _diff_programs(programs: list[DiffProgram], names: list[str], nmse: float | None, as_json: bool) -> bool:
    """Print the first difference of two devices in each program; return whether there is one."""
    import ggmlb

    with ggmlb.init_by_name(names[0]) as a, ggmlb.init_by_name(names[1]) as b:
        compared = _compared if len(programs) == 1 else _compared_if_supported
        done = [compared(program, a, b, nmse) for program in programs]
    if as_json:
        plain.echo(json.dumps([_as_data(c) for c in done], indent=1))
    elif len(done) == 1:
        _print_program(done[0], names)
    else:
        _print_programs(done, names)
    return any(c.first is not None for c in done)


# -- computing -------------------------------------------------------------------------------------


def _compared(program: DiffProgram, a: Backend, b: Backend, nmse: float | None) -> DiffResult:
    from ggmlb import Context, alloc_ctx_tensors

    ctx = Context()
    ctx.tensors = [t for t in program.graph if t.buffer is None]
    with alloc_ctx_tensors(ctx, a):
        program.fill()
        found = differences(a, b, program.graph)
    return DiffResult(program.name, found, program.limit if nmse is None else nmse)


def _compared_if_supported(program: DiffProgram, a: Backend, b: Backend, nmse: float | None) -> DiffResult:
    for node in program.graph.nodes:
        for backend in (a, b):
            why = backend.device.declines(node)
            if why is not None:
                return DiffResult(program.name, [], 0, f"{backend.name} declines {node.describe()}: {why}")
    return _compared(program, a, b, nmse)


# -- programs --------------------------------------------------------------------------------------


def _programs(text: str, pattern: str) -> Iterable[DiffProgram]:
    path = Path(text)
    if path.is_dir() or path.suffix == ".jsonl":
        from ggmlb.testing.programs import load_cases

        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ArgumentError(f"--pattern {pattern}: {error}; give a regular expression") from None
        cases = [case for case in load_cases(path) if wanted.search(case.id)]
        if not cases:
            raise ArgumentError(
                f"diff: no program in {text} has an id that matches {pattern!r}; give another --pattern"
            )
        return map(_golden, cases)
    return [_own(text)]


def _golden(case: Case) -> DiffProgram:
    built = case.build()

    def fill() -> None:
        for leaf in case.leafs:
            if built.tensors[leaf.name].buffer is not None:  # some give only their shape
                built.tensors[leaf.name].set(leaf.data)

    return DiffProgram(case.id, max(case.nmse, LIMIT), built.graph, fill)


def _own(text: str) -> DiffProgram:
    """Return the program built by a user's function."""
    from ggmlb import Graph

    where, _, name = text.rpartition(":") if ":" in text else (text, "", "graph")
    try:
        function = getattr(_module(where), name, None)
        if not callable(function):
            raise ArgumentError(f"diff: {where} has no function {name!r}; give FILE.py:FUNCTION")
        made = function()
    except Error:
        raise
    except Exception as error:  # whatever a user's program may raise
        raise ArgumentError(f"diff: {text} failed: {type(error).__name__}: {error}") from error
    graph, values = made if isinstance(made, tuple) else (made, {})
    if not isinstance(graph, Graph):
        raise ArgumentError(
            f"diff: {text} returned {type(graph).__name__}; return a Graph, or a Graph and a dict"
        )
    fresh = [leaf for leaf in graph.leafs if leaf.buffer is None]
    return DiffProgram(text, LIMIT, graph, lambda: _fill(fresh, values))


def _module(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix != ".py":
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ArgumentError(f"diff: there is no file {where}; give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fill(leafs: list[Tensor], values: Mapping[str, Any]) -> None:
    unknown = set(values) - {leaf.name for leaf in leafs}
    if unknown:
        raise ArgumentError(f"diff: no leaf without a buffer is named {sorted(unknown)}; give names of leafs")
    random = np.random.default_rng(0)
    for leaf in leafs:
        if leaf.name in values:
            leaf.set_array(values[leaf.name])
        elif leaf.dtype.is_quantized or leaf.dtype.numpy.kind not in "iub":
            leaf.set_array(random.standard_normal(leaf.shape, np.float32))
        else:
            leaf.memset(0)


# -- telling ---------------------------------------------------------------------------------------


def _as_data(result: DiffResult) -> dict[str, Any]:
    first = result.first
    return {
        "program": result.program,
        "limit": result.limit,
        "skipped": result.skipped or None,
        "first_difference": None if first is None else first.index,
        "nodes": [plain.finite(d) for d in result.nodes],
    }


def _print_program(result: DiffResult, names: list[str]) -> None:
    columns = (Column("#", right=True), Column("Node"), Column("Computes", drop=2), *ERRORS)
    rows = [(str(d.index), d.node, d.op, *_errors(d)) for d in result.nodes]
    title = f"{result.program}: {names[1]} against {names[0]}"
    n = _print_nodes(title, columns, rows, result.nodes, result.limit)
    console().print(f"{n} of {len(rows)} nodes differ by an NMSE above {result.limit:g}")


def _errors(d: Difference | NodeDifference) -> tuple[str, str]:
    return f"{d.nmse:.1e}", f"{d.max_error:.1e}"


def _print_nodes(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    nodes: Sequence[Difference | NodeDifference],
    limit: float,
) -> int:
    """Print a row for each node, with a mark at those that differ; return their number."""
    n, marked = 0, []
    for row, d in zip(rows, nodes, strict=True):
        mark, style = "", ""
        if not d.nmse <= limit:
            mark, style = ("differs", "red") if n else ("<- first difference", "bold red")
            n += 1
        marked.append(Row((*row, mark), style))
    print_table(console(), title, (*columns, Column("", wraps=True)), marked)
    return n


def _print_programs(done: list[DiffResult], names: list[str]) -> None:
    rows = []
    for c in done:
        first = c.first
        worst = max((d.nmse for d in c.nodes), default=0.0)
        told = c.skipped
        if first is not None:
            told = f"node {first.index}: {first.op} {first.node}, NMSE {first.nmse:.1e}"
        cells = (c.program, str(len(c.nodes)), "-" if c.skipped else f"{worst:.1e}", told)
        rows.append(Row(cells, "dim" if c.skipped else "red" if first else ""))
    columns = (
        Column("Program", wraps=True), Column("Nodes", right=True, drop=1), Column("Worst NMSE", right=True),
        Column("First difference", wraps=True),
    )  # fmt: skip
    out = console()
    print_table(out, f"{names[1]} against {names[0]}", columns, rows)
    n_skipped = sum(bool(c.skipped) for c in done)
    n = sum(c.first is not None for c in done)
    out.print(f"{n} of {len(done) - n_skipped} programs differ; {n_skipped} not computed")


# -- language models -------------------------------------------------------------------------------


def _diff_model(
    path: Path, devices: Sequence[str], prompt: str, max_tokens: int, nmse: float | None, as_json: bool
) -> bool:
    """Print the first difference of two devices in a model; return whether there is one."""
    from ggmlb.models import TextModel
    from ggmlb.models.text.compare import LIMIT as MODEL_LIMIT

    with ExitStack() as models:
        a, b = (models.enter_context(TextModel(path, list(dict.fromkeys([name, "CPU"])))) for name in devices)
        text = prompt or " ".join(PASSAGES[:N_PASSAGES])
        found = a.differences(b, text, max_tokens, MODEL_LIMIT if nmse is None else nmse)
    if as_json:
        data = {
            "model": str(path),
            "devices": list(devices),
            "limit": found.limit,
            "first_difference": found.first and plain.finite(found.first),
            "token": found.token and plain.finite(found.token),
            "nodes": [plain.finite(node) for node in found.nodes],
        }
        plain.echo(json.dumps(data, indent=1))
    else:
        _print_model(found, path, devices, max_tokens)
    return found.first is not None or found.token is not None


def _print_model(found: Differences, path: Path, devices: Sequence[str], max_tokens: int) -> None:
    from rich.markup import escape

    a, b = devices
    columns = (
        Column("Node"), *ERRORS, Column("Token", right=True), Column("Element", right=True),
        Column(a, right=True, drop=2), Column(b, right=True, drop=3),
    )  # fmt: skip
    nodes = _shown(found)
    values = [[f"{value:.5g}" for value in d.values] for d in nodes]
    rows = [
        (d.name, *_errors(d), str(d.token), str(d.element), *v) for d, v in zip(nodes, values, strict=True)
    ]
    _print_nodes(f"{path.name}: {b} against {a}", columns, rows, nodes, found.limit)
    out = console()
    if found.first is None:
        out.print(f"no node differs by an NMSE above {found.limit:g}; of each layer, the worst is shown")
    if not max_tokens:
        return
    t = found.token
    if t is None:
        out.print(f"all {max_tokens} tokens are the same")
        return
    texts = " and ".join(f"{text!r} ({token})" for text, token in zip(t.texts, t.tokens, strict=True))
    cause = "the output" if t.layer is None else f"layer {t.layer}"
    told = f"token {t.place} differs: {shown(texts)}; the first one's "
    told += f"logit is larger by {t.margins[0]:.4f} on {a}, by {t.margins[1]:.4f} on {b}; {cause} caused it"
    out.print(escape(told), soft_wrap=True)


def _shown(found: Differences) -> list[NodeDifference]:
    """Return all nodes of the layer of the first difference, and the worst node of each other layer."""
    layers: dict[str, list[NodeDifference]] = {}
    for node in found.nodes:
        layers.setdefault(node.name.rpartition(".")[0] or node.name, []).append(node)
    rows: list[NodeDifference] = []
    for nodes in layers.values():
        rows += nodes if found.first in nodes else [max(nodes, key=lambda node: node.nmse)]
        if found.first in nodes:
            break
    return rows
