"""Drawings of a split graph: a lane for each device, a box for each split, a curve for each copy.

`to_dot` returns text for Graphviz. `draw` needs no other program, and stays readable for large graphs: it
shows splits and nodes in order of execution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Final

from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import readable_size
from ggmlb.core.graph import Graph, dot_quoted
from ggmlb.core.tensor import Tensor
from ggmlb.inspect.html import LINES, Picture, escape
from ggmlb.interface import Backend

if TYPE_CHECKING:
    from ggmlb.runtime.compile.split import Split

FILLS: Final = ("#dbe9fb", "#fde7c8", "#dff2d8", "#f3dcef", "#d8f1f0", "#f9dada")
"""Fill colours of boxes by the device's priority: pale tones of `LINES`."""

ROW: Final = 17
CHAR: Final = 6.7
MARGIN: Final = 14
ARC: Final = 34
LANE_GAP: Final = 70
BOX_GAP: Final = 20
MAX_CHARS: Final = 52
MAX_ROWS: Final = 30
"""Most rows of nodes in a box; the middle of longer lists is omitted."""


def colours(backends: Sequence[Backend]) -> dict[Backend, tuple[str, str]]:
    """Return the fill and line colours of each backend; backends of the same device get the same colours."""
    devices = list(dict.fromkeys(b.device for b in backends))
    paints = dict(zip(devices, cycle(zip(FILLS, LINES, strict=True)), strict=False))
    return {b: paints[b.device] for b in backends}


# -- DOT -------------------------------------------------------------------------------------------


def to_dot(graph: Graph, backends: Sequence[Backend], splits: Sequence[Split]) -> str:
    """Return a split graph in Graphviz's DOT language."""
    ids = {tensor: f"t{i}" for i, tensor in enumerate(graph)}
    paint = colours(backends)
    lines = ["digraph ggmlb {", '  node [shape=box, fontname="sans-serif", style=filled, fillcolor=white];']
    for leaf in graph.leafs:
        lines.append(
            f'  {ids[leaf]} [label="{dot_quoted(leaf.describe())}", shape=ellipse, fillcolor="#eeeeee"];'
        )
    for i, split in enumerate(splits):
        fill, line = paint[split.backend]
        lines += [
            f"  subgraph cluster_{i} {{",
            f'    label="split {i} on {dot_quoted(split.backend.name)}"; style="filled,rounded";',
            f'    fillcolor="{fill}"; color="{line}";',
            *(f'    {ids[n]} [label="{dot_quoted(n.describe())}"];' for n in (*split.nodes, *split.views)),
            "  }",
        ]
    copied: dict[tuple[Backend, Tensor], None] = {}
    for split in splits:
        line = paint[split.backend][1]
        copied.update(((split.backend, item.tensor), None) for item in split.inputs)
        for node in (*split.nodes, *split.views):
            for src in node.src:
                if src in ids:
                    size = readable_size(src.nbytes)
                    crossing = (split.backend, src) in copied and node.op not in NO_OPS
                    style = f' [color="{line}", penwidth=2, label="{size}"]' if crossing else ""
                    lines.append(f"  {ids[src]} -> {ids[node]}{style};")
    return "\n".join([*lines, "}"])


# -- SVG -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Row:
    """A line of text in a box; `key` is its node or copy, the end of edges."""

    text: str
    tip: str
    key: Tensor | tuple[Backend, Tensor] | None
    is_copy: bool = False


@dataclass(slots=True)
class _Place:
    """The position of a row: left and right of its box, and the row's middle."""

    left: float
    right: float
    y: float
    box: int


