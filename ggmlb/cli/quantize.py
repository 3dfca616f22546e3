"""`ggmlb quantize`: convert the matrices of a GGUF model to another data type."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import progress_bar
from ggmlb.cli.model_options import ModelFileOption, model_file
from ggmlb.cli.options import count
from ggmlb.core.errors import ArgumentError, readable_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.models.gguf.quantizing import Change


def quantize(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="[MODEL] OUT", help="GGUF file (of a split model, the first part), and the file to write."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--type",
            "-t",
            metavar="TYPE",
            help="Data type of the matrices, as q4_K, q8_0 or f16; or one of llama.cpp's mixtures: q4_K_M, "
            "q4_K_S, q5_K_M, q5_K_S, q3_K_L, q3_K_M, q3_K_S, q2_K_S.",
        ),
    ],
    model: ModelFileOption = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=TYPE",
            help="Data type of the tensors whose names match a regular expression, as 'ffn_down=q6_K'; "
            "repeatable, the first match counts.",
        ),
    ] = None,
    pure: Annotated[
        bool,
        typer.Option(
            "--pure", help="Use one type for all matrices; otherwise the output matrix gets at least q6_K."
        ),
    ] = False,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Convert tensors that are already quantised, too.")
    ] = False,
    threads: Annotated[int | None, count(help="Number of CPU threads (default: all cores).")] = None,
) -> None:
    """Convert the matrices of a GGUF model to another data type.

    Norms and other one-dimensional tensors keep their type. Tensors whose rows are not a multiple of the
    block size get a type of smaller blocks, and are listed.

    Examples:
      ggmlb quantize model-f16.gguf model-q4_K_M.gguf --type q4_K_M
      ggmlb quantize model-q8_0.gguf model-q4_K_M.gguf --type q4_K_M --requantize
      ggmlb quantize model-f16.gguf out.gguf --type q4_0 --rule 'ffn_down=q6_K' --rule 'attn_v=q8_0'
    """
    from ggmlb import open_gguf
    from ggmlb.models.gguf.quantizing import quantize_gguf
    from ggmlb.system.process import n_cpus

    *given, out = files
    if len(given) > 1:
        raise typer.BadParameter(f"MODEL and OUT are two files; {len(files)} were given")
    file = open_gguf(model_file(given[0] if given else None, model))
    with progress_bar("Bytes", file.nbytes) as progress:
        changes = quantize_gguf(
            file,
            out,
            to,
            rules=_rules(rule or ()),
            pure=pure,
            requantize=requantize,
            n_threads=n_cpus() if threads is None else threads,
            progress=progress,
        )
    for line in _notes(changes):
        plain.echo(line)
    before, after = file.nbytes, sum(change.nbytes for change in changes)
    n_elements = sum(tensor.n_elements for tensor in file.values())
    plain.echo(
        f"written to {out}: {readable_size(before)} became {readable_size(after)}, "
        f"{8 * after / max(n_elements, 1):.2f} bits per weight"
    )


def _rules(options: Sequence[str]) -> dict[str, str]:
    """Parse `["ffn_down=q6_K"]`."""
    found: dict[str, str] = {}
    for option in options:
        pattern, equals, dtype = option.rpartition("=")
        if not (pattern and equals and dtype):
            raise ArgumentError(f"--rule {option}: give REGEX=TYPE, as ffn_down=q6_K")
        found.setdefault(pattern, dtype)
    return found


def _notes(changes: Sequence[Change]) -> list[str]:
    """Return a line for each reason to deviate from the types requested."""
    by_note: dict[str, list[str]] = {}
    for change in changes:
        if change.note:
            by_note.setdefault(change.note, []).append(change.tensor.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {note}"
        for note, names in by_note.items()
    ]
