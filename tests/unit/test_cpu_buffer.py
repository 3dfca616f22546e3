from __future__ import annotations

import numpy as np
import pytest

from ggmlb import alloc_ctx_tensors, device_by_name, init_by_name
from ggmlb.backends.cpu import backend_reg
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType, can_quantize, quantize
from ggmlb.core.errors import ArgumentError
from ggmlb.core.graph import Graph
from ggmlb.interface import tensor_alloc, tensor_copy
from ggmlb.interface.host import aligned_empty
from ggmlb.interface.registry import cpu_buffer_from_ptr, cpu_buffer_type

DEVICE = backend_reg().devices[0]


def leaf(dtype=DType.F32, ne=(4, 3)):
    return Context().new_tensor(dtype, ne)


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


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("device", ["CPU", "LLVM"])
def test_tensors_of_mapped_memory_begin_at_multiples_of_32_bytes(device, dtype):
    """Every type is read there as elsewhere, also where the memory itself begins at an odd address."""
    k, m = 256, 48
    values = np.random.default_rng(0).standard_normal((m, k)).astype(np.float32)
    if not can_quantize(dtype):
        blocks = np.zeros((m, dtype.row_size(k)), np.uint8)
    else:
        blocks = quantize(values, dtype)
    results = []
    for start in (0, 1, 32, 33):
        whole = aligned_empty(start + 32 + blocks.nbytes)
        memory = whole[start:]
        memory[32:] = blocks.reshape(-1)
        ctx = Context()
        w, x, ids = (
            ctx.new_tensor(dtype, (k, m)),
            ctx.new_tensor(DType.F32, (k, 3)),
            ctx.from_array([5, 0, 47]),
        )
        with device_by_name(device).buffer_from_host_ptr(memory) as mapped, init_by_name(device) as stream:
            assert (mapped.name, mapped.alignment) == ("CPU_Mapped", 32)
            with pytest.raises(ArgumentError, match="not a multiple of 32"):
                tensor_alloc(mapped, w, 16)
            tensor_alloc(mapped, w, 32)
            nodes = [n for n in (ctx.mul_mat(w, x), ctx.get_rows(w, ids)) if stream.device.supports_op(n)]
            with alloc_ctx_tensors(ctx, stream):
                x.set_array(values[:3])
                for node in nodes:
                    stream.graph_compute(Graph().build_forward_expand(node))
                results.append([w.get().tolist(), *(node.get().tolist() for node in nodes)])
    assert all(result == results[0] for result in results)
