"""`ggmlb embed`: embeddings of the texts in a JSON file, written to a .npy file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import progress_bar
from ggmlb.cli.options import DevicesOption, LayersOption, ModelOption, device_names, layers_by_device
from ggmlb.core.errors import ArgumentError


def embed(
    input_file: Annotated[
        str,
        typer.Option(
            "--input", metavar="FILE", help="JSON file with a list of texts; '-' reads standard input."
        ),
    ],
    output_file: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="File to write: .npy, float32 (n_texts, n_embd).")
    ],
    model: ModelOption = None,
    devices: DevicesOption = None,
    layers_on: LayersOption = None,
    batch: Annotated[int, typer.Option("--batch", help="Maximum number of texts per batch.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Compute sentence embeddings of a JSON list of texts: float32 rows of length 1.

    Examples:
      ggmlb embed --input texts.json --output vectors.npy
      ggmlb embed --input - --output vectors.npy -d OpenCL0,CPU --layers-on OpenCL0=0-2 --layers-on CPU=3-5
    """
    texts = read_texts(input_file)
    if not output_file.parent.is_dir():
        raise ArgumentError(f"there is no folder {output_file.parent}; create it, or give another --output")
    import numpy as np

    from ggmlb.models import BertEmbedder

    names = None if devices is None else device_names(devices)
    with (
        BertEmbedder(model, names, layers_by_device(layers_on)) as embedder,
        progress_bar("embedding", len(texts)) as progress,
    ):
        plain.note_devices((stream.device.name for stream in embedder.backends), devices)
        start = perf_counter()
        embeddings = embedder.embed(texts, batch, progress)
        took = perf_counter() - start
        used = [backend.name for backend in embedder.backends]
    try:
        with output_file.open("wb") as file:
            np.save(file, embeddings)
    except OSError as error:
        raise ArgumentError(f"cannot write {output_file}: {error.strerror}; give another --output") from error
    if as_json:
        told = {"output": str(output_file), "shape": embeddings.shape, "devices": used, "seconds": took}
        plain.echo(json.dumps(told))
    else:
        rows, columns = embeddings.shape
        of = f"{rows:,} x {columns} float32"
        plain.note(f"{output_file}: {of}, computed in {took:.2f} s on {', '.join(used)}")


def read_texts(source: str) -> list[str]:
    """Return the texts of a JSON file, or of standard input for `-`.

    Raises:
        ArgumentError: The file cannot be read, or is not a JSON list of strings.
    """
    name = "standard input" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {name}: {error.strerror}; give a JSON file, or '-'") from error
    try:
        texts: Any = json.loads(raw)
    except ValueError as error:
        raise ArgumentError(f"{name} is not JSON: {error}; give a list of strings") from error
    if not isinstance(texts, list):
        raise ArgumentError(f"{name} holds a JSON {type(texts).__name__}; give a list of strings")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ArgumentError(f"{name}: item {i} is a {type(text).__name__}; every item must be a string")
    return texts
