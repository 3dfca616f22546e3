"""Graphs: the order of nodes, parts of a graph, and pictures."""

from __future__ import annotations

import re

import pytest

from ggmlb import Context, Graph, GraphError, TensorFlag


def named(tensors: object) -> list[str]:
    return [t.name for t in tensors]  # type: ignore[attr-defined]


@pytest.fixture
def ctx() -> Context:
    return Context()


def test_parents_come_first_in_the_order_of_the_operands(ctx: Context) -> None:
    x, w = ctx.new_tensor("f32", 4, "x"), ctx.new_tensor("f32", 4, "w")
    a, b = ctx.set_name(ctx.sqr(x), "a"), ctx.set_name(ctx.mul(w, x), "b")
    y = ctx.set_name(ctx.add(b, a), "y")
    graph = Graph().build_forward_expand(y)
    assert named(graph.nodes) == ["b", "a", "y"]
    assert named(graph.leafs) == ["w", "x"]
    assert named(graph) == ["w", "x", "b", "a", "y"]
    z = ctx.set_name(ctx.neg(a), "z")
    assert z not in graph
    assert named(graph.build_forward_expand(y, z).nodes) == ["b", "a", "y", "z"], "what is there stays"


def test_a_chain_longer_than_the_recursion_limit(ctx: Context) -> None:
    y = ctx.new_tensor("f32", 1)
    for _ in range(20_000):
        y = ctx.neg(y)
    assert len(Graph().build_forward_expand(y)) == 20_000


def test_parameters_are_nodes(ctx: Context) -> None:
    w = ctx.set_param(ctx.new_tensor("f32", 4, "w"))
    graph = Graph().build_forward_expand(ctx.sqr(w))
    assert graph.nodes[0] is w
    assert not graph.leafs
    assert w.flags & TensorFlag.COMPUTE


def test_nodes_added_one_by_one(ctx: Context) -> None:
    x = ctx.new_tensor("f32", 4, "x")
    y = ctx.set_name(ctx.sqr(x), "y")
    graph = Graph()
    with pytest.raises(GraphError, match=r"its source .*'x'.* is not in the graph; add it first"):
        graph.add_node(y)
    graph.add_node(x)
    graph.add_node(y)
    graph.add_node(y)
    assert (named(graph.leafs), named(graph.nodes)) == (["x"], ["y"])


def test_a_part_knows_what_it_reads_and_its_whole(ctx: Context) -> None:
    x = ctx.new_tensor("f32", 4, "x")
    a = ctx.set_name(ctx.sqr(x), "a")
    b = ctx.set_name(ctx.add(a, x), "b")
    graph = Graph().build_forward_expand(b)
    part = graph.view(1, 2)
    assert (named(part.leafs), named(part.nodes)) == (["a", "x"], ["b"])
    assert part.whole is graph
    assert part.view(0, 1).whole is graph
    assert part.use_counts()[x] == 2, "counted in the whole"


def test_nodes_by_name(ctx: Context) -> None:
    x = ctx.new_tensor("f32", 4, "hidden")
    graph = Graph().build_forward_expand(ctx.sqr(x))
    assert graph.node("hidden") is x
    with pytest.raises(GraphError, match="named 'hiden'; did you mean 'hidden'"):
        graph.node("hiden")


def test_the_picture_has_each_tensor_and_edge(ctx: Context) -> None:
    x = ctx.new_tensor("f32", 4, 'say "x"')
    graph = Graph().build_forward_expand(ctx.mul(ctx.sqr(x), x))
    dot = graph.to_dot()
    assert len(re.findall(r"t\d+ \[label=", dot)) == 3
    assert len(re.findall(r"t\d+ -> t\d+;", dot)) == 3
    assert 'say \\"x\\"' in dot
