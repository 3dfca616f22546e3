"""`ggmlb show`: the metadata and tensors of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import console
from ggmlb.cli.options import JsonOption
from ggmlb.core.errors import readable_size, shown

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile


def show(
    model: Annotated[
        Path, typer.Argument(metavar="FILE", help="GGUF file; of a split model, the first part.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the metadata of a GGUF file, and its tensors with types and sizes.

    Examples:
      ggmlb show model.gguf
      ggmlb show model.gguf --json | jq '.metadata["general.architecture"].value'
    """
    from ggmlb import open_gguf
    from ggmlb.models.gguf import summary

    file = open_gguf(model)
    if as_json:
        import json

        plain.echo(json.dumps(summary.as_dict(file), indent=1))
    else:
        _print(file)


def _print(file: GgufFile) -> None:
    from rich.table import Table
    from rich.text import Text

    from ggmlb.models.gguf import summary

    out = console()
    for name, fact in summary.facts(file).items():
        if fact:
            out.print(Text(f"{name}: {fact}"))
    values = Table(title="Metadata", title_justify="left")
    values.add_column("Key", style="bold", overflow="fold")
    values.add_column("Type", no_wrap=True)
    values.add_column("Value", overflow="fold")
    for row in summary.rows(file.metadata):
        values.add_row(*(Text(shown(cell)) for cell in (row.key, row.kind, row.text())))
    tensors = Table(title="Tensors", title_justify="left")
    tensors.add_column("Name", style="bold", overflow="fold")
    tensors.add_column("Type", no_wrap=True)
    tensors.add_column("ne", overflow="fold")
    for name in ("Size", "Offset"):
        tensors.add_column(name, justify="right", no_wrap=True)
    for name, tensor in file.items():
        ne = ", ".join(map(str, tensor.ne))
        size = readable_size(tensor.nbytes)
        cells = (shown(name), tensor.dtype.name, ne, size, f"{tensor.offset:,}")
        tensors.add_row(*map(Text, cells))
    out.print(values)
    out.print(tensors)
