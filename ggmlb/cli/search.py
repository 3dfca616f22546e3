"""`ggmlb demo search`: a small semantic search on several devices, with its placement."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggmlb.cli.frame import Column, print_table
from ggmlb.core.errors import readable_size

if TYPE_CHECKING:
    from rich.console import Console

    from ggmlb import Backend
    from ggmlb.models import BertEmbedder

N_ANSWERS = 3


def search(
    out: Console, names: list[str] | None, requests: dict[str, list[str]] | None, model: Path | None
) -> None:
    """Search a few passages by meaning, with one model split over several devices.

    Args:
        out: Where to print.
        names: Devices; by default one beside the CPU, with half of the layers on each.
        requests: Layers by device.
        model: Model folder; the default model's if `None`.
    """
    from ggmlb.cli.passages import PASSAGES, QUESTIONS
    from ggmlb.models import BertEmbedder

    if names is None and requests is None:
        names, requests = _two_halves()
    start = perf_counter()
    with BertEmbedder(model, names, requests) as embedder:
        out.print(f"[bold]Semantic search[/] with {_model_name(embedder)}, loaded in {_ms(start)}\n")
        print_devices(out, embedder.backends, embedder.homes)
        start = perf_counter()
        passages = embedder.embed(PASSAGES)
        took = perf_counter() - start
        _print_splits(out, embedder)
        rate = len(PASSAGES) / took
        out.print(
            f"\n{len(PASSAGES)} passages are now points in {passages.shape[1]} dimensions "
            f"({took * 1000:.0f} ms, {rate:.0f} passages per second).\n"
            "A question becomes a point too; the passages nearest to it are the answers, "
            "even where they share no word with it."
        )
        if sys.stdin.isatty() and sys.stdout.isatty():
            _converse(out, embedder, PASSAGES, passages)
        else:
            for question in QUESTIONS:
                out.print()
                _answer(out, embedder, question, PASSAGES, passages)


def _two_halves() -> tuple[list[str], dict[str, list[str]] | None]:
    """Return the first device that is not the CPU, and the CPU, with half of the layers on each."""
    import ggmlb
    from ggmlb.models import BertConfig, ModelFolder

    other = next((d.name for d in ggmlb.devices() if d.is_automatic and d.name != "CPU"), None)
    if other is None:
        return ["CPU"], None
    half = BertConfig.from_folder(ModelFolder()).n_layer // 2
    return [other, "CPU"], {other: [f"0-{half - 1}"]}


def _model_name(embedder: BertEmbedder) -> str:
    config = embedder.config
    return f"a BERT encoder of {config.n_layer} layers and {config.n_embd} dimensions"


def print_devices(out: Console, backends: Sequence[Backend], homes: Mapping[int | str, str]) -> None:
    """Print the weights that each device holds."""
    from ggmlb.models.layers import held

    columns = (Column("Device", style="bold"), Column("Weights"), Column("Description", wraps=True))
    parts = held(homes, [backend.name for backend in backends])
    rows = ((b.name, parts[b.name], b.device.description) for b in backends)
    print_table(out, "Placement", columns, rows)


def _print_splits(out: Console, embedder: BertEmbedder) -> None:
    from ggmlb.core.enums import NO_OPS

    scheduler = embedder.scheduler
    assert scheduler is not None  # a batch was embedded
    rows = []
    for i, split in enumerate(scheduler.splits):
        n_ops = sum(node.op not in NO_OPS for node in split.nodes)
        copies = ", ".join(f"{item.tensor.name} ({readable_size(item.nbytes)})" for item in split.inputs)
        rows.append((str(i), split.backend.name, str(n_ops), copies or "-"))
    columns = (
        Column("Split", right=True), Column("Runs on", style="bold"), Column("Ops", right=True),
        Column("Copied inputs", wraps=True),
    )  # fmt: skip
    print_table(out, "Splits of the graph", columns, rows)


def _converse(
    out: Console, embedder: BertEmbedder, texts: tuple[str, ...], points: npt.NDArray[np.float32]
) -> None:
    out.print("\nAsk something about animals, bread, cold, space, computers or history; an empty line ends.")
    while True:
        try:
            question = out.input("\n[bold cyan]?[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if not question:
            return
        _answer(out, embedder, question, texts, points, echo=False)


def _answer(
    out: Console,
    embedder: BertEmbedder,
    question: str,
    texts: tuple[str, ...],
    points: npt.NDArray[np.float32],
    echo: bool = True,
) -> None:
    from rich.text import Text

    start = perf_counter()
    near = points @ embedder.embed([question])[0]
    took = _ms(start)
    if echo:
        out.print(Text.assemble(("? ", "bold cyan"), (question, "bold"), (f"  ({took})", "dim")))
    for i in near.argsort()[::-1][:N_ANSWERS]:
        out.print(Text.assemble((f"  {near[i]:.2f}  ", "green"), texts[i]))
    if not echo:
        out.print(Text(f"  ({took})", "dim"))


def _ms(start: float) -> str:
    return f"{(perf_counter() - start) * 1000:.0f} ms"
