"""`ggmlb perplexity`: how well a GGUF model predicts a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import progress_bar
from ggmlb.cli.model_options import OpenModel, takes_model
from ggmlb.cli.options import JsonOption, text_of


@takes_model
def perplexity(
    open_model: OpenModel,
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="Text file in UTF-8.")],
    ctx: Annotated[int, typer.Option("--ctx", "-c", help="Chunk size in tokens.", min=4)] = 512,
    chunks: Annotated[
        int | None, typer.Option("--chunks", help="Maximum number of chunks (default: all).", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the perplexity of a text over the second half of each chunk, as llama.cpp does.

    Examples:
      ggmlb perplexity -m model.gguf -f wiki.test.raw
    """
    text = text_of(file)
    with open_model(ctx=ctx) as opened, progress_bar("perplexity", 1) as progress:
        found = opened.perplexity(text, ctx, chunks, progress)
    if as_json:
        plain.echo(json.dumps(found._asdict()))
        return
    plain.echo(f"perplexity {found.value:.4f} +/- {found.error:.4f}, {found.n_tokens} tokens predicted")
