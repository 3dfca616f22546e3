"""Checks of buffers: sizes, lifetimes, and host memory."""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import AllocationError, ArgumentError, BackendError, FreedError
from ggmlb.core.graph import Graph
from ggmlb.interface import tensor_alloc, tensor_copy
from ggmlb.interface.registry import device_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.behaviour.rig import Rig, check, expect, expect_equal, expect_error, numbers, unsupported

N = 5000


@check("memory")
def facts_are_sound(rig: Rig) -> None:
    """The device's name, free memory, alignment and largest buffer are valid."""
    device, buft = rig.device, rig.device.buffer_type
    free, total = device.memory
    expect(bool(device.name) and bool(device.description), "the device has no name or description")
    expect(0 <= free <= total, f"{free} of {total} bytes are free")
    alignment = buft.alignment
    expect(
        alignment > 0 and alignment & (alignment - 1) == 0,
        f"the alignment is {alignment}, not a power of two",
    )
    expect(buft.max_size >= 1 << 20, f"the largest buffer has {buft.max_size} bytes")
    expect(device.supports_buft(buft), "the device cannot use its own memory")
    is_ours = buft.device is device or buft.is_host  # an accelerator may work in the CPU's memory
    expect(is_ours, f"the device's memory belongs to {buft.device.name}")
    caps = device.caps
    expect(
        caps.host_buffer == (device.host_buffer_type is not None), f"caps.host_buffer is {caps.host_buffer}"
    )


@check("memory")
def alignment_is_kept(rig: Rig) -> None:
    """Host-visible memory begins at the promised alignment."""
    for buft in (rig.device.buffer_type, rig.device.host_buffer_type):
        if buft is None or not buft.is_host:
            continue
        for size in (1, 1000, 1 << 16):
            address = rig.keep(buft.alloc_buffer(size)).base.ctypes.data
            expect(address % buft.alignment == 0, f"{buft.name} memory begins at {address:#x}")


@check("memory")
def views_need_no_alignment(rig: Rig) -> None:
    """Ops read and write views at any element of a tensor, aligned only to their elements."""
    for shift in (1, 3, 7):
        ctx = Context()
        a, b = ctx.new_tensor(DType.F32, (N + 8,), "a"), ctx.new_tensor(DType.F32, (N + 8,), "b")
        y = rig.double(ctx, ctx.view_1d(a, N, 4 * shift))
        into = ctx.cpy(y, ctx.view_1d(b, N, 4 * (8 - shift)))
        rig.keep(alloc_ctx_tensors(ctx, rig.stream))
        last = into if rig.device.supports_op(into) else y
        data = numbers(N + 8)
        a.set_array(data)
        b.set_array(np.full(N + 8, -1, np.float32))
        rig.stream.graph_compute(Graph().build_forward_expand(last))
        right = 2 * data[shift : shift + N]
        expect_equal(y.to_numpy(), right, f"2 x of a view that begins at element {shift}")
        if last is into:
            whole = np.full(N + 8, -1, np.float32)
            whole[8 - shift : 8 - shift + N] = right
            expect_equal(
                b.to_numpy(), whole, f"a tensor after a copy into a view of it, at element {8 - shift}"
            )


@check("memory")
def too_much_is_an_allocation_error(rig: Rig) -> None:
    """Too large an allocation raises `AllocationError`; afterwards the device works as before."""
    buft = rig.device.buffer_type
    absurd = 1 << 60
    expect_error(AllocationError, lambda: buft.alloc_buffer(absurd), f"a buffer of {absurd} bytes")
    if buft.max_size < sys.maxsize:
        beyond = buft.max_size + 1
        expect_error(AllocationError, lambda: buft.alloc_buffer(beyond), f"max_size + 1, {beyond} bytes")
    work = rig.doubling()
    work.x.set_array(numbers(1000))
    rig.stream.graph_compute(work.graph)
    expect_equal(work.y.to_numpy(), 2 * numbers(1000), "a graph after allocations that failed")


