from __future__ import annotations

import pickle

import numpy as np
import pytest

from ggmlb.backends.cpu import backend_reg
from ggmlb.context import Context
from ggmlb.dtypes import DType
from ggmlb.errors import (
    AllocationError,
    ArgumentError,
    BackendError,
    BoundsError,
    FreedError,
    NotAllocatedError,
)
from ggmlb.graph import Graph
from ggmlb.interface import tensor_alloc, tensor_copy
from ggmlb.interface.host import ALIGNMENT, aligned_empty
from ggmlb.registry import cpu_buffer_from_ptr, cpu_buffer_type

DEVICE = backend_reg().devices[0]


def leaf(dtype=DType.F32, ne=(4, 3)):
    return Context().new_tensor(dtype, ne)


@pytest.mark.parametrize("n", [1, 63, 64, 1000, 1 << 21])
def test_memory_begins_at_a_cache_line(n):
    memory = aligned_empty(n)
    assert memory.ctypes.data % ALIGNMENT == 0
    assert memory.nbytes == n


def test_a_buffer_is_flat_host_memory():
    with cpu_buffer_type().alloc_buffer(100) as buffer:
        assert buffer.size == 100
        assert buffer.is_host
        assert buffer.base.shape == (100,)
        assert buffer.base.dtype == np.uint8
        assert buffer.buft is DEVICE.buffer_type
        assert (buffer.name, buffer.alignment) == ("CPU", 64)


def test_an_empty_buffer_holds_empty_tensors():
    with cpu_buffer_type().alloc_buffer(0) as buffer:
        t = leaf(ne=(4, 0))
        tensor_alloc(buffer, t, 0)
        buffer.clear(1)
        assert t.get().size == 0
        assert t.to_numpy().shape == (0, 4)


def test_bytes_go_in_and_come_out():
    with cpu_buffer_type().alloc_buffer(256) as buffer:
        t = leaf()
        tensor_alloc(buffer, t, 64)
        buffer.clear(0xAB)
        assert (t.get() == 0xAB).all()
        data = np.arange(12, dtype=np.float32)
        t.set(data)
        data[:] = 0  # it was copied
        assert t.to_numpy().ravel().tolist() == list(range(12))
        t.set(b"\x01\x02", offset=3)
        assert t.get(3, 2).tolist() == [1, 2]
        t.memset(9, 4, 8)
        assert t.get(3, 10).tolist() == [1, 9, 9, 9, 9, 9, 9, 9, 9, t.get()[12]]
        assert (buffer.base[:64] == 0xAB).all()
        assert (buffer.base[64 + 48 :] == 0xAB).all()


def test_pieces_go_in_and_come_out():
    with cpu_buffer_type().alloc_buffer(64) as buffer:
        t = leaf(DType.I8, (8, 4))
        tensor_alloc(buffer, t, 0)
        buffer.clear(0)
        buffer.set_tensor_2d(t, np.arange(12, dtype=np.uint8), 1, 3, 4, 8, 3)
        assert t.to_numpy()[:, 1:4].ravel().tolist() == list(range(12))
        assert (t.to_numpy()[:, 4:] == 0).all()
        out = np.full(16, 77, np.uint8)
        buffer.get_tensor_2d(t, out, 1, 3, 4, 8, 4)
        assert out.reshape(4, 4)[:, :3].ravel().tolist() == list(range(12))
        assert (out.reshape(4, 4)[:, 3] == 77).all()


def test_tensors_copy_from_host_memory_of_any_kind():
    with cpu_buffer_type().alloc_buffer(64) as a, cpu_buffer_from_ptr(np.zeros(64, np.uint8)) as b:
        x, y = leaf(), leaf()
        tensor_alloc(a, x, 0)
        tensor_alloc(b, y, 0)
        x.set_array(np.arange(12, dtype=np.float32).reshape(3, 4))
        assert b.cpy_tensor(x, y)
        assert np.array_equal(x.to_numpy(), y.to_numpy())
        y.memset(0)
        x.copy_to(y)
        assert np.array_equal(x.to_numpy(), y.to_numpy())
        y.memset(0)
        tensor_copy(y, x)
        assert not x.to_numpy().any()


def test_an_array_is_used_where_it_lies():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with DEVICE.buffer_from_host_ptr(array) as buffer:
        t = leaf()
        tensor_alloc(buffer, t, 0)
        assert buffer.size == array.nbytes
        assert np.shares_memory(buffer.base, array)
        array[1, 2] = 99
        assert t.to_numpy()[1, 2] == 99
        t.memset(0)
        assert not array.any()
    assert not array.any()  # freeing the buffer leaves the caller's array alone


