"""What the simulated driver cannot tell: that CUDA does what `CupyDriver` expects. Read this first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.device import CudaDevice
from ggmlb.backends.cuda.driver import CopyKind, address_of
from ggmlb.backends.cuda.plan import CudaPlan
from ggmlb.core.tensor import Tensor
from tests.support.gpus import hold_up, is_reached


def chain(backend: CudaBackend, n: int = 1000, factor: float = 2.0) -> tuple[Tensor, Tensor, Graph]:
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (n,), "a")
    y = ctx.add(ctx.relu(ctx.scale(a, factor)), a)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)


def test_facts(card: CudaDevice) -> None:
    print("\n", card.description, card.device_id, card.facts)
    assert card.facts.n_units > 0
    assert card.has_blas, "cuBLAS cannot be loaded: products run on kernels only"


def test_memory_copies_and_fills(card: CudaDevice) -> None:
    driver, data = card.driver, np.arange(1000, dtype=np.float32)
    out = np.zeros_like(data)
    with card.on():
        stream, address = driver.stream_new(), driver.malloc(8000)
        driver.copy(address, address_of(data), 4000, CopyKind.TO_DEVICE, stream)
        driver.copy(address + 4000, address, 4000, CopyKind.ON_DEVICE, stream)
        driver.fill(address + 4000, 0, 40, stream)
        driver.copy(address_of(out), address + 4000, 4000, CopyKind.TO_HOST, stream)
        driver.stream_synchronize(stream)
        driver.free(address)
        driver.stream_free(stream)
    assert np.array_equal(out, np.where(np.arange(1000) < 10, 0, data))


def test_an_array_over_a_buffer_is_its_memory(card: CudaDevice, stream: CudaBackend) -> None:
    a, _, _ = chain(stream)
    assert a.buffer is not None
    view = card.driver.view(a.buffer.base, (10, 10), np.dtype(np.float32), a.offset + 8, (40, 4))
    a.set(np.arange(1000, dtype=np.float32))
    assert np.array_equal(view.get(), np.arange(2, 102).reshape(10, 10))
    assert a.buffer.base.data.ptr == a.buffer.address


def test_a_new_thread_computes(stream: CudaBackend) -> None:
    a, y, graph = chain(stream)
    a.set(np.ones(1000, np.float32))
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                stream.graph_compute(graph)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert y.to_numpy()[0] == 3


def test_two_streams_overlap(card: CudaDevice, stream: CudaBackend, other: CudaBackend) -> None:
    driver = card.driver
    hold_up(stream, 1), hold_up(other, 1)  # compiles
    stream.synchronize(), other.synchronize()
    with card.on():
        marks = {b: (driver.event_new(timed=True), driver.event_new(timed=True)) for b in (stream, other)}
        for backend, (start, end) in marks.items():
            driver.event_record(start, backend.stream.handle)
            hold_up(backend, 50)
            driver.event_record(end, backend.stream.handle)
        stream.synchronize(), other.synchronize()
        (a0, a1), (b0, b1) = marks.values()
        length, gap = driver.event_elapsed(a0, a1), driver.event_elapsed(a0, b0)
        print(f"\nfirst ran {length * 1e3:.1f} ms; the second began {gap * 1e3:.2f} ms after it")
        assert gap < length, "the second stream began only when the first was done"
        for event in (a0, a1, b0, b1):
            driver.event_free(event)


def test_transfers_from_pinned_memory_do_not_wait(card: CudaDevice, stream: CudaBackend) -> None:
    ctx = Context()
    t = ctx.new_tensor(DType.F32, (1 << 22,))
    alloc_ctx_tensors(ctx, stream)
    with card.host_buffer_type.alloc_buffer(t.nbytes) as buffer:
        assert getattr(buffer, "why_not_pinned", "") is None
        buffer.base[...] = 3
        hold_up(stream, 200)
        stream.set_tensor_async(t, buffer.base)
        event = card.event_new()
        stream.event_record(event)
        assert not is_reached(card, event.handle), "the copy was waited for"
        stream.synchronize()
        assert is_reached(card, event.handle)
        assert (t.get() == 3).all()


def test_unordered_use_of_a_slow_stream_would_show(stream: CudaBackend, other: CudaBackend) -> None:
    """The stick that the tests of order measure with: without an event, the second stream runs ahead."""
    a, _, _ = chain(stream)
    a.memset(0)
    host = stream.device.host_buffer_type.alloc_buffer(4000)  # a read into other memory waits for all streams
    out = np.asarray(host.base).view(np.float32)
    out[:] = 0
    hold_up(stream, 200)
    stream.set_tensor_async(a, np.ones(1000, np.float32))
    other.get_tensor_async(a, out)
    other.synchronize()
    assert not out.any()
    stream.synchronize()


@pytest.mark.parametrize("weights", [DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0, DType.Q6_K])
@pytest.mark.parametrize("n", [1, 5, 33, 300])
def test_products_of_real_sizes(stream: CudaBackend, weights: DType, n: int) -> None:
    rng = np.random.default_rng(n)
    ctx = Context()
    w = ctx.new_tensor(weights, (1024, 768, 1, 2))
    x = ctx.new_tensor(DType.F32, (1024, n, 3, 2))
    y = ctx.mul_mat(w, x)
    alloc_ctx_tensors(ctx, stream)
    w.set_array(rng.standard_normal((2, 1, 768, 1024), np.float32))
    data = rng.standard_normal((2, 3, n, 1024), np.float32)
    x.set(data)
    plan = stream.graph_plan_create(Graph().build_forward_expand(y))
    assert isinstance(plan, CudaPlan)
    want = data.astype(np.float64) @ w.to_numpy().astype(np.float64).reshape(2, 1, 768, 1024).swapaxes(-1, -2)
    for i in range(3):
        y.memset(0xFF)
        stream.graph_plan_compute(plan)
        stream.synchronize()
        error = np.linalg.norm(y.to_numpy().reshape(want.shape) - want) / np.linalg.norm(want)
        assert error < 1e-2, f"run {i}"
    assert all(segment.why_not is None for segment in plan.segments)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 4096), (7, 515), (256, 256)])
@pytest.mark.parametrize("head", [64, 128])
def test_attention_of_real_sizes(stream: CudaBackend, n_queries: int, n_keys: int, head: int) -> None:
    rng = np.random.default_rng(head)
    ctx = Context()
    q = ctx.new_tensor(DType.F32, (head, n_queries, 8))
    k, v = (ctx.new_tensor(DType.F16, (head, n_keys, 2)) for _ in range(2))
    y = ctx.flash_attn_ext(q, k, v, None, head**-0.5, 0.0, 0.0)
    alloc_ctx_tensors(ctx, stream)
    arrays = [rng.standard_normal(t.shape, np.float32) for t in (q, k, v)]
    for t, data in zip((q, k, v), arrays, strict=True):
        t.set_array(data)
    qs, ks, vs = (t.to_numpy().astype(np.float64) for t in (q, k, v))
    ks, vs = ks.repeat(4, axis=0), vs.repeat(4, axis=0)
    scores = qs @ ks.swapaxes(-1, -2) * head**-0.5
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    want = (scores / scores.sum(-1, keepdims=True) @ vs).swapaxes(0, 1)
    plan = stream.graph_plan_create(Graph().build_forward_expand(y))
    for _ in range(3):
        y.memset(0xFF)
        stream.graph_plan_compute(plan)
        stream.synchronize()
        error = np.linalg.norm(y.to_numpy().reshape(want.shape) - want) / np.linalg.norm(want)
        assert error < 5e-3