@check("memory")
def empty_buffers_and_tensors(rig: Rig) -> None:
    """Buffers and tensors of size 0 can be created, transferred, computed and freed."""
    buffer = rig.stream.alloc_buffer(0)
    expect(buffer.size >= 0, f"a buffer of 0 bytes has {buffer.size}")
    buffer.clear(1)
    empty = Context().new_tensor(DType.F32, (0, 3), "empty")
    tensor_alloc(buffer, empty, 0)
    empty.set(b"")
    expect_equal(empty.get(), np.empty(0, np.uint8), "the bytes of an empty tensor")
    empty.memset(0)
    with suppress(ArgumentError):  # some memory cannot be viewed as an array
        expect(empty.as_array().size == 0, "an empty tensor as an array must have no elements")
    other = rig.tensor(DType.F32, 0, 3)
    tensor_copy(empty, other)
    rig.stream.set_tensor_async(empty, b"")
    rig.stream.get_tensor_async(empty, np.empty(0, np.uint8))
    rig.stream.synchronize()
    buffer.free()
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (0,), "x")
    y = rig.double(ctx, x)
    rig.keep(alloc_ctx_tensors(ctx, rig.stream))
    rig.stream.graph_compute(Graph().build_forward_expand(y))
    expect_equal(y.to_numpy().size, 0, "elements of 2 x, of an empty x")


@check("memory")
def usage_and_reset(rig: Rig) -> None:
    """A buffer's usage can be set; after `reset`, its memory can be used again."""
    data = [numbers(N), numbers(N, 9)]
    buffer = None
    for values in data:
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (N,), "x")
        y = rig.double(ctx, x)
        if buffer is None:
            buffer = rig.keep(rig.stream.alloc_buffer(2 * rig.room(x)))
            expect(buffer.usage is BufferUsage.ANY, f"the usage of a new buffer is {buffer.usage}")
            buffer.usage = BufferUsage.WEIGHTS
            expect(buffer.usage is BufferUsage.WEIGHTS, "the usage was not kept")
            buffer.usage = BufferUsage.COMPUTE
        else:
            buffer.reset()
        tensor_alloc(buffer, x, 0)
        tensor_alloc(buffer, y, rig.room(x))
        x.set_array(values)
        rig.stream.graph_compute(Graph().build_forward_expand(y))
        expect_equal(y.to_numpy(), 2 * values, "a graph in a buffer that was reset")


@check("memory")
def a_freed_buffer_is_refused(rig: Rig) -> None:
    """Using or freeing a freed buffer raises `FreedError`."""
    work = rig.doubling(N)
    work.x.set_array(numbers(N))
    rig.stream.graph_compute(work.graph)
    plan = rig.stream.graph_plan_create(work.graph)
    work.buffer.free()
    expect_error(FreedError, work.buffer.free, "freeing a buffer twice")
    expect_error(FreedError, lambda: work.x.set_array(numbers(N)), "a write to a freed buffer")
    expect_error(FreedError, work.y.get, "a read of a freed buffer")
    expect_error(FreedError, lambda: rig.stream.graph_compute(work.graph), "a graph in a freed buffer")
    expect_error(FreedError, lambda: rig.stream.graph_plan_compute(plan), "a plan in a freed buffer")
    rig.stream.synchronize()
    rig.stream.graph_plan_free(plan)


@check("memory")
def freeing_with_work_pending(rig: Rig) -> None:
    """A buffer may be freed while queued work uses it: the work finishes correctly."""
    for _ in range(3):
        work = rig.doubling(N)
        rig.busy()
        rig.stream.set_tensor_async(work.x, numbers(N))
        rig.stream.graph_compute_async(work.graph)
        out = np.zeros(N, np.float32)
        rig.stream.get_tensor_async(work.y, out)
        size = work.buffer.size
        work.buffer.free()
        taker = rig.keep(rig.stream.alloc_buffer(size))  # may get the freed memory
        taker.clear(0xFF)
        rig.stream.synchronize()
        expect_equal(out, 2 * numbers(N), "a result whose buffer was freed while it was computed")


@check("memory")
def freeing_a_stream_ends_its_work(rig: Rig) -> None:
    """Freeing a stream waits for its work; using it afterwards raises."""
    stream = rig.new_stream()
    work = rig.doubling(N, stream=stream)
    rig.busy(stream)
    stream.set_tensor_async(work.x, numbers(N))
    stream.graph_compute_async(work.graph)
    out = np.zeros(N, np.float32)
    stream.get_tensor_async(work.y, out)
    stream.free()
    expect_equal(out, 2 * numbers(N), "a result of a stream that was freed")
    expect_error(FreedError, stream.synchronize, "synchronize of a freed stream")
    expect_error(FreedError, stream.free, "freeing a stream twice")


