"""What notebooks show of each object: well formed, escaped, in the page's own colours, trusted or not."""

from __future__ import annotations

import ast
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Graph
from ggmlb.inspect.html import Picture
from ggmlb.inspect.notebook import PICTURES
from ggmlb.inspect.timeline import LABEL, WIDTH, tick_step, timeline
from ggmlb.interface.memory_table import MemoryTable
from ggmlb.models import TextModel
from ggmlb.models.text.inside import LogitLens
from tests.support.page_sanitizer import sanitized
from tests.support.text_models import write_text_model

VOID = {"br", "img"}
IMAGE = "data:image/svg+xml;base64,"


class Balanced(HTMLParser):
    """Checks that every element is closed, in order; collects the text, of pictures and tips too."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        for name, value in attrs:
            if name == "src":
                assert value.startswith(IMAGE)
                svg = ElementTree.fromstring(b64decode(value.removeprefix(IMAGE), validate=True))
                self.text += " ".join(svg.itertext())
            elif name in ("title", "alt"):
                self.text += f"{value} "
        if tag not in VOID:
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
    assert sanitized(html) == html
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
        assert "OpenCL0: computations" in text and "host" in text and " us" in text


def test_all_that_notebooks_show_passes_the_sanitizer(tmp_path: Path) -> None:
    classes = {
        node.name
        for path in Path(ggmlb.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(f, ast.FunctionDef) and f.name == "_repr_html_" for f in node.body)
    }
    ctx = Context()
    x = ctx.from_array([1.0, 2.0, 3.0])
    ggmlb.save_gguf(tmp_path / "x.gguf", {"general.name": "<x>"}, {"x": x})
    file = ggmlb.open_gguf(tmp_path / "x.gguf")
    graph = Graph().build_forward_expand(ctx.sqr(x))
    with ggmlb.init_by_name("CPU") as cpu, ggmlb.Scheduler([cpu]) as scheduler:
        scheduler.alloc_graph(graph)
        with scheduler.trace() as trace:
            scheduler.graph_compute(graph)
        memory = MemoryTable({"weights": [(cpu.default_buffer_type, 64)]})
        lens = LogitLens([1, 2], [0], np.eye(2, 3, dtype=np.float32)[None], lambda token: f"<{token}>")
        devices = ggmlb.devices()
        model = TextModel(write_text_model(tmp_path / "llama.gguf", "llama", "f32"), ["CPU"], n_ctx=32)
        things = (
            ctx, x, graph, cpu, cpu.device, x.buffer, devices, scheduler, trace, file, memory, lens,
            scheduler.memory_report(), model, model.summary(), model.session(),
            model.generate([1], max_tokens=2),
        )  # fmt: skip
        for thing in things:
            shown(thing)
        assert "forecast" in shown(model) and "layers 0-2" in shown(model.summary())
        model.close()
        assert "TextModel" in shown(model)
    shown(cpu)  # freed
    found = {t.__name__ for thing in things for t in type(thing).__mro__ if "_repr_html_" in vars(t)}
    assert found == classes | {shown.__name__ for shown in PICTURES}


def test_a_picture_keeps_its_tips_in_a_notebook() -> None:
    picture = Picture(
        100, 50, ["<circle r='5'/>"], [(1.4, 2.6, 0.3, 10, '"a" < b\nc'), (0, 0, 100, 50, "rest")]
    )
    html = picture.html("a picture")
    rest, tip = re.findall(r'<span title="(.+?)" style="position:absolute;(.+?)">', html, re.S)
    assert rest[0] == "rest"  # the first tip lies above
    assert tip == ("&quot;a&quot; &lt; b\nc", "left:1.4px;top:2.6px;width:2.0px;height:10.0px")
    svg = ElementTree.fromstring(picture.svg())
    assert [e.text for e in svg.iter("{http://www.w3.org/2000/svg}title")] == ["rest", '"a" < b\nc']


def test_a_timeline_spans_its_events() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "host"}},
        {"ph": "X", "name": "a<b", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 500.0},
        {"ph": "X", "name": "later", "pid": 0, "tid": 0, "ts": 2500.0, "dur": 500.0},
    ]
    svg = timeline(events).svg()
    places = [tuple(map(float, m)) for m in re.findall(r'<rect x="([\d.]+)" y="4" width="([\d.]+)"', svg)]
    (x0, w0), (x1, w1) = places
    assert w0 == pytest.approx(w1) and x1 + w1 == pytest.approx(WIDTH - 10, abs=1)
    assert x0 == pytest.approx(LABEL) and w0 / (x1 + w1 - x0) == pytest.approx(0.25, abs=0.01)
    assert "a&lt;b, 500 us" in svg and ">2 ms<" in svg
    assert timeline([]).svg().startswith("<svg")


@pytest.mark.parametrize("duration", [1.0, 3.0, 7.5, 29.0, 123.0, 4567.0, 9.99e5])
def test_ticks_of_a_timeline_are_round(duration: float) -> None:
    step = tick_step(duration)
    assert 3 <= duration / step < 7.6
    assert f"{step:e}"[0] in "125" and float(f"{step:.0e}") == step
