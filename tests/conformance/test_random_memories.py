"""Random programs whose leafs lie in memory for weights: what splits computes, with right values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from ggmlb import Backend, BufferUsage, Context, Error, Scheduler, alloc_ctx_tensors
from ggmlb.core import dtypes
from ggmlb.core.errors import BackendError, BackendUnavailable, RegistryError, UnsupportedOpError
from ggmlb.interface import BufferType
from ggmlb.runtime.alloc import alloc_tensors
from ggmlb.testing.cases import FAMILIES
from ggmlb.testing.devices import device_named, weight_memories
from tests.support.oracle import programs

NAMES = ("CPU", "LLVM", "OpenCL0", "ggml:CPU")


@pytest.fixture(scope="module")
def streams() -> Iterator[dict[str, Backend]]:
    """A stream on each device that is here."""
    found = {}
    with ExitStack() as stack:
        for name in NAMES:
            try:
                found[name] = stack.enter_context(device_named(name).init_backend())
            except (RegistryError, BackendUnavailable):
                continue
        yield found


def memories(streams: dict[str, Backend]) -> list[BufferType | None]:
    """Memory for weights of all devices (OpenCL's also where it is not the faster), their own, and none."""
    found: list[Any] = [buft for s in streams.values() for buft in weight_memories(s.device)]
    packed = [s.device.packed_buffer_type for n, s in streams.items() if n == "OpenCL0"]  # type: ignore
    return [*dict.fromkeys([*found, *packed]), *(s.default_buffer_type for s in streams.values()), None]


@given(data=st.data())
def test_what_splits_computes(streams: dict[str, Backend], data: st.DataObject) -> None:
    program = data.draw(programs(data.draw(st.sampled_from(sorted(FAMILIES))), beyond=True))
    cpu = streams["CPU"]
    try:
        alone = program.case("random", ()).build()
    except Error:
        assume(False)
    with alloc_ctx_tensors(alone.ctx, cpu) as buffer:
        buffer.clear(0xFF)
        alone.upload()
        cpu.graph_compute(alone.graph)
        outputs = [alone.tensors[name] for name in program.outputs]
        expected: Any = [(int(t.dtype), list(t.ne), t.packed().tobytes()) for t in outputs]
    case, leafs = program.case("random", expected), Context()
    built = case.build(leafs=leafs)
    chosen = data.draw(st.permutations(list(streams)))[: data.draw(st.integers(1, len(streams)))]
    kinds = memories(streams)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # requests that cannot be followed
        for tensor in [t for t in leafs.tensors if t.view_src is None]:
            memory = data.draw(st.sampled_from(kinds))
            if memory is None or (memory.name.endswith("_Split") and not memory.suits(tensor)):
                continue
            note(f"{tensor.describe()} in {memory.name}")
            usage = data.draw(st.sampled_from([BufferUsage.ANY, BufferUsage.WEIGHTS]))
            stack.enter_context(alloc_tensors([tensor], memory)).usage = usage
        sched = stack.enter_context(Scheduler([streams[name] for name in chosen]))
        for _ in range(data.draw(st.integers(0, 3))):
            node = data.draw(st.sampled_from(built.graph.nodes))
            sched.set_tensor_backend(node, streams[data.draw(st.sampled_from(chosen))])
        try:
            sched.alloc_graph(built.graph)
        except UnsupportedOpError as refused:
            readable = all(t.buffer is None or t.buffer.buft.is_host for t in leafs.tensors)
            assert "CPU" not in chosen or not readable, refused  # the CPU runs every op
            return
        for leaf in case.leafs:
            if built.tensors[leaf.name].buffer is not None:
                built.tensors[leaf.name].set(leaf.data)
        note(str(sched))
        sched.graph_compute(built.graph)
        assert {n: v.reason for n, v in built.compare().items() if not v.ok} == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_k", "i32", "i64", "f64"])
def test_tensors_are_read_back_and_copied(streams: dict[str, Backend], name: str, dtype: str) -> None:
    """From memory that says `is_readable`, whole and in parts; from other memory, an error."""
    if name not in streams:
        pytest.skip(f"no {name}")
    values = np.random.default_rng(0).integers(-9, 9, (32, 512)).astype(np.float32)
    blocks = dtypes.quantize(values, dtype).reshape(-1)
    for memory in weight_memories(streams[name].device):
        ctx, plain = Context(), Context()
        w, copy = (c.new_tensor(dtype, (512, 32)) for c in (ctx, plain))
        with alloc_ctx_tensors(ctx, memory), alloc_ctx_tensors(plain, streams["CPU"]):
            w.set(blocks)
            if not memory.is_readable(w):
                with pytest.raises(BackendError, match="not the bytes that were written"):
                    w.get()
                continue
            assert (w.get() == blocks).all()
            np.testing.assert_array_equal(w.to_numpy(), dtypes.dequantize(blocks.reshape(32, -1), dtype))
            w.copy_to(copy)
            assert (copy.get() == blocks).all()
            start, size = 3 * w.nb[1] // 2, 5 * w.nb[1]
            assert (w.get(start, size) == blocks[start : start + size]).all()
            w.set(blocks[:size], start)
            assert (w.get(start, size) == blocks[:size]).all()
