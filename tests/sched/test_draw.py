"""Pictures of split graphs: every split, copy and node is in them, and any name may be."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ggmlb import Context, DType, Graph, GraphError, Scheduler
from ggmlb.inspect.draw import FILLS, MAX_ROWS
from ggmlb.inspect.html import card, pre

SVG = "{http://www.w3.org/2000/svg}"


class Chain:
    """A product on each fake device, and a tail of other nodes on the last."""

    def __init__(self, bench, n_more: int = 0, name: str = "b") -> None:
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (8, 3), name="x"))
        a = ctx.set_name(ctx.mul_mat(bench.weight(bench.gpu0, 8, 8, name="w0"), x), "a")
        b = ctx.set_name(
            ctx.mul_mat(bench.weight(bench.gpu1, 8, 8, name="w1"), ctx.transpose(ctx.cont(ctx.transpose(a)))),
            name,
        )
        y = ctx.add(b, a)
        for _ in range(n_more):
            y = ctx.scale(y, 2.0)
        self.graph = Graph().build_forward_expand(ctx.set_output(y))


@pytest.fixture
def picture(bench):
    def picture(**options):
        chain = Chain(bench, **options)
        with Scheduler(bench.backends) as sched:
            sched.split_graph(chain.graph)
            return ElementTree.fromstring(sched.to_svg()), sched.to_dot(), chain.graph

    return picture


def texts(svg: ElementTree.Element) -> list[str]:
    return ["".join(t.itertext()) for t in svg.iter(f"{SVG}text")]


def test_a_box_for_each_split_in_its_devices_colour(picture):
    svg, dot, _ = picture()
    boxes = [r for r in svg.iter(f"{SVG}rect") if r.get("rx")]
    assert [b.get("fill") for b in boxes] == list(FILLS[:2])
    assert boxes[0].get("x") != boxes[1].get("x")
    assert float(boxes[1].get("y")) > float(boxes[0].get("y")) + float(boxes[0].get("height"))
    assert [line.split('"')[1] for line in dot.splitlines() if "split " in line] == [
        "split 0 on Fake0", "split 1 on Fake1",
    ]  # fmt: skip
    assert [dot.count(f'fillcolor="{fill}"') for fill in FILLS[:3]] == [1, 1, 0]


def test_copies_are_curves_between_lanes(picture):
    svg, dot, _ = picture()
    assert len(list(svg.iter(f"{SVG}circle"))) == 2  # the transposed cont, and a; x is no node
    copied = [t for t in texts(svg) if t.startswith("tensor") or "copy " in t]
    assert len(copied) == 3
    assert dot.count("penwidth") == 3


def test_every_node_and_edge_is_there(picture):
    _, dot, graph = picture()
    assert dot.count("[label=") == len(graph.nodes) + len(graph.leafs)
    assert dot.count("->") == sum(len(n.src) for n in graph.nodes)


def test_the_cause_shows_when_the_pointer_rests(picture):
    svg, _, _ = picture()
    tips = [t.text for t in svg.iter(f"{SVG}title")]
    assert any("'a'" in tip and "reads" in tip and "weight" in tip for tip in tips), tips


@pytest.mark.parametrize(
    "name", ['<b> & "c" \\', "a name that is much too long to be written in a box of any picture"]
)
def test_any_name(picture, name):
    svg, dot, _ = picture(name=name)
    assert any(name[:20] in t for t in texts(svg))
    assert name.replace("\\", "\\\\").replace('"', '\\"') in dot


@pytest.mark.parametrize("name", ["\0", "\x1b[31mred", "\ud800", "\ufffe"])
def test_what_no_file_may_hold_is_replaced(picture, name):
    svg, _, _ = picture(name=f"before {name}")  # which was parsed
    assert any("before \N{REPLACEMENT CHARACTER}" in t for t in texts(svg))
    assert card(name, {"fact": name}, pre(name)).count("\N{REPLACEMENT CHARACTER}") == 3


def test_a_long_split_is_shortened(picture):
    svg, _, _ = picture(n_more=1000)
    rows = texts(svg)
    assert any("972 more nodes" in row for row in rows)
    assert len(rows) < 2 * MAX_ROWS


def test_there_must_be_a_graph(bench):
    with Scheduler(bench.backends) as sched:
        for draw in (sched.to_svg, sched.to_dot):
            with pytest.raises(GraphError, match="no graph yet"):
                draw()
