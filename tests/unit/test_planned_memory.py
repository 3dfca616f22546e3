"""Planned memory: buffers with the sizes that loading allocates, and no memory."""

from __future__ import annotations

import tracemalloc
from threading import Thread

import numpy as np
import pytest

import ggmlb
from ggmlb import BackendError, Buffer, BufferType, Context, DType, Graph, Scheduler
from ggmlb.interface.planned import is_planning
from ggmlb.parallel.row_split.memory import split_buffer_type

GIB = 1 << 30


def buffer_types() -> dict[str, BufferType]:
    """The memories of the devices here, and those made of others."""
    found: dict[str, BufferType] = {}
    for device in ggmlb.devices():
        memories = (device.buffer_type, device.host_buffer_type, *device.extra_bufts)
        found |= {m.name: m for m in memories if m is not None}
    gpus = [d for d in ggmlb.devices() if d.name.startswith("OpenCL")][:2]
    if len(gpus) == 2:
        halves = ggmlb.meta_device(gpus, lambda w: ggmlb.split_evenly(1, w.ne[1], 2)).buffer_type
        found["meta"] = halves
        found["rows"] = split_buffer_type(gpus[0].reg, 0, [3, 1])
    return found


def sizes(buffer: Buffer) -> list[tuple[str, int]]:
    return [(each.name, each.size) for each in buffer.allocations]


def context(*n_rows: int) -> Context:
    ctx = Context()
    for i, n in enumerate(n_rows):
        ctx.new_tensor((DType.F32, DType.Q8_0, DType.Q4_0)[i % 3], (256, n), f"w{i}")
    return ctx


@pytest.mark.parametrize("buft", buffer_types().values(), ids=buffer_types())
def test_sizes_are_those_that_are_allocated(buft: BufferType) -> None:
    free = buft.device.memory[0] if buft.device.name.startswith("OpenCL") else None
    with ggmlb.planned_memory(), ggmlb.alloc_ctx_tensors(context(64, 128, 192), buft) as planned:
        assert free is None or buft.device.memory[0] == free
        assert planned.is_planned and all(each.is_planned for each in planned.allocations)
        expected = sizes(planned)
    with ggmlb.alloc_ctx_tensors(context(64, 128, 192), buft) as real:
        assert not real.is_planned
        assert expected == sizes(real) and sum(n for _, n in sizes(real)) >= 64 * 256 * 4


def test_nothing_is_reserved_and_nothing_can_be_read() -> None:
    ctx = context(1 << 25, 3)  # 32 GiB
    tracemalloc.start()
    with ggmlb.planned_memory(), ggmlb.alloc_ctx_tensors(ctx, ggmlb.cpu_buffer_type()) as buffer:
        assert buffer.size > 32 * GIB
        buffer.clear(0)
        for call in (ctx.tensors[1].get, ctx.tensors[1].to_numpy, lambda: ctx.tensors[1].memset(0)):
            with pytest.raises(BackendError, match=r"allocated within planned_memory, and has no memory"):
                call()
        with pytest.raises(BackendError, match="set_tensor"):
            ctx.tensors[1].set(np.zeros(ctx.tensors[1].nbytes, np.uint8))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_it_ends_with_the_context_and_is_for_one_thread() -> None:
    answers = []
    with ggmlb.planned_memory():
        with ggmlb.planned_memory():
            pass
        assert is_planning()
        thread = Thread(target=lambda: answers.append(is_planning()))
        thread.start()
        thread.join()
    with pytest.raises(ZeroDivisionError), ggmlb.planned_memory():
        _ = 1 / 0
    assert answers == [False] and not is_planning()


@pytest.mark.filterwarnings("ignore:.*it falls back to another device")
@pytest.mark.parametrize("device", [d.name for d in ggmlb.devices()])
def test_a_scheduler_reserves_as_much_as_it_planned(device: str) -> None:
    """Weights that only some ops can read there are planned as they will be, too."""
    found = []
    for plans in (True, False):
        with ggmlb.init_by_name(device) as stream, ggmlb.init_by_name("CPU") as cpu:
            streams = [stream] if device == "CPU" else [stream, cpu]
            if plans:
                with ggmlb.planned_memory():
                    found.append(_reserved(streams))
            else:
                found.append(_reserved(streams))
    assert found[0] == found[1]


def _reserved(streams: list[ggmlb.Backend]) -> list[list[int]]:
    ctx, moved = Context(), Context()
    table = ctx.new_tensor(DType.Q4_0, (256, 512), "table")
    w = moved.new_tensor(DType.Q4_0, (256, 512), "w")
    extra = streams[0].device.extra_bufts
    buffers = [ggmlb.alloc_ctx_tensors(ctx, streams[-1])]
    buffers.append(ggmlb.alloc_ctx_tensors(moved, extra[0] if extra else streams[0]))
    for buffer in buffers:
        buffer.usage = ggmlb.BufferUsage.WEIGHTS
    graphs = Context()
    ids = graphs.set_input(graphs.new_tensor(DType.I32, (99,)))
    x = graphs.get_rows(table, ids)
    y = graphs.mul_mat(w, x)
    if len(streams) > 1:
        y = graphs.add(y, graphs.mul_mat(w, graphs.get_rows(w, ids)))
    with Scheduler(streams) as scheduler:
        scheduler.reserve(Graph().build_forward_expand(y))
        reserved = [sum(b.size for b in scheduler.buffers), *(scheduler.buffer_size(b) for b in streams)]
    for buffer in buffers:
        buffer.free()
    return [reserved, [b.size for b in buffers]]
