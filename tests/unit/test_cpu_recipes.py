"""A node that is lowered by the recipe of one like it computes what it would compute by its rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import ggmlb
from ggmlb import Backend, Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cpu import recipes
from ggmlb.core.errors import Error
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.programs import Built

CASES = [case for family in FAMILIES for case in cases_of(family)[:4]]


@pytest.fixture
def cpu() -> Iterator[Backend]:
    with ggmlb.init_by_name("CPU", {"n_threads": 1}) as backend:
        yield backend


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops whose nodes were lowered by a recipe."""
    names, follow = [], recipes.follow

    def noted(recipe, node, scratch):
        names.append(node.op_desc())
        return follow(recipe, node, scratch)

    monkeypatch.setattr(recipes, "follow", noted)
    return names


def fill(built: Built, factor: float) -> None:
    built.upload()
    for leaf in built.graph.leafs:
        if leaf.dtype is DType.F32 and leaf.view_src is None:
            leaf.set_array(factor * leaf.to_numpy())


def test_a_recipe_gives_what_the_rule_gives(cpu: Backend, followed: list[str]) -> None:
    for case in CASES:
        try:
            contexts = [Context() for _ in range(2)]
            first, second = (case.program.case(case.id).build(ctx) for ctx in contexts)
        except Error:
            continue  # the kit says why
        nodes = [node for built in (first, second) for node in built.graph.nodes]
        if any(cpu.device.declines(node) for node in nodes):
            continue
        buffers = [alloc_ctx_tensors(ctx, cpu) for ctx in contexts]
        for built, factor in (first, 1.0), (second, 0.5):
            fill(built, factor)
        cpu.graph_compute(Graph(nodes))
        found = [second.tensors[name].get().tobytes() for name in case.program.outputs]
        fill(second, 0.5)
        cpu.graph_compute(Graph(second.graph.nodes))
        assert found == [second.tensors[name].get().tobytes() for name in case.program.outputs], case.id
        for buffer in buffers:
            if buffer is not None:
                buffer.free()
    assert len(set(followed)) > 60, sorted(set(followed))


def test_zeros_of_either_sign_are_two_recipes(cpu: Backend) -> None:
    ctx = Context()
    fills = [ctx.fill(ctx.new_tensor("f32", 4), value) for value in (0.0, -0.0)]
    with alloc_ctx_tensors(ctx, cpu):
        cpu.graph_compute(Graph(fills))
        assert [bool(np.signbit(y.to_numpy()).all()) for y in fills] == [False, True]


def test_one_tensor_twice_is_no_model_for_two(cpu: Backend, followed: list[str]) -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 4)
    row = ctx.new_tensor("f32", 8)
    halves = ctx.view_1d(row, 4, 0), ctx.view_1d(row, 4, 8)  # which share elements
    sums = [ctx.add(x, x), ctx.sub(*halves)]
    sums += [ctx.add(sums[0], x), ctx.sub(x, halves[1]), ctx.add(x, sums[0]), ctx.sub(sums[0], x)]
    with alloc_ctx_tensors(ctx, cpu):
        x.set_array(np.arange(4))
        row.set_array(np.arange(8) ** 2)
        cpu.graph_compute(Graph(sums))
        assert [list(y.to_numpy()) for y in sums[:4]] == [
            [0, 2, 4, 6],
            [-4, -8, -12, -16],
            [0, 3, 6, 9],
            [-4, -8, -14, -22],
        ]
        assert [list(y.to_numpy()) for y in sums[4:]] == [[0, 3, 6, 9], [0, 1, 2, 3]]


def test_the_layers_of_a_model_are_lowered_once(cpu: Backend, followed: list[str]) -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", (8, 2))
    w = ctx.new_tensor("f32", (8, 8))
    norm = ctx.new_tensor("f32", 8)
    y = x
    for _ in range(4):
        y = ctx.silu(ctx.mul_mat(w, ctx.mul(ctx.rms_norm(y, 1e-5), norm)))
    graph = Graph().build_forward_expand(y)
    with alloc_ctx_tensors(ctx, cpu):
        x.set_array(np.ones((2, 8)))
        w.set_array(np.eye(8))
        norm.set_array(np.ones(8))
        cpu.graph_compute(graph)
        assert sorted(followed) == sorted(3 * ["RMS_NORM", "MUL", "MUL_MAT", "SILU"])
        assert np.isfinite(y.to_numpy()).all()
