"""Pipelines: computations queued one after another, that use copies by turns and do not wait."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import TensorFlag
from ggmlb.core.errors import ArgumentError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.fake import FakeReg

N_BATCHES, WIDTH = 16, 8


class Layers:
    """Four layers, one after another, on the given backends; `build` makes the graph of one micro-batch."""

    def __init__(self, bench, where: list[Backend]) -> None:
        self.where = where
        self.weights = [bench.weight(b, WIDTH, WIDTH, name=f"w{i}") for i, b in enumerate(where)]

    def build(self, sched: Scheduler | None = None) -> tuple[Graph, Tensor, Tensor]:
        c = Context()
        x = y = c.set_input(c.new_tensor(DType.F32, (WIDTH, 3), name="x"))
        for i, (w, backend) in enumerate(zip(self.weights, self.where, strict=True)):
            product = c.mul_mat(w, y)
            y = c.set_name(c.silu(product), f"y{i}")
            if sched is not None:
                for node in (product, y):
                    sched.set_tensor_backend(node, backend)
        return Graph().build_forward_expand(c.set_output(y)), x, y


def batches() -> list[np.ndarray]:
    return list(np.random.default_rng(1).standard_normal((N_BATCHES, 3, WIDTH)).astype(np.float32))


def one_by_one(bench, layers: Layers) -> list[np.ndarray]:
    """What each micro-batch gives if nothing else runs."""
    graph, x, y = layers.build()
    results = []
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(graph)
        for batch in batches():
            x.set_array(batch)
            sched.graph_compute(graph)
            results.append(y.to_numpy())
    return results


def pipelined(sched: Scheduler, layers: Layers, *, rebuild: bool, request: bool = False) -> list[np.ndarray]:
    """Queue all micro-batches, overwriting each input at once; wait at the end."""
    results = [np.zeros((3, WIDTH), np.float32) for _ in range(N_BATCHES)]
    graph, x, y = layers.build(sched if request else None)
    sched.alloc_graph(graph)
    for batch, result in zip(batches(), results, strict=True):
        if rebuild:
            graph, x, y = layers.build(sched if request else None)
            sched.alloc_graph(graph)
        x.set_array(batch)
        sched.graph_compute_async(graph)
        x.set_array(np.full((3, WIDTH), 99.0))
        last = sched.get_tensor_backend(y)
        assert last is not None
        last.get_tensor_async(y, result)
    sched.synchronize()
    return results


@pytest.mark.parametrize("n_copies", [1, 2, 4])
@pytest.mark.parametrize("async_copies", [True, False])
@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("rebuild", [True, False])
def test_each_micro_batch_gives_its_bits(make_bench, n_copies, async_copies, events, rebuild):
    bench = make_bench(FakeReg(2, async_copies=async_copies, events=events))
    layers = Layers(bench, [bench.gpu0, bench.gpu1] * 2)
    expected = one_by_one(bench, layers)
    with Scheduler(bench.backends, parallel=True, n_copies=n_copies) as sched:
        assert sched.n_copies == n_copies
        for _ in range(2):
            results = pipelined(sched, layers, rebuild=rebuild)
            assert all(map(np.array_equal, results, expected))


def test_nothing_runs_before_somebody_waits(bench):
    # The fakes run only what is waited for: any wait of the host would show as work that has run.
    layers = Layers(bench, [bench.gpu0, bench.gpu1] * 2)
    with Scheduler(bench.backends, parallel=True) as sched:
        graph, x, _ = layers.build()
        sched.alloc_graph(graph)
        bench.reg.calls.clear()
        for batch in batches():
            x.set_array(batch)
            sched.graph_compute_async(graph)
            graph, x, _ = layers.build()
            sched.alloc_graph(graph)
        assert bench.reg.calls == []
        sched.synchronize()
        assert sum("computes" in call for call in bench.reg.calls) == 4 * N_BATCHES


def computed_without_the_second(bench, *, parallel: bool) -> list[str]:
    """Queue five micro-batches, let the first device go on alone; return who computed, in order."""
    layers = Layers(bench, [bench.gpu0, bench.gpu0, bench.gpu1, bench.gpu1])
    with Scheduler(bench.backends, parallel=parallel) as sched:
        graph, x, _ = layers.build()
        sched.alloc_graph(graph)
        for batch in batches()[:5]:
            x.set_array(batch)
            sched.graph_compute_async(graph)
        bench.reg.calls.clear()
        bench.gpu0.run_until(bench.gpu0.n_queued)
        return [call.split()[0] for call in bench.reg.calls if "computes" in call]


def test_a_device_goes_on_while_the_next_one_still_computes(bench):
    # Four batches have copies of their own; what the fifth sends waits for the first to have been read.
    assert computed_without_the_second(bench, parallel=True) == ["Fake0"] * 5 + ["Fake1"]


def test_with_one_copy_the_first_device_waits_for_the_second(bench):
    # The instrument of the test above.
    assert computed_without_the_second(bench, parallel=False).count("Fake1") >= 4


def test_two_streams_of_one_device(bench):
    second = bench.stack.enter_context(bench.gpu0.device.init_backend())
    layers = Layers(bench, [bench.gpu0, bench.gpu0, second, second])
    expected = one_by_one(bench, layers)
    with Scheduler([bench.gpu0, second, bench.cpu], parallel=True) as sched:
        assert all(map(np.array_equal, pipelined(sched, layers, rebuild=True, request=True), expected))
        assert [s.backend for s in sched.splits] == [bench.gpu0, second]
        assert len(sched.splits[1].inputs[0].copies) == 4
        assert sched.splits[1].after == ()


def test_streams_that_write_a_cache_of_the_users_wait_for_each_other(bench):
    second = bench.stack.enter_context(bench.gpu0.device.init_backend())
    cache = bench.weight(bench.gpu0, WIDTH, 3, name="cache")
    with Scheduler([bench.gpu0, second, bench.cpu], parallel=True) as sched:
        results = [np.zeros((3, WIDTH), np.float32) for _ in range(N_BATCHES)]
        for i, result in enumerate(results):
            c = Context()
            x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 3), name="x"))
            written = c.cpy(c.scale(x, 2.0), cache)
            y = c.set_output(c.scale(cache, 3.0))  # reads what the first stream writes
            graph = Graph().build_forward_expand(written, y)
            for node, stream in zip(graph.nodes, (bench.gpu0, bench.gpu0, second), strict=True):
                sched.set_tensor_backend(node, stream)
            sched.alloc_graph(graph)
            x.set_array(np.full((3, WIDTH), i))
            sched.graph_compute_async(graph)
            second.get_tensor_async(y, result)
        sched.synchronize()
        assert [r[0, 0] for r in results] == [6.0 * i for i in range(N_BATCHES)]


def test_what_the_graph_writes_in_host_memory_is_uploaded_as_it_was(bench):
    cache = bench.weight(bench.cpu, WIDTH, 3, name="cache")  # marked as a weight, and written all the same
    with Scheduler(bench.backends) as sched:
        results = [np.zeros((3, WIDTH), np.float32) for _ in range(N_BATCHES)]
        c = Context()
        x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 3), name="x"))
        written = c.cpy(c.scale(x, 2.0), cache)
        y = c.set_output(c.mul(bench.weight(bench.gpu0, WIDTH, 3), cache))
        graph = Graph().build_forward_expand(written, y)
        sched.set_tensor_backend(y, bench.gpu0)
        sched.alloc_graph(graph)
        for i, result in enumerate(results):
            x.set_array(np.full((3, WIDTH), i))
            sched.graph_compute_async(graph)
            bench.gpu0.get_tensor_async(y, result)
        sched.synchronize()
        assert [r[0, 0] for r in results] == [2.0 * i * y.src[0].to_numpy()[0, 0] for i in range(N_BATCHES)]


def test_copies_are_kept_apart_and_nothing_is_copied_more_often_than_it_must(bench):
    layers = Layers(bench, [bench.gpu0, bench.gpu0, bench.gpu1, bench.gpu1])
    with Scheduler(bench.backends, parallel=True) as sched:
        graph, _, _ = layers.build()
        sizes = sched.reserve_size(graph)
        sched.alloc_graph(graph)
        assert [sched.buffer_size(b) for b in sched.backends] == sizes
        from_host, sent = (s.inputs[0] for s in sched.splits)
        assert len(from_host.copies) == 1  # queued on the device that reads it, in the order of its work
        places = {(c.buffer, c.offset) for c in sent.copies}
        assert len(places) == 4
        taken = {(t.buffer, t.offset) for t in sched.splits[1].nodes}
        assert not places & taken
        assert not sent.tensor.flags & TensorFlag.INPUT  # the user's tensor is as it was


def test_another_topology_takes_over_memory_that_is_still_in_use(bench):
    weights = [bench.weight(b, WIDTH, WIDTH) for b in (bench.gpu0, bench.gpu1)]

    def build(n: int, depth: int) -> tuple[Graph, Tensor, Tensor]:
        c = Context()
        x = c.set_input(c.new_tensor(DType.F32, (WIDTH, n)))
        y = c.mul_mat(weights[1], c.silu(c.mul_mat(weights[0], x)))
        for _ in range(depth):
            y = c.silu(y)
        return Graph().build_forward_expand(c.set_output(y)), x, y

    def compute(sched: Scheduler, *, wait: bool) -> list[np.ndarray]:
        results = []
        # What is sent for one lies where the other computes; the second time, all are known.
        for depth, n in [*enumerate((3, 32, 3, 96, 32))] * 2:
            graph, x, y = build(n, depth)
            if depth % 2:
                sched.split_graph(graph)  # to look at it makes no difference
            sched.alloc_graph(graph)
            x.set_array(np.random.default_rng(n).standard_normal((n, WIDTH)))
            sched.graph_compute_async(graph)
            results.append(np.zeros((n, WIDTH), np.float32))
            bench.gpu1.get_tensor_async(y, results[-1])
            if wait:
                sched.synchronize()
        sched.synchronize()
        return results

    with Scheduler(bench.backends) as plain, Scheduler(bench.backends, parallel=True) as sched:
        sched.reserve(build(96, 9)[0])
        assert all(map(np.array_equal, compute(sched, wait=False), compute(plain, wait=True)))


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("events", [False, True])
def test_devices_without_the_cpu_run_ahead(make_bench, n_devices, parallel, rebuild, events):
    bench = make_bench(FakeReg(2, events=events))
    backends = [bench.gpu0, bench.gpu1][:n_devices]
    layers = Layers(bench, sorted(backends * (4 // n_devices), key=lambda b: b.name))
    expected = one_by_one(bench, layers)
    with Scheduler(backends, parallel=parallel) as sched:
        assert all(map(np.array_equal, pipelined(sched, layers, rebuild=rebuild), expected))
        graph, x, _ = layers.build()
        sched.alloc_graph(graph)
        bench.reg.calls.clear()
        for batch in batches():
            x.set_array(batch)
            sched.graph_compute_async(graph)
            x.set_array(np.full((3, WIDTH), 99.0))
        if n_devices == 1 or events:  # else one device waits for the other
            assert bench.reg.calls == []
        sched.synchronize()
        assert sum("computes" in call for call in bench.reg.calls) == n_devices * N_BATCHES


@pytest.mark.parametrize("use", ["view", "view of a view", "output", "nothing else"])
def test_an_input_of_one_device_in_other_roles(bench, use):
    c = Context()
    x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 4), name="x"))
    read = x
    if use.startswith("view"):
        read = c.view_2d(x, WIDTH, 2, x.nb[1], x.nb[1])
    if use == "view of a view":
        read = c.reshape_1d(read, 2 * WIDTH)
    if use == "output":
        c.set_output(x)
    y = c.set_output(c.add(c.sqr(read), read))
    graph = Graph().build_forward_expand(x, read, y)
    with Scheduler([bench.gpu0]) as sched:
        sched.alloc_graph(graph)
        assert sched.get_tensor_backend(x) is bench.gpu0
        bench.reg.calls.clear()
        results = [np.zeros(y.shape, np.float32) for _ in range(N_BATCHES)]
        for i, result in enumerate(results):
            x.set_array(np.full((4, WIDTH), i))
            sched.graph_compute_async(graph)
            bench.gpu0.get_tensor_async(y, result)
        assert bench.reg.calls == []
        assert (x.to_numpy() == N_BATCHES - 1).all()
        sched.synchronize()
        assert [r.flat[0] for r in results] == [i * i + i for i in range(N_BATCHES)]
        sched.graph_compute(graph)  # inputs keep their data
        assert (y.to_numpy() == results[-1]).all()
        assert sched.reserve_size(graph) == [sched.buffer_size(bench.gpu0)]


@pytest.mark.parametrize("why", ["asked for", "placed", "written"])
def test_an_input_that_is_read_in_memory_of_the_device_is_waited_for(bench, why):
    c, own = Context(), Context()
    x = (own if why == "placed" else c).new_tensor(DType.F32, (WIDTH, 4), name="x")
    c.set_input(x)
    if why == "placed":
        bench.stack.enter_context(alloc_ctx_tensors(own, bench.gpu0))
    y = c.scale(x, 2.0)
    graph = Graph().build_forward_expand(c.set_output(y))
    if why == "written":
        graph.build_forward_expand(c.scale_inplace(x, 10.0))
    with Scheduler([bench.gpu0]) as sched:
        if why == "asked for":
            sched.set_tensor_backend(x, bench.gpu0)
        sched.alloc_graph(graph)
        assert x.buffer is not None
        assert x.buffer.buft is bench.gpu0.default_buffer_type
        for i in range(4):
            x.set_array(np.full((4, WIDTH), i))
            sched.graph_compute_async(graph)
            x.set_array(np.full((4, WIDTH), 99.0))
            assert (y.to_numpy() == 2 * i).all()


def test_no_copies_is_an_error(bench):
    with pytest.raises(ArgumentError, match="n_copies is 0"):
        Scheduler(bench.backends, parallel=True, n_copies=0)


@pytest.mark.parametrize("n_copies", [1, 4])
def test_inputs_that_no_node_reads_have_a_place(bench, n_copies):
    """Batches of tokens and of embeddings list the inputs of both: each can be set, and no memory moves."""
    w = bench.weight(bench.gpu0, WIDTH, WIDTH)

    def build(which: int) -> tuple[Graph, list[Tensor], Tensor]:
        c = Context()
        xs = [c.set_input(c.new_tensor(DType.F32, (WIDTH, n), name=f"x{n}")) for n in (3, 5)]
        y = c.set_output(c.mul_mat(w, xs[which]))
        return Graph().build_forward_expand(*xs, y), xs, y

    rng = np.random.default_rng(2)
    with Scheduler(bench.backends, parallel=n_copies > 1, n_copies=n_copies) as sched:
        for which in (0, 1):  # the largest of both is planned
            sched.reserve(build(which)[0])
        n_before = sched._allocator.n_reallocs
        for which in (0, 1, 0, 1):
            graph, xs, y = build(which)
            sched.alloc_graph(graph)
            values = [rng.standard_normal(x.shape).astype("f4") for x in xs]
            for x, value in zip(xs, values, strict=True):
                x.set_array(value)
            sched.graph_compute(graph)
            np.testing.assert_allclose(y.to_numpy(), values[which] @ w.to_numpy().T, rtol=1e-4, atol=1e-5)
        assert sched._allocator.n_reallocs == n_before