def draw(backends: Sequence[Backend], splits: Sequence[Split], causes: dict[Tensor, str]) -> Picture:
    """Return the drawing of a split graph, from top to bottom; a tooltip gives each node's placement cause.

    Args:
        backends: In the order of the lanes; those that run nothing get none.
        splits: In the order of execution.
        causes: The cause of each node's placement; shown when the pointer rests on a node.
    """
    boxes = [_rows(split, causes) for split in splits]
    used = [b for b in backends if any(s.backend is b for s in splits)]
    chars = max((len(row.text) for rows in boxes for row in rows), default=10)
    width = chars * CHAR + 2 * MARGIN
    lane = {b: MARGIN + ARC + i * (width + ARC + LANE_GAP) for i, b in enumerate(used)}
    paint = colours(backends)
    places: dict[object, _Place] = {}
    picture = Picture(MARGIN + len(used) * (width + ARC + LANE_GAP), 0.0)
    drawn = picture.parts
    y = float(MARGIN)
    for i, (split, rows) in enumerate(zip(splits, boxes, strict=True)):
        x, (fill, line) = lane[split.backend], paint[split.backend]
        height = (len(rows) + 1) * ROW + 10
        title = f"split {i} on {split.backend.name}"
        drawn.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height}" rx="6" fill="{fill}" '
            f'stroke="{line}"/>'
        )
        drawn.append(_text(x + MARGIN, y + ROW, title, f'font-weight="bold" fill="{line}"'))
        for k, row in enumerate(rows, 1):
            middle = y + k * ROW + 13
            style = f'fill="{line}" font-style="italic"' if row.is_copy else 'fill="#222"'
            drawn.append(_text(x + MARGIN, middle + 4, row.text, style))
            if row.tip:
                picture.tips.append((x, middle - ROW / 2, width, ROW, row.tip))
            if row.key is not None:
                places[row.key] = _Place(x, x + width, middle, i)
        y += height + BOX_GAP
    drawn += [
        _edge(places[a], places[b], paint[split.backend][1], is_copy)
        for split in splits
        for a, b, is_copy in _edges(split, places)
    ]
    picture.height = y
    return picture


def _rows(split: Split, causes: dict[Tensor, str]) -> list[_Row]:
    """Return the lines of a box: copies, then nodes."""
    rows = []
    for item in split.inputs:
        name = item.tensor.name or item.tensor.op_desc().lower()
        rows.append(
            _Row(
                _cut(f"copy {name}, {readable_size(item.nbytes)} from {item.origin}"),
                item.tensor.describe(),
                (split.backend, item.tensor),
                is_copy=True,
            )
        )
    nodes = [n for n in split.nodes if n.op not in NO_OPS]
    half = MAX_ROWS // 2
    shown = nodes if len(nodes) <= MAX_ROWS else [*nodes[:half], None, *nodes[-half:]]
    for node in shown:
        if node is None:
            rows.append(_Row(f"... {len(nodes) - 2 * half} more nodes ...", "", None))
            continue
        extents = ", ".join(map(str, node.ne[: node.n_dims]))
        name = f" {node.name}" if node.name else ""
        text = f"{node.op_desc().lower()}{name}  {node.dtype.name.lower()}[{extents}]"
        reads = "".join(f"\nreads {s.describe()}" for s in node.src if s is not None)
        rows.append(_Row(_cut(text), f"{node.describe()}\n{causes.get(node, '')}{reads}", node))
    return rows


def _edges(split: Split, places: dict[object, _Place]) -> Iterator[tuple[object, object, bool]]:
    """Yield the ends of each edge of a split, and whether it is a copy between devices."""
    for item in split.inputs:
        computed = _computed(item.tensor)
        if computed in places:
            yield computed, (split.backend, item.tensor), True
    for node in split.nodes:
        if node not in places:
            continue
        for src in dict.fromkeys(s for s in node.src if s is not None):
            copy = (split.backend, src)
            source: object = copy if copy in places else _computed(src)
            if source in places and places[source] is not places[node]:
                yield source, node, False


def _computed(tensor: Tensor) -> Tensor:
    """Return the tensor that computes a tensor's data: itself, or its view source."""
    while tensor.op in NO_OPS and tensor.src and tensor.src[0] is not None:
        tensor = tensor.src[0]
    return tensor


def _edge(a: _Place, b: _Place, colour: str, is_copy: bool) -> str:
    if is_copy and a.left != b.left:
        start, end = (a.right, b.left) if a.left < b.left else (a.left, b.right)
        middle = (start + end) / 2
        path = f"M{start:.0f} {a.y:.0f}C{middle:.0f} {a.y:.0f} {middle:.0f} {b.y:.0f} {end:.0f} {b.y:.0f}"
        dot = f'<circle cx="{end:.0f}" cy="{b.y:.0f}" r="3" fill="{colour}"/>'
        return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{dot}'
    # Within a lane: beside the boxes, further out for longer edges; on the left between boxes.
    reach = min(6 + abs(b.y - a.y) / 8, ARC)
    x, out = (a.right, reach) if a.box == b.box else (a.left, -reach)
    if a.box == b.box and b.y - a.y <= ROW:
        return ""  # without an arc, a node reads the row above
    path = f"M{x:.0f} {a.y:.0f}C{x + out:.0f} {a.y:.0f} {x + out:.0f} {b.y:.0f} {x:.0f} {b.y:.0f}"
    return f'<path d="{path}" fill="none" stroke="#888" stroke-width="0.8"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" xml:space="preserve" {style}>{escape(text)}</text>'


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
