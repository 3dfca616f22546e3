"""`ggmlb show`: the metadata and tensors of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, console, print_table
from ggmlb.cli.model_options import ModelArgument, ModelFileOption, model_file
from ggmlb.cli.options import JsonOption
from ggmlb.core.errors import readable_size

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile


def show(path: ModelArgument = None, model: ModelFileOption = None, as_json: JsonOption = False) -> None:
    """Show the metadata of a GGUF file, and its tensors with data types and sizes.

    Examples:
      ggmlb show model.gguf
      ggmlb show model.gguf --json | jq '.metadata["general.architecture"].value'
    """
    from ggmlb import open_gguf
    from ggmlb.models.gguf import summary

    file = open_gguf(model_file(path, model))
    if as_json:
        import json

        plain.echo(json.dumps(summary.as_dict(file), indent=1))
    else:
        _print(file)


def _print(file: GgufFile) -> None:
    from rich.text import Text

    from ggmlb.models.gguf import summary

    out = console()
    for name, fact in summary.facts(file).items():
        if fact:
            out.print(Text(f"{name}: {fact}"))
    columns = (Column("Key", style="bold"), Column("Type", drop=1), Column("Value", wraps=True))
    rows = ((row.key, row.kind, row.text()) for row in summary.rows(file.metadata))
    print_table(out, "Metadata", columns, rows)
    tensors = (
        (name, t.dtype.name, ", ".join(map(str, t.ne)), readable_size(t.nbytes), f"{t.offset:,}")
        for name, t in file.items()
    )
    print_table(out, "Tensors", TENSOR, tensors)


TENSOR = (
    Column("Name", style="bold"), Column("Type"), Column("ne", wraps=True),
    Column("Size", right=True, drop=1), Column("Offset [bytes]", right=True, drop=2),
)  # fmt: skip
