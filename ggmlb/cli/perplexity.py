"""`ggmlb perplexity`: how well a GGUF model foretells a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import progress_bar
from ggmlb.cli.generate import (
    GgufOption,
    GpuLayersOption,
    KvOption,
    LoraOption,
    OverrideOption,
    ThreadsOption,
    open_model,
)
from ggmlb.cli.options import DevicesOption, JsonOption, LayersOption
from ggmlb.core.errors import ArgumentError


def perplexity(
    model: GgufOption,
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The text, in UTF-8.")],
    ctx: Annotated[int, typer.Option("--ctx", "-c", help="Tokens of a chunk.", min=4)] = 512,
    chunks: Annotated[int | None, typer.Option("--chunks", help="Most chunks.", min=1)] = None,
    as_json: JsonOption = False,
    devices: DevicesOption = None,
    layers_on: LayersOption = None,
    gpu_layers: GpuLayersOption = None,
    kv_type: KvOption = "f16",
    override: OverrideOption = None,
    threads: ThreadsOption = None,
    lora: LoraOption = None,
) -> None:
    """Compute the perplexity of a text: of each chunk, the second half is foretold, as by llama.cpp.

    Examples:
      ggmlb perplexity -m model.gguf -f wiki.test.raw
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {file}: {error}; give a text file in UTF-8") from None
    with (
        open_model(
            model, devices, layers_on, gpu_layers, ctx, kv_type, override, threads, lora=lora
        ) as opened,
        progress_bar("perplexity", 1) as progress,
    ):
        found = opened.perplexity(text, ctx, chunks, progress)
    if as_json:
        plain.echo(json.dumps(found._asdict()))
        return
    plain.echo(f"perplexity {found.value:.4f} +/- {found.error:.4f}, {found.n_tokens} tokens foretold")
