"""Language models in `ggmlb diff`: the first node, and the first token, at which two devices differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, Row, console, print_table
from ggmlb.cli.passages import PASSAGES
from ggmlb.core.errors import shown

if TYPE_CHECKING:
    from ggmlb.models.text.compare import Differences, NodeDifference, TokenDifference

N_PASSAGES = 2
"""Passages that are computed where no prompt is given."""


def diff(
    path: Path, devices: Sequence[str], prompt: str, max_tokens: int, nmse: float | None, as_json: bool
) -> bool:
    """Print where two devices part in a model; return whether they do.

    Raises:
        Error: As `TextModel` and `TextModel.differences`.
    """
    from ggmlb.models import TextModel
    from ggmlb.models.text.compare import LIMIT

    with ExitStack() as models:
        a, b = (models.enter_context(TextModel(path, list(dict.fromkeys([name, "CPU"])))) for name in devices)
        text = prompt or " ".join(PASSAGES[:N_PASSAGES])
        found = a.differences(b, text, max_tokens, LIMIT if nmse is None else nmse)
    if as_json:
        plain.echo(json.dumps(_as_data(found, path, devices), indent=1))
    else:
        _print(found, path, devices, max_tokens)
    return found.first is not None or found.token is not None


def _as_data(found: Differences, path: Path, devices: Sequence[str]) -> dict[str, Any]:
    def data(item: NodeDifference | TokenDifference | None) -> dict[str, Any] | None:
        return None if item is None else plain.finite(item)

    return {
        "model": str(path),
        "devices": list(devices),
        "limit": found.limit,
        "first_difference": data(found.first),
        "token": data(found.token),
        "nodes": [data(node) for node in found.nodes],
    }


def _print(found: Differences, path: Path, devices: Sequence[str], max_tokens: int) -> None:
    from rich.markup import escape

    a, b = devices
    first = found.first
    columns = (
        Column("Node"), Column("NMSE", right=True), Column("Max error", right=True, drop=1),
        Column("Token", right=True), Column("Element", right=True), Column(a, right=True, drop=2),
        Column(b, right=True, drop=3), Column("", wraps=True),
    )  # fmt: skip
    rows = []
    for d in _shown(found):
        mark, style = marked(d is first, not d.nmse <= found.limit)
        numbers = (f"{d.nmse:.1e}", f"{d.max_error:.1e}", str(d.token), str(d.element))
        rows.append(Row((d.name, *numbers, *(f"{value:.5g}" for value in d.values), mark), style))
    out = console()
    print_table(out, f"{path.name}: {b} against {a}", columns, rows)
    if first is None:
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
    """Return all nodes of the layer of the first difference, and of the others the worst."""
    layers: dict[str, list[NodeDifference]] = {}
    for node in found.nodes:
        layers.setdefault(node.name.rpartition(".")[0] or node.name, []).append(node)
    rows: list[NodeDifference] = []
    for nodes in layers.values():
        rows += nodes if found.first in nodes else [max(nodes, key=lambda node: node.nmse)]
        if found.first in nodes:
            break
    return rows


def marked(is_first: bool, differs: bool) -> tuple[str, str]:
    """Return the mark and the style of a node's row."""
    mark = "<- first difference" if is_first else "differs" if differs else ""
    return mark, "bold red" if is_first else "red" if differs else ""
