"""`ggmlb compare`: errors of a quantised language model against a reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, console, print_table, progress_bar
from ggmlb.cli.model_options import ThreadsOption, open_model
from ggmlb.cli.options import DevicesOption, JsonOption, text_of
from ggmlb.cli.passages import PASSAGES
from ggmlb.core.errors import ArgumentError

if TYPE_CHECKING:
    from ggmlb.models import Comparison, TextModel

GgufArgument = Annotated[Path, typer.Argument(metavar="A.gguf", help="Reference, a GGUF file.")]
OtherArgument = Annotated[
    Path | None, typer.Argument(metavar="B.gguf", help="GGUF file of the same model in another quantisation.")
]

SHARES = {"median": 0.5, "99 %": 0.99, "largest": 1.0}
"""Printed quantiles of the divergence."""


def compare(
    reference: GgufArgument,
    other: OtherArgument = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Text file in UTF-8 (default: a short built-in text)."
        ),
    ] = None,
    ctx: Annotated[int, typer.Option("--ctx", "-c", help="Chunk size in tokens.", min=1)] = 512,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", help="Maximum number of tokens (default: all).", min=1),
    ] = None,
    as_json: JsonOption = False,
    devices: DevicesOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Compare two quantisations of a language model over a text, layer by layer.

    Shown are the error of the hidden states after each layer (the mean over tokens of the squared difference
    over the reference's square), the Kullback-Leibler divergence of the predictions, and how often both
    predict the same token.

    Examples:
      ggmlb compare model-f16.gguf model-q4_K.gguf
      ggmlb compare model-f16.gguf model-q4_K.gguf -f wiki.test.raw -n 4096 --json
    """
    if other is None:
        raise ArgumentError(
            f"compare {reference}: give two GGUF files; for one file on two devices, use ggmlb diff"
        )
    text = "\n".join(PASSAGES) if file is None else text_of(file)

    def opened(model: Path) -> TextModel:
        return open_model(model, devices=devices, ctx=ctx, threads=threads)

    with opened(reference) as a, opened(other) as b, progress_bar("compare", 1) as progress:
        found = a.compare(b, text, ctx, max_tokens, progress)
    if as_json:
        plain.echo(json.dumps(_as_data(found, reference, other), indent=1))
    else:
        _print(found, reference, other)


def _as_data(found: Comparison, reference: Path, other: Path) -> dict[str, object]:
    return {
        "reference": str(reference),
        "other": str(other),
        "tokens": found.n_tokens,
        "layers": found.layers,
        "divergence": {
            "mean": float(found.divergences.mean()),
            **{name: found.divergence(share) for name, share in SHARES.items()},
        },
        "same_top": found.same_top,
    }


def _print(found: Comparison, reference: Path, other: Path) -> None:
    title = f"{other.name} against {reference.name}, {found.n_tokens:,} tokens"
    columns = (Column("After layer", right=True), Column("NMSE", right=True))
    out = console()
    print_table(out, title, columns, ((str(i), f"{nmse:.2e}") for i, nmse in enumerate(found.layers)))
    told = [f"mean {found.divergences.mean():.4g}"]
    told += [f"{name} {found.divergence(share):.4g}" for name, share in SHARES.items()]
    out.print(f"KL divergence of the predictions [nats]: {', '.join(told)}", soft_wrap=True)
    out.print(f"same top token: {100 * found.same_top:.1f} % of the positions")
