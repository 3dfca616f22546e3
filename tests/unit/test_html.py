"""What notebooks show of each object: well formed, escaped, in the page's own colours."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

import ggmlb
from ggmlb import Context, Graph
from ggmlb.timeline import LABEL, WIDTH, timeline_svg


class Balanced(HTMLParser):
    """Checks that every element is closed, in order; collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def shown(thing: Any) -> str:
    html = thing._repr_html_()
    page = Balanced()
    page.feed(html)
    assert page.open == []
    assert "<script" not in html
    # Text in the page's own colour, and see-through greys, are readable on any background.
    assert not re.search(r"(?<![-\w])(?:color|background)\s*:\s*(?!inherit|none|rgba)", html)
    return page.text


@pytest.fixture
def tensors() -> Any:
    ctx = Context()
    x = ctx.new_tensor("f32", (3, 2), "<x>")
    y = ctx.scale(x, 2.0)
    y.name = "y"
    return ctx, x, y


def test_tensors(tensors: Any) -> None:
    ctx, x, y = tensors
    assert "<x>" in shown(x) and "in no buffer yet" in shown(x)
    assert "scale = 2.0" in shown(y)
    with ggmlb.init_by_name("CPU") as cpu, ggmlb.alloc_ctx_tensors(ctx, cpu):
        x.set_array([[1, 2, 3], [4, 5, 6.5]])
        assert "6.5" in shown(x) and "CPU + 0" in shown(x)
        assert "6.5" not in repr(x)
    shown(x)  # its buffer was freed


def test_large_tensors_keep_their_values() -> None:
    large = Context().from_array([[7.25] * 512] * 512)
    assert "7.25" in shown(large)
    larger = Context().from_array([[7.25] * 512] * 513)
    assert "7.25" not in shown(larger)


def test_graphs_and_contexts(tensors: Any) -> None:
    ctx, _, y = tensors
    graph = Graph().build_forward_expand(y)
    assert "SCALE" in shown(graph) and "<x>" in shown(graph)
    assert "SCALE" in shown(ctx)
    for _ in range(40):
        y = ctx.sqr(y)
    assert "and 11 more" in shown(Graph().build_forward_expand(y))


def test_devices_and_buffers() -> None:
    devices = ggmlb.devices()
    text = shown(devices)
    assert all(d.name in text for d in devices)
    assert all(missing.name in text for missing in ggmlb.unavailable())
    for device in devices:
        assert device.description in shown(device)
        with device.buffer_type.alloc_buffer(4096) as buffer:
            assert "4.0 KiB" in shown(buffer)


@pytest.mark.parametrize("make", [lambda: ggmlb.devices()[0], lambda: Context(), lambda: Graph()])
def test_plain_reprs_fit_a_line(make: Any) -> None:
    assert "\n" not in repr(make()) and len(repr(make())) < 200


def test_schedulers_and_traces() -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 8, "x")
    y = ctx.silu(ctx.scale(x, 2.0))
    graph = Graph().build_forward_expand(y)
    with (
        ggmlb.init_by_name("OpenCL0") as opencl,
        ggmlb.init_by_name("CPU") as cpu,
        ggmlb.Scheduler([opencl, cpu]) as scheduler,
    ):
        assert "no graph" in shown(scheduler) or "0 splits" in shown(scheduler)
        scheduler.set_tensor_backend(y, opencl)
        scheduler.set_tensor_backend(y.src[0], cpu)
        scheduler.alloc_graph(graph)
        assert "split 1 on OpenCL0" in shown(scheduler)
        trace = scheduler.trace()
        assert "0 events" in shown(trace)
        with trace:
            x.set_array(range(8))
            scheduler.graph_compute(graph)
        text = shown(trace)
        assert "OpenCL0: computations" in text and "host" in text


def test_a_timeline_spans_its_events() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "host"}},
        {"ph": "X", "name": "a<b", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 500.0},
        {"ph": "X", "name": "later", "pid": 0, "tid": 0, "ts": 2500.0, "dur": 500.0},
    ]
    svg = timeline_svg(events)
    places = [tuple(map(float, m)) for m in re.findall(r'<rect x="([\d.]+)" y="4" width="([\d.]+)"', svg)]
    (x0, w0), (x1, w1) = places
    assert w0 == pytest.approx(w1) and x1 + w1 == pytest.approx(WIDTH - 10, abs=1)
    assert x0 == pytest.approx(LABEL) and w0 / (x1 + w1 - x0) == pytest.approx(0.25, abs=0.01)
    assert "a&lt;b, 500 us" in svg and ">2 ms<" in svg
    assert timeline_svg([]).startswith("<svg")
