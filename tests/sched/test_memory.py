"""Memory of schedulers: it may run out, is reserved, reused only when nobody reads it, and given back."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.errors import AllocationError, FreedError, NotAllocatedError
from ggmlb.core.graph import Graph
from ggmlb.interface import BufferType
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.fake import FakeBackend, FakeBuffer, FakeDevice, FakeReg
from tests.support.chain import new_input


@pytest.mark.parametrize(("parallel", "most"), [(False, 2048), (True, 8192)])
def test_memory_that_runs_out_leaves_nothing_and_the_scheduler_works_on(bench, parallel, most):
    def used() -> list[tuple[int, int]]:
        return [(d.used, d.n_buffers) for d in bench.reg.devices]

    chain = bench.chain()
    start = used()
    refused = 0
    for spare0 in range(0, most, most // 8):
        for spare1 in range(0, most, most // 8):
            for device, spare, (taken, _) in zip(bench.reg.devices, (spare0, spare1), start, strict=True):
                device.capacity = taken + spare
            with Scheduler(bench.backends, parallel=parallel) as sched:
                try:
                    sched.alloc_graph(chain.graph)
                except AllocationError as error:
                    refused += 1
                    assert error.asked > error.free
                    assert used() == start
                    assert all(n.buffer is None for n in chain.graph.nodes)
                    assert sched.n_splits == 0
                small = Context()
                x = new_input(small, 2)
                graph = Graph().build_forward_expand(small.scale(x, 2.0))
                sched.alloc_graph(graph)
                x.set_array(np.array([1, 2]))
                sched.graph_compute(graph)
                np.testing.assert_array_equal(graph.nodes[0].to_numpy(), [2, 4])
            assert used() == start
    assert 0 < refused < 64, "some capacities must be too small and some enough, or nothing is tested"


def test_reserve_allocates_what_is_then_used(bench):
    chain = bench.chain()
    with Scheduler(bench.backends) as sched:
        sizes = sched.reserve_size(chain.graph)
        assert [d.n_buffers for d in bench.reg.devices] == [2, 2]  # the weights, nothing more
        sched.reserve(chain.graph)
        reserved = [sched.buffer_size(b) for b in sched.backends]
        assert reserved == sizes
        buffers = [d.n_buffers for d in bench.reg.devices]
        sched.alloc_graph(chain.graph)
        assert [sched.buffer_size(b) for b in sched.backends] == reserved
        assert [d.n_buffers for d in bench.reg.devices] == buffers


class SharingDevice(FakeDevice):
    """A fake GPU that works in host memory, late as ever."""

    def supports_buft(self, buft: BufferType) -> bool:
        return buft.is_host or super().supports_buft(buft)


def test_a_device_that_works_in_host_memory_is_waited_for_before_the_memory_is_reused(bench):
    # A GPU split reads host memory in place; the CPU split after it has no inputs, and the allocator
    # gives it the memory that the GPU still reads.
    reg = FakeReg(1)
    gpu = bench.stack.enter_context(SharingDevice(reg, 0, None, 1 << 20).init_backend())
    assert isinstance(gpu, FakeBackend)
    ctx = Context()
    x = new_input(ctx, 64)
    a = ctx.set_name(ctx.sqr(x), "a")  # CPU
    b = ctx.set_output(ctx.set_name(ctx.add(a, bench.weight(bench.cpu, 64)), "b"))  # GPU, reads a in place
    c = ctx.set_name(ctx.sqr(bench.weight(bench.cpu, 64, name="v")), "c")  # CPU, may take the memory of a
    d = ctx.set_output(ctx.scale(c, 2.0))
    graph = Graph().build_forward_expand(b, d)
    with Scheduler([gpu, bench.cpu]) as sched:
        for node, backend in ((a, bench.cpu), (b, gpu), (c, bench.cpu), (d, bench.cpu)):
            sched.set_tensor_backend(node, backend)
        for _ in range(2):
            sched.alloc_graph(graph)
            assert [s.backend for s in sched.splits] == [bench.cpu, gpu, bench.cpu]
            x.set_array(np.arange(64))
            sched.graph_compute_async(graph)
            sched.graph_compute(graph)
            np.testing.assert_allclose(b.to_numpy(), np.arange(64.0) ** 2 + b.src[1].to_numpy(), rtol=1e-6)


@pytest.mark.parametrize("read", ["the result", "the memory"])
def test_what_a_device_computes_in_host_memory_is_awaited_before_another_uploads_it(bench, read):
    reg = FakeReg(1)
    sharing = bench.stack.enter_context(SharingDevice(reg, 0, None, 1 << 20).init_backend())
    ctx = Context()
    x = new_input(ctx, 64)
    cache = bench.weight(bench.cpu, 64, name="a")
    a = ctx.cpy(ctx.sqr(x), cache)  # late, into host memory
    b = ctx.set_output(ctx.mul(bench.weight(bench.gpu0, 64), a if read == "the result" else cache))
    graph = Graph().build_forward_expand(a, b)
    with Scheduler([sharing, bench.gpu0, bench.cpu]) as sched:
        for node in graph.nodes:
            sched.set_tensor_backend(node, bench.gpu0 if node is b else sharing)
        sched.alloc_graph(graph)
        assert [s.backend for s in sched.splits] == [sharing, bench.gpu0]
        x.set_array(np.arange(64))
        sched.graph_compute(graph)
        np.testing.assert_allclose(b.to_numpy(), np.arange(64.0) ** 2 * b.src[0].to_numpy(), rtol=1e-6)


def test_freed_schedulers_and_leaks(bench):
    chain = bench.chain()
    sched = Scheduler(bench.backends)
    sched.alloc_graph(chain.graph)
    before = [d.n_buffers for d in bench.reg.devices]
    sched.free()
    assert [d.n_buffers for d in bench.reg.devices] == [n - 1 for n in before]
    for call in (sched.free, sched.synchronize, lambda: sched.graph_compute(chain.graph)):
        with pytest.raises(FreedError, match="this Scheduler was freed"):
            call()
    with pytest.raises(NotAllocatedError):
        chain.y.to_numpy()


def test_a_dropped_graph_is_collected(bench):
    ctx = Context()
    graph = Graph().build_forward_expand(ctx.scale(new_input(ctx, 4), 2.0))
    other = Graph().build_forward_expand(ctx.scale(new_input(ctx, 4), 2.0))
    ref = weakref.ref(graph)
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(graph)
        graph.leafs[0].set_array(np.ones(4))
        sched.graph_compute(graph)
        sched.alloc_graph(other)
        del graph
        gc.collect()
        assert ref() is None


def test_memory_prepares_copies_like_other_tensors(bench, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(FakeBuffer, "_init_tensor", lambda buffer, tensor: seen.append(tensor.name))
    chain = bench.chain()
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(chain.graph)
        copies = [item.copy.name for split in sched.splits for item in split.inputs]
        assert copies
        assert {*copies} <= {*seen}
        seen.clear()
        chain.x.set_array(np.ones((3, 8)))
        sched.graph_compute(chain.graph)
        assert seen == []