@check("memory")
def host_buffers(rig: Rig) -> None:
    """NumPy reads and writes the device's host memory, and transfers from and to it are right."""
    buft = rig.device.host_buffer_type
    if buft is None:
        unsupported("the device has no host buffer type")
    expect(buft.is_host, f"{buft.name} memory has is_host False")
    expect(device_by_name("CPU").supports_buft(buft), f"the CPU cannot use {buft.name} memory")
    ctx = Context()
    host = ctx.new_tensor(DType.F32, (N,), "host")
    buffer = rig.keep(alloc_ctx_tensors(ctx, buft))
    memory = buffer.base[host.offset : host.offset + host.nbytes].view(np.float32)
    memory[:] = numbers(N)
    expect_equal(host.to_numpy(), numbers(N), "a host tensor that NumPy wrote")
    work = rig.doubling(N)
    rig.busy()
    rig.stream.set_tensor_async(work.x, memory)
    rig.stream.graph_compute_async(work.graph)
    rig.stream.get_tensor_async(work.y, memory)
    rig.stream.synchronize()
    expect_equal(memory, 2 * numbers(N), "host memory after an asynchronous round trip")
    tensor_copy(host, work.x)
    rig.stream.graph_compute(work.graph)
    expect_equal(work.y.to_numpy(), 4 * numbers(N), "a graph after a copy from host memory")
    buffer.free()
    expect_equal(memory, 2 * numbers(N), "an array over host memory that was freed")


@check("memory")
def the_callers_memory(rig: Rig) -> None:
    """`buffer_from_host_ptr` uses the caller's array in place, or raises if `caps` lacks it."""
    array = np.zeros(2 * 4096, np.float32)
    aligned = array[-array.ctypes.data % 4096 // 4 :][:4096]
    if not rig.device.caps.buffer_from_host_ptr:
        refused = lambda: rig.device.buffer_from_host_ptr(aligned)  # noqa: E731
        expect_error(BackendError, refused, "buffer_from_host_ptr")
        return
    aligned[:] = numbers(4096)
    buffer = rig.keep(rig.device.buffer_from_host_ptr(aligned))
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (4096,), "x")
    tensor_alloc(buffer, x, 0)
    expect_equal(x.to_numpy(), numbers(4096), "a tensor over the caller's memory")
    y = rig.double(ctx, x)
    rig.keep(alloc_ctx_tensors(ctx, rig.stream))
    rig.stream.graph_compute(Graph().build_forward_expand(y))
    expect_equal(y.to_numpy(), 2 * numbers(4096), "a graph over the caller's memory")
    x.memset(0)
    expect(not aligned.any(), "a write to the caller's memory did not reach it")


@check("memory")
def read_only_memory_is_never_written(rig: Rig) -> None:
    """A caller's read-only array is read in place and never written; one with gaps is refused."""
    if not rig.device.caps.buffer_from_host_ptr:
        unsupported("the device cannot use the caller's memory")
    whole = np.zeros(2 * 4096, np.float32)
    gaps = whole[::2]
    expect_error(ArgumentError, lambda: rig.device.buffer_from_host_ptr(gaps), "memory with gaps")
    array = whole[-whole.ctypes.data % 4096 // 4 :][:4096]
    array[:] = numbers(4096)
    array.flags.writeable = False
    buffer = rig.keep(rig.device.buffer_from_host_ptr(array))
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (4096,), "x")
    tensor_alloc(buffer, x, 0)
    for write in (
        lambda: x.set(b"1234"),
        lambda: x.memset(0),
        lambda: rig.stream.set_tensor_async(x, b"1234"),
        buffer.clear,
        lambda: rig.stream.graph_compute(Graph().build_forward_expand(rig.double(ctx, x, inplace=True))),
    ):
        expect_error(BackendError, write, "a write to read-only memory")
    rig.stream.synchronize()
    expect_equal(x.to_numpy(), numbers(4096), "a tensor over read-only memory")
