"""Uploads of inputs: small ones together; graphs that take turns wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ggmlb import Context, Graph, Scheduler, Tensor
from ggmlb.interface import observe
from ggmlb.runtime.compile.split import MAX_JOINED
from ggmlb.testing.fake import FakeReg
from tests.support.chain import new_input


class Names(observe.Observer):
    """The names of actions, and the tensors that they write."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[str]]] = []

    def begin(self, action: observe.Action) -> None:
        written = [a.tensor.name for a in action.transfers if a.is_write and a.tensor is not None]
        self.seen.append((action.name, written))

    def of(self, name: str) -> list[list[str]]:
        return [written for seen, written in self.seen if seen == name]


@contextmanager
def observed() -> Iterator[Names]:
    names = Names()
    observe.start(names)
    try:
        yield names
    finally:
        observe.stop(names)


def sums(bench, sizes: list[int]) -> tuple[Graph, list[Tensor], Tensor]:
    """The sum of a weight and of inputs, each repeated to the weight's size."""
    ctx = Context()
    most = max(sizes)
    y = bench.weight(bench.gpu0, most, name="w")
    inputs = [new_input(ctx, n) for n in sizes]
    for i, x in enumerate(inputs):
        x.name = f"x{i}"
        y = ctx.add(y, x)
    return Graph().build_forward_expand(ctx.set_output(y)), inputs, y


@pytest.mark.parametrize("async_copies", [True, False])
def test_small_inputs_are_uploaded_together_and_may_be_overwritten(make_bench, async_copies):
    bench = make_bench(FakeReg(2, async_copies=async_copies))
    n = MAX_JOINED // 4
    sizes = [1, n, 4, 2 * n, 64]
    graph, inputs, y = sums(bench, sizes)
    w = graph.leafs[0].to_numpy()
    with Scheduler([bench.gpu0, bench.cpu]) as sched:
        for step in range(4):
            sched.alloc_graph(graph)
            for i, x in enumerate(inputs):
                x.set_array(np.full(sizes[i], 10.0**i + step, np.float32))
            with observed() as seen:
                sched.graph_compute_async(graph)
            for x in inputs:
                x.set_array(np.full(x.ne[0], np.nan))
            sched.synchronize()
            expected = w + sum(10.0**i + step for i in range(len(sizes)))
            np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-5)
        assert sorted(seen.of("set_tensor_async")) == [["Fake0#x3"], ["inputs"]]
        (split,) = sched.splits
        assert [item.tensor.name for item in split.joined] == ["x0", "x1", "x2", "x4"]
        assert not any(item.copy.offset % bench.gpu0.alignment for item in split.inputs)


def test_a_single_input_has_no_block(bench):
    graph, inputs, y = sums(bench, [8, 2 * MAX_JOINED])
    with Scheduler([bench.gpu0, bench.cpu]) as sched:
        sched.alloc_graph(graph)
        for x in inputs:
            x.set_array(np.ones(x.ne[0]))
        sched.graph_compute(graph)
        assert sched.splits[0].block is None
        np.testing.assert_allclose(y.to_numpy(), graph.leafs[0].to_numpy() + 2, rtol=1e-5)


@pytest.mark.parametrize("keep_graphs", [True, False])
def test_graphs_take_turns_without_a_wait(bench, keep_graphs):
    """Each is queued behind the other, in the same memory; results are read behind them."""
    built = [sums(bench, sizes) for sizes in ([3, 48], [4, 8, 16], [1, 64])]
    weights = [graph.leafs[0].to_numpy() for graph, _, _ in built]
    found = []
    with Scheduler([bench.gpu0, bench.cpu], keep_graphs=keep_graphs) as sched:
        for graph, _, _ in built:
            sched.reserve(graph)
        with observed() as seen:
            for step in range(9):
                graph, inputs, y = built[step % 3]
                sched.alloc_graph(graph)
                for x in inputs:
                    x.set_array(np.full(x.ne[0], step + 1, np.float32))
                sched.graph_compute_async(graph)
                found.append(np.empty(y.ne[0], np.float32))
                bench.gpu0.get_tensor_async(y, found[-1])
        assert not seen.of("synchronize")
        sched.synchronize()
    for step, result in enumerate(found):
        n = len(built[step % 3][1])
        np.testing.assert_allclose(result, weights[step % 3] + n * (step + 1), rtol=1e-5)


def test_a_graph_that_outgrows_the_memory_waits_for_queued_work(bench):
    small, large = sums(bench, [4, 8]), sums(bench, [4, 4096])
    expected = small[0].leafs[0].to_numpy() + 2
    with Scheduler([bench.gpu0, bench.cpu], keep_graphs=True) as sched:
        sched.alloc_graph(small[0])
        for x in small[1]:
            x.set_array(np.ones(x.ne[0]))
        sched.graph_compute_async(small[0])
        result = np.empty(8, np.float32)
        bench.gpu0.get_tensor_async(small[2], result)
        with observed() as seen:
            sched.alloc_graph(large[0])
        assert seen.of("synchronize")
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_two_streams_of_a_device_wait_for_each_other_between_graphs(bench):
    with bench.gpu0.device.init_backend() as twin, Scheduler([bench.gpu0, twin, bench.cpu]) as sched:
        for sizes in ([3, 48], [4, 8, 16]):
            graph, inputs, _ = sums(bench, sizes)
            with observed() as seen:
                sched.alloc_graph(graph)
            for x in inputs:
                x.set_array(np.ones(x.ne[0]))
            sched.graph_compute_async(graph)
        assert seen.of("synchronize")
