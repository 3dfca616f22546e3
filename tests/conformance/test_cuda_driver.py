"""What `CupyDriver` asks of libcuda, beyond what computing shows; on cards of the tests'."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from ggmlb import BackendError, Context, DType, Graph, Scheduler, alloc_ctx_tensors, init_by_name
from ggmlb.backends.cuda import CudaReg
from ggmlb.system.process import process_state
from tests.support.gpus import host_driver, leaf

cu = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x").cuda.driver


@pytest.fixture
def driver() -> Any:
    return host_driver(n_devices=2)


@pytest.fixture
def reg(driver: Any) -> CudaReg:
    return CudaReg(driver)


def test_cards_that_cannot_reach_each_other_copy_by_way_of_the_host(
    driver: Any, reg: CudaReg, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever CUDA's reason: too many peers, no memory for the mapping."""
    monkeypatch.setenv("GGMLB_CUDA_P2P", "1")
    driver.cards.fail.add("peer")
    first, second = (device.init_backend() for device in reg.devices)
    src, dst = leaf(first), leaf(second)
    src.set(np.ones(1000, np.float32))
    with pytest.warns(RuntimeWarning, match="between CUDA0 and CUDA1 CUDA offers no direct copies"):
        assert second.cpy_tensor_async(first, src, dst)
    second.synchronize()
    assert (dst.to_numpy() == 1).all() and not driver.cards.enabled


def test_a_program_that_uses_one_card_makes_a_context_on_no_other(driver: Any, reg: CudaReg) -> None:
    """Not even where it stops using it; and the other may be another process's for itself."""
    driver.cards.exclusive.add(0)
    device = reg.devices[1]
    with device.init_backend() as stream, init_by_name("CPU") as cpu, Scheduler([stream, cpu]) as scheduler:
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (64, 3)))
        y = ctx.relu(ctx.scale(x, 2.0))
        z = ctx.scale(y, 3.0)
        scheduler.set_tensor_backend(z, cpu)
        graph = Graph().build_forward_expand(z)
        scheduler.alloc_graph(graph)
        for i in range(4):
            x.set_array(np.full((3, 64), i))
            scheduler.graph_compute(graph)
            assert (z.to_numpy() == 6 * i).all()
        event = device.event_new()
        stream.event_record(event)
        event.synchronize()
        assert y.as_array() is not None
        register: Any = reg.get_proc_address("register_host_buffer")
        assert register(np.zeros(4096, np.uint8))
        del ctx, x, y, z, graph
    gc.collect()
    assert all(device.description and device.memory for device in reg.devices[1:])
    assert driver.cards.contexts == {1}
    with pytest.raises(BackendError, match="open a stream on CUDA0: "):
        reg.devices[0].init_backend()


def test_a_forked_process_frees_no_page_locked_memory(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = driver.pinned(64), driver.pinned(64)
    monkeypatch.setattr(process_state, "n_forks", process_state.n_forks + 1)
    del first
    assert len(driver.cards._pinned) == 2
    monkeypatch.undo()
    del second
    assert len(driver.cards._pinned) == 1


def test_kernels_with_much_shared_memory_are_given_all_of_it(driver: Any, reg: CudaReg) -> None:
    ctx, stream = Context(), reg.devices[0].init_backend()
    w, x = ctx.new_tensor(DType.Q4_0, (256, 8)), ctx.new_tensor(DType.F32, (256, 1))
    y, z = ctx.sqr(ctx.mul_mat(w, x)), ctx.mul_mat(w, ctx.new_tensor(DType.F32, (256, 9)))
    alloc_ctx_tensors(ctx, stream)
    stream.graph_compute(Graph().build_forward_expand(y, z))
    carve_out = cu.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    most = "mul_mat_mma", cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    given = driver.cards.attributes
    assert given.pop(most) > 40_000
    assert given == {("mul_mat_mma", carve_out): 100, ("mul_mat_q8", carve_out): 100}


def test_as_many_blocks_are_launched_as_the_driver_says_run_at_once(
    driver: Any, reg: CudaReg, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two multiprocessors with room for four blocks of this kernel each, where rows would make 32."""
    seen, launch = [], driver.cards.cuLaunchKernel
    monkeypatch.setattr(
        driver.cards, "cuLaunchKernel", lambda f, x, *rest: seen.append(x) or launch(f, x, *rest)
    )
    ctx, stream = Context(), reg.devices[0].init_backend()
    y = ctx.mul_mat(ctx.new_tensor(DType.Q4_0, (256, 512)), ctx.new_tensor(DType.F32, (256, 1)))
    alloc_ctx_tensors(ctx, stream)
    stream.graph_compute(Graph().build_forward_expand(y))
    assert seen == [8]


def test_after_an_error_of_nccl_the_next_sum_works(driver: Any, reg: CudaReg) -> None:
    """The group of the calls that failed is closed: it would take in all that come later."""
    streams = [device.init_backend() for device in reg.devices]
    tensors = [leaf(stream) for stream in streams]
    connect, add = (reg.get_proc_address(f"comm_{name}") for name in ("init", "allreduce_tensor"))
    assert connect is not None and add is not None
    comm = connect(streams)
    for i, t in enumerate(tensors, 1):
        t.set_array(np.full(1000, i))
    driver.cards.fail.add("sum")
    with pytest.raises(
        BackendError, match="NCCL's all-reduce of 1,000 f32 elements failed: unhandled system"
    ):
        add(comm, tensors)
    driver.cards.fail.clear()
    add(comm, tensors)
    for stream in streams:
        stream.synchronize()
    assert [t.to_numpy()[0] for t in tensors] == [3, 3]
