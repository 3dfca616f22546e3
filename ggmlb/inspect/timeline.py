"""Drawing of a trace: a row for each thread, stream and kind of work; a box for each event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import TYPE_CHECKING, Any, Final

from ggmlb.inspect.html import LINES, Picture, escape

if TYPE_CHECKING:
    Event = Mapping[str, Any]

GREY: Final = "#7a7f87"
"""Colour of texts and lines, readable on light and dark pages."""

COLOURS: Final = ("#8a8f98", *LINES)
"""Colour of each process, the host first."""

WIDTH: Final = 760
LABEL: Final = 190
ROW: Final = 22
AXIS: Final = 26
LEAST: Final = 0.6
"""Least width of a box [pixels], to keep short events visible."""

MAX_BOXES: Final = 4000


def timeline(events: Sequence[Event]) -> Picture:
    """Return the drawing of events in the Trace Event Format (times in microseconds).

    Hovering over a box shows its name and duration.
    """
    boxes = [e for e in events if e["ph"] == "X"][:MAX_BOXES]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = sorted({(e["pid"], e["tid"]) for e in boxes})
    start = min((e["ts"] for e in boxes), default=0.0)
    stop = max((e["ts"] + e["dur"] for e in boxes), default=1.0)
    scale = (WIDTH - LABEL - 10) / max(stop - start, 1e-3)
    height = ROW * len(rows) + AXIS
    picture = Picture(WIDTH, height)
    parts = picture.parts
    place = {row: i * ROW for i, row in enumerate(rows)}
    for (pid, tid), y in place.items():
        process = processes.get(pid, str(pid)).partition(" (")[0]
        label = f"{process}: {names.get((pid, tid), tid)}"
        parts.append(f'<text x="0" y="{y + 15}" fill="{GREY}">{escape(label[:28])}</text>')
        parts.append(
            f'<line x1="{LABEL}" x2="{WIDTH}" y1="{y + ROW}" y2="{y + ROW}" stroke="{GREY}" opacity=".3"/>'
        )
    for e in boxes:
        x = LABEL + (e["ts"] - start) * scale
        width = max(e["dur"] * scale, LEAST)
        top = place[e["pid"], e["tid"]] + 4
        parts.append(
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" '
            f'height="{ROW - 7}" rx="2" fill="{COLOURS[e["pid"] % len(COLOURS)]}" opacity=".85"/>'
        )
        picture.tips.append((x, top, width, ROW - 7, f"{e['name']}, {readable_time(e['dur'])}"))
    step = tick_step(stop - start)
    for i in range(int((stop - start) / step) + 1):
        x = LABEL + i * step * scale
        anchor = "middle" if i else "start"
        parts.append(
            f'<text x="{min(x, WIDTH - 30):.0f}" y="{height - 8}" text-anchor="{anchor}" fill="{GREY}">'
            f"{escape(readable_time(i * step))}</text>"
        )
    return picture


def tick_step(duration: float) -> float:
    """Return the time axis's tick distance: 1, 2 or 5 times a power of ten, for 3 to 7 intervals."""
    power = 10.0 ** floor(log10(max(duration, 1e-3) / 3))
    return max(n * power for n in (1, 2, 5) if n * power <= duration / 3 or n == 1)


def readable_time(us: float) -> str:
    """Format a time in microseconds with a suitable unit, such as `"1.25 ms"`."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"