def test_a_memory_map_is_used_where_it_lies(tmp_path):
    file = tmp_path / "weights.bin"
    np.arange(12, dtype=np.float32).tofile(file)
    mapped = np.memmap(file, np.float32, "r")
    ctx = Context()
    w, x = ctx.new_tensor(DType.F32, (4, 3)), ctx.new_tensor(DType.F32, (4,))
    y = ctx.mul_mat(w, x)
    with cpu_buffer_from_ptr(mapped) as weights, DEVICE.init_backend() as cpu, cpu.alloc_buffer(256) as work:
        assert np.shares_memory(weights.base, mapped)
        tensor_alloc(weights, w, 0)
        tensor_alloc(work, x, 0)
        tensor_alloc(work, y, 128)
        x.set_array(np.ones(4))
        cpu.graph_compute(Graph().build_forward_expand(y))
        assert y.to_numpy().tolist() == [6, 22, 38]


def test_read_only_memory_is_never_written():
    array = np.zeros(12, np.float32)
    array.flags.writeable = False
    ctx = Context()
    t = ctx.new_tensor(DType.F32, (4, 3), "frozen")
    with cpu_buffer_from_ptr(array) as buffer, DEVICE.init_backend() as cpu:
        tensor_alloc(buffer, t, 0)
        for write in (lambda: t.set(b"1234"), lambda: t.memset(1)):
            with pytest.raises(
                BackendError, match=r"write to tensor f32\[4, 3\] \(leaf 'frozen'\).*read-only"
            ):
                write()
        with pytest.raises(BackendError, match=r"cannot clear.*read-only"):
            buffer.clear()
        y = ctx.sqr_inplace(t)
        with pytest.raises(BackendError, match=r"failed to compute SQR.*read-only"):
            cpu.graph_compute(Graph().build_forward_expand(y))
    assert not array.any()


@pytest.mark.parametrize("array", [np.zeros((4, 4))[:, ::2], [1, 2, 3], np.zeros((3, 4)).T])
def test_only_contiguous_arrays_can_be_used(array):
    with pytest.raises(ArgumentError, match="C-contiguous NumPy array"):
        cpu_buffer_from_ptr(array)


@pytest.mark.parametrize("n", [1 << 62, (1 << 63) - 1, 1 << 50])
def test_too_much_memory_is_refused_with_the_figures(n):
    with pytest.raises(AllocationError, match="CPU: no room for") as caught:
        cpu_buffer_type().alloc_buffer(n)
    assert caught.value.asked == n
    assert 0 < caught.value.free <= caught.value.total
    assert isinstance(caught.value, MemoryError)
    assert pickle.loads(pickle.dumps(caught.value)).asked == n


def test_a_negative_size_is_refused():
    with pytest.raises(ArgumentError, match="-1"):
        cpu_buffer_type().alloc_buffer(-1)


def test_a_freed_buffer_is_not_used():
    buffer = cpu_buffer_type().alloc_buffer(64)
    t = leaf()
    tensor_alloc(buffer, t, 0)
    buffer.free()
    for use in (t.get, t.to_numpy, lambda: t.set(b"1"), lambda: t.memset(0), buffer.clear, buffer.free):
        with pytest.raises(FreedError, match="was freed"):
            use()


def test_no_byte_beyond_a_tensor_is_touched():
    with cpu_buffer_type().alloc_buffer(128) as buffer:
        t = leaf()
        tensor_alloc(buffer, t, 0)
        for use in (
            lambda: t.set(b"1" * 49),
            lambda: t.get(40, 9),
            lambda: t.get(-1),
            lambda: t.memset(0, 48, 1),
        ):
            with pytest.raises(BoundsError, match="the tensor has 48"):
                use()


def test_data_shorter_than_asked_for_is_refused():
    with DEVICE.init_backend() as cpu, cpu.alloc_buffer(64) as buffer:
        t = leaf()
        tensor_alloc(buffer, t, 0)
        for write in (buffer.set_tensor, cpu.set_tensor_async):
            with pytest.raises(BoundsError, match="8 bytes asked for, the data has 4"):
                write(t, b"1234", size=8)


def test_a_tensor_in_no_buffer_has_no_data():
    with pytest.raises(NotAllocatedError, match="in no buffer yet"):
        leaf().get()
