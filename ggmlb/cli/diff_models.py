"""Language models in `ggmlb diff`: the first node, and the first token, at which two devices differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggmlb.cli import plain
from ggmlb.cli.frame import console
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
    from rich.table import Table

    a, b = devices
    title = escape(f"{shown(path.name)}: {b} against {a}")
    table = Table(title=title, title_justify="left")
    for header in ("Node", "NMSE", "Max error", "Token", "Element", a, b, ""):
        table.add_column(header, justify="left" if header in ("Node", "") else "right", no_wrap=True)
    first = found.first
    for d in _shown(found):
        differs = not d.nmse <= found.limit
        mark = "<- first difference" if d is first else "differs" if differs else ""
        style = "bold red" if d is first else "red" if differs else None
        numbers = (f"{d.nmse:.1e}", f"{d.max_error:.1e}", str(d.token), str(d.element))
        values = (f"{value:.5g}" for value in d.values)
        table.add_row(d.name, *numbers, *values, mark, style=style)
    out = console()
    out.print(table)
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
