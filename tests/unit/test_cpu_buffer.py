from __future__ import annotations

import numpy as np
import pytest

from ggmlb.backends.cpu import backend_reg
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.graph import Graph
from ggmlb.interface import tensor_alloc, tensor_copy
from ggmlb.interface.host import ALIGNMENT, aligned_empty
from ggmlb.interface.registry import cpu_buffer_from_ptr, cpu_buffer_type

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
