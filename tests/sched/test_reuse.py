"""Reuse by topology: a graph that equals an earlier one costs nothing, one that does not is planned anew."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import AllocationError, FreedError, GraphError, NotAllocatedError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.fake import FakeReg


@dataclass(frozen=True)
class Recipe:
    """A small program: every field changes what is computed, and nothing else does."""

    width: int = 8
    rows: int = 4
    dtype: DType = DType.F32
    scale: float = 2.0
    bias: float = 0.0
    offset: int = 0
    weight: int = 0
    where: int = 0
    mean: bool = False
    product: bool = False
    is_output: bool = False
    twice: bool = False
    inplace: bool = False
    request: int | None = None
    usage: BufferUsage = BufferUsage.WEIGHTS


recipes = st.builds(
    Recipe,
    width=st.sampled_from([8, 16]),
    rows=st.sampled_from([4, 6]),
    dtype=st.sampled_from([DType.F32, DType.F16]),
    scale=st.sampled_from([2.0, -3.0, 0.5]),
    bias=st.sampled_from([0.0, -0.0, 1.0]),
    offset=st.integers(0, 3),
    weight=st.integers(0, 1),
    where=st.integers(0, 2),
    mean=st.booleans(),
    product=st.booleans(),
    is_output=st.booleans(),
    twice=st.booleans(),
    inplace=st.booleans(),
    request=st.sampled_from([None, 0, 1, 2]),
    usage=st.sampled_from([BufferUsage.WEIGHTS, BufferUsage.ANY]),
)


class World:
    """Two fake GPUs and the CPU, and weights of both widths in the memory of each."""

    def __init__(self, stack: ExitStack) -> None:
        gpus: list[Backend] = [stack.enter_context(d.init_backend()) for d in FakeReg(2).devices]
        self.backends = [*gpus, stack.enter_context(init_by_name("CPU"))]
        random = np.random.default_rng(0)
        self.weights: dict[tuple[int, int, int], Tensor] = {}
        for where, backend in enumerate(self.backends):
            for width in (8, 16):
                for i in range(2):
                    ctx = Context()
                    w = ctx.new_tensor(DType.F32, (width, width), name="w")
                    stack.enter_context(alloc_ctx_tensors(ctx, backend))
                    w.set_array(random.standard_normal((width, width), np.float32))
                    self.weights[where, width, i] = w

    def build(self, r: Recipe, sched: Scheduler | None) -> tuple[Graph, Tensor, Tensor]:
        c = Context()
        w = self.weights[r.where, r.width, r.weight]
        w.buffer.usage = r.usage
        x = c.set_input(c.new_tensor(DType.F32, (r.width, r.rows), name="x"))
        h = c.mul_mat(w, x)
        if r.is_output:
            c.set_output(h)
        part = c.view_1d(h, r.width, r.offset * h.nb[1])
        y = c.scale_bias(part, r.scale, r.bias)
        y = (c.mul if r.product else c.add)(y, y if r.twice else part)
        y = c.sqr_inplace(y) if r.inplace else c.sqr(y)
        y = c.mean(y) if r.mean else c.silu(y)
        if r.dtype is not DType.F32:
            y = c.cast(y, r.dtype)
        if sched is not None and r.request is not None:
            sched.set_tensor_backend(y, self.backends[r.request])
        return Graph().build_forward_expand(c.set_output(y)), x, y

    def compute(self, sched: Scheduler, r: Recipe, seed: int) -> bytes:
        graph, x, y = self.build(r, sched)
        sched.alloc_graph(graph)
        x.set_array(np.random.default_rng(seed).standard_normal((r.rows, r.width), np.float32))
        sched.graph_compute(graph)
        return y.to_numpy().tobytes()


CHANGES = {
    "width": 16, "rows": 6, "dtype": DType.F16, "scale": 2.5, "bias": -0.0, "offset": 1, "weight": 1,
    "where": 1, "mean": True, "product": True, "is_output": True, "twice": True, "inplace": True,
    "request": 1, "usage": BufferUsage.ANY,
}  # fmt: skip


def n_executables(sched: Scheduler) -> int:
    return len(sched._cache)


@pytest.fixture
def world():
    with ExitStack() as stack:
        yield World(stack)


def test_every_field_has_a_change():
    assert CHANGES.keys() == Recipe.__dataclass_fields__.keys()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("field", CHANGES)
def test_each_change_makes_another_executable(world, field, parallel):
    recipe = Recipe()
    changed = replace(recipe, **{field: CHANGES[field]})
    with Scheduler(world.backends, parallel=parallel) as sched:
        for seed, (each, n) in enumerate([(recipe, 1), (recipe, 1), (changed, 2), (recipe, 2), (changed, 2)]):
            with Scheduler(world.backends) as fresh:
                expected = world.compute(fresh, each, seed)
            assert world.compute(sched, each, seed) == expected
            assert n_executables(sched) == n


def test_a_change_after_many_nodes_makes_another_executable(world):
    def graph(dtype: str) -> Graph:
        c = Context()
        y = c.set_input(c.new_tensor(DType.F32, (8,)))
        for _ in range(99):
            y = c.silu(y)
        return Graph().build_forward_expand(c.cast(y, dtype))

    with Scheduler(world.backends) as sched:
        for dtype, n in (("f16", 1), ("bf16", 2), ("f16", 2)):
            sched.split_graph(graph(dtype))
            assert n_executables(sched) == n


def test_nothing_is_planned_for_the_second_graph(world, monkeypatch):
    with Scheduler(world.backends) as sched:
        world.compute(sched, Recipe(), 0)
        plans = [s.plan for s in sched.splits]
        for backend in world.backends:
            monkeypatch.setattr(backend, "graph_plan_create", None)
            monkeypatch.setattr(type(backend.device), "declines", None)
        graph, x, y = world.build(Recipe(), None)
        sched.alloc_graph(graph)
        x.set_array(np.ones((4, 8)))
        sched.graph_compute(graph)
        assert [s.plan for s in sched.splits] == plans
        # What the user sees is the new graph.
        assert [n for s in sched.splits for n in (*s.views, *s.nodes)] == graph.nodes
        assert [i.tensor for s in sched.splits for i in s.inputs] == [x]
        assert sched.get_tensor_backend(y) is sched.splits[-1].backend
        monkeypatch.undo()  # of `placement`, each device is asked for its reasons
        assert [p.node for p in sched.placement]


def test_the_graph_before_loses_its_places_but_not_those_that_somebody_else_gave(world):
    with Scheduler(world.backends) as sched, Scheduler(world.backends) as other:
        first, _, y = world.build(Recipe(), None)
        sched.alloc_graph(first)
        other.alloc_graph(first)
        sched.alloc_graph(world.build(Recipe(), None)[0])
        assert y.buffer is not None
        other.alloc_graph(world.build(Recipe(), None)[0])
        with pytest.raises(NotAllocatedError):
            y.to_numpy()


def test_a_parameter_changed_in_place_makes_new_plans_and_keeps_data(world):
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(DType.F32, (8, 4)))
    y = ctx.set_output(ctx.scale(ctx.mul_mat(world.weights[0, 8, 0], x), 2.0))
    graph = Graph().build_forward_expand(y)
    with Scheduler(world.backends) as sched:
        sched.alloc_graph(graph)
        x.set_array(np.ones((4, 8)))
        sched.graph_compute(graph)
        before = y.to_numpy()
        y.params["scale"] = 6.0
        sched.graph_compute(graph)
        np.testing.assert_allclose(y.to_numpy(), 3 * before, rtol=1e-6)


def test_a_freed_weight_and_a_moved_one_are_noticed(world):
    graph, x, _ = world.build(Recipe(), None)
    w = world.weights[0, 8, 0]
    with Scheduler(world.backends) as sched:
        sched.alloc_graph(graph)
        x.set_array(np.ones((4, 8)))
        sched.graph_compute(graph)
        buffer, w.buffer = w.buffer, None
        with alloc_ctx_tensors(_holding(w), world.backends[0]) as elsewhere:
            with pytest.raises(GraphError, match="moved or changed"):
                sched.graph_compute(graph)
            elsewhere.usage = BufferUsage.WEIGHTS
            sched.alloc_graph(graph)
            assert n_executables(sched) == 2
        with pytest.raises(FreedError, match="'w'"):
            sched.graph_compute(graph)
        with pytest.raises(FreedError, match="'w'"):
            sched.alloc_graph(graph)
        w.buffer = buffer


def _holding(tensor: Tensor) -> Context:
    ctx = Context()
    ctx.tensors.append(tensor)
    return ctx


def test_another_tensor_in_the_place_of_a_weight_makes_another_executable(world):
    w = world.weights[0, 8, 0]
    with Scheduler(world.backends) as sched:
        before = world.compute(sched, Recipe(), 0)
        clone = w.reading((), None)
        world.weights[0, 8, 0] = clone
        w.buffer = None
        assert world.compute(sched, Recipe(), 0) == before
        assert n_executables(sched) == 2


def listings(c: Context) -> dict[str, Graph]:
    """Graphs that differ only in what they list, and how often."""
    x, y = (c.set_input(c.new_tensor(DType.F32, (8,))) for _ in range(2))
    same = c.silu(c.add(x, x))
    apart = c.silu(c.add(x, y))
    return {
        "one leaf": Graph([same.src[0], same], [x]),
        "a leaf twice": Graph([same.src[0], same], [x, x]),
        "two leafs": Graph([apart.src[0], apart], [x, y]),
        "a leaf in vain": Graph([same.src[0], same], [x, y]),
        "no leaf": Graph([same.src[0], same]),
        "two leafs, not listed": Graph([apart.src[0], apart]),
        "a node twice": Graph([same.src[0], same, same], [x]),
    }


def test_a_graph_that_lists_other_tensors_makes_another_executable(world):
    with Scheduler(world.backends) as sched:
        programs = {}
        for name, graph in listings(Context()).items():
            sched.split_graph(graph)
            programs[name] = sched._executable
        assert len({*programs.values()}) == len(programs)
        for name, graph in listings(Context()).items():
            sched.split_graph(graph)
            assert sched._executable is programs[name]
            assert [t for s in sched.splits for t in s.nodes] == graph.nodes


def test_memory_that_grows_for_one_topology_makes_new_plans_for_the_others(world):
    with Scheduler(world.backends) as sched:
        small = world.compute(sched, Recipe(), 3)
        for rows in (50, 5000):
            with Scheduler(world.backends) as fresh:
                expected = world.compute(fresh, Recipe(rows=rows), 4)
            assert world.compute(sched, Recipe(rows=rows), 4) == expected
            assert world.compute(sched, Recipe(), 3) == small


def test_a_bounded_number_of_topologies_is_kept(world):
    with Scheduler(world.backends) as sched:
        for rows in range(4, 24):
            world.compute(sched, Recipe(rows=rows), 0)
        assert n_executables(sched) == 8


def test_what_is_freed_is_gone_at_once_not_when_garbage_is_collected(world):
    gc.disable()
    try:
        with Scheduler(world.backends) as sched:
            world.compute(sched, Recipe(request=1), 0)
            plans = [weakref.ref(split.plan) for split in sched.splits]
            assert len(plans) > 1
        assert [plan() for plan in plans] == [None] * len(plans)
    finally:
        gc.enable()


# -- kept graphs -----------------------------------------------------------------------------------


@given(
    st.lists(recipes.map(lambda r: replace(r, usage=BufferUsage.WEIGHTS)), min_size=2, max_size=5),
    st.lists(st.integers(0, 4), min_size=4, max_size=12),
    st.sampled_from([False, True]),
)
def test_kept_graphs_take_turns_in_one_memory(
    several: list[Recipe], order: list[int], parallel: bool
) -> None:
    with ExitStack() as stack:
        world = World(stack)
        sched = stack.enter_context(Scheduler(world.backends, parallel=parallel, keep_graphs=True))
        built = [world.build(recipe, sched) for recipe in several]
        needs = []
        for seed, turn in enumerate(order):
            i = turn % len(several)
            with Scheduler(world.backends, parallel=parallel) as fresh:
                expected = world.compute(fresh, several[i], seed)
                needs.append([fresh.buffer_size(b) for b in world.backends])
            graph, x, y = built[i]
            sched.alloc_graph(graph)
            x.set_array(np.random.default_rng(seed).standard_normal(x.shape, np.float32))
            sched.graph_compute(graph)
            assert y.to_numpy().tobytes() == expected, several[i]
            most = [max(of_backend) for of_backend in zip(*needs, strict=True)]
            assert [sched.buffer_size(b) for b in world.backends] == most


def test_nothing_is_done_for_a_kept_graph(world, monkeypatch):
    with Scheduler(world.backends, keep_graphs=True) as sched:
        built = [world.build(Recipe(rows=rows), None) for rows in (6, 4, 5)]
        results = []
        for turn in (0, 1, 2, 2, 1, 0):
            graph, x, y = built[turn]
            if len(results) == 3:
                plans = {s.plan for g, _, _ in built for s in sched._cache._kept[g].splits}
                monkeypatch.setattr(sched, "split_graph", None)
                monkeypatch.setattr("ggmlb.runtime.compile.executable.Executable.place", None)
                for backend in world.backends:
                    monkeypatch.setattr(backend, "graph_plan_create", None)
            sched.alloc_graph(graph)
            assert sched.graph is graph and sched.get_tensor_backend(y) is sched.splits[-1].backend
            x.set_array(np.ones(x.shape))
            sched.graph_compute(graph)
            results.append(y.to_numpy().tobytes())
        assert results[:3] == results[:2:-1]
        assert plans == {s.plan for g, _, _ in built for s in sched._cache._kept[g].splits}


def test_a_kept_graph_that_was_split_again_is_placed_again(world):
    with Scheduler(world.backends, keep_graphs=True) as sched:
        graph, x, y = world.build(Recipe(), None)
        for _ in range(2):
            sched.alloc_graph(graph)
            x.set_array(np.ones((4, 8)))
            sched.graph_compute(graph)
            assert y.to_numpy().any()
            sched.reserve_size(graph)


def test_a_kept_graph_whose_weight_moved_is_split_anew_and_one_that_died_is_dropped(world):
    w = world.weights[0, 8, 0]
    with Scheduler(world.backends, keep_graphs=True) as sched:
        graph, x, y = world.build(Recipe(), None)
        other = world.build(Recipe(rows=6), None)[0]
        for each in (graph, other):
            sched.alloc_graph(each)
        buffer, w.buffer = w.buffer, None
        with alloc_ctx_tensors(_holding(w), world.backends[0]) as elsewhere:
            elsewhere.usage = BufferUsage.WEIGHTS
            w.set_array(np.ones((8, 8)))
            sched.alloc_graph(graph)
            x.set_array(np.full((4, 8), 0.5))
            sched.graph_compute(graph)
            found = y.to_numpy()
            with Scheduler(world.backends) as fresh:
                again, x, y = world.build(Recipe(), None)
                fresh.alloc_graph(again)
                x.set_array(np.full((4, 8), 0.5))
                fresh.graph_compute(again)
                assert np.array_equal(found, y.to_numpy())
        with pytest.raises(FreedError, match="'w'"):
            sched.alloc_graph(graph)
        w.buffer = buffer
        assert len(sched._cache._kept) == 2
        del other, each
        gc.collect()
        assert len(sched._cache._kept) == 1


def test_kept_graphs_that_find_no_room_lose_their_places(bench):
    chain, larger = bench.chain(), bench.chain(9)
    with Scheduler(bench.backends, keep_graphs=True) as sched:
        sched.alloc_graph(chain.graph)
        device = bench.reg.devices[0]
        device.capacity = device.used
        wide = Context()
        x = wide.set_input(wide.new_tensor(DType.F32, (8, 999)))
        graph = Graph().build_forward_expand(wide.mul_mat(larger.weights[0], x))
        with pytest.raises(AllocationError):
            sched.alloc_graph(graph)
        device.capacity += 1 << 20
        assert chain.y.buffer is None
        sched.alloc_graph(chain.graph)
        chain.x.set_array(np.ones((3, 8)))
        sched.graph_compute(chain.graph)
        np.testing.assert_allclose(chain.y.to_numpy(), chain.expected(np.ones((3, 8))), rtol=1e-5)
