"""Devices of two machines as one: their sums, and models that are sharded over them."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, DType, SplitAxis
from ggmlb.backends.ray.cluster import Cluster
from ggmlb.core.tensor import Tensor
from ggmlb.models import TextModel
from tests.support.text_models import write_text_model

PROMPT = [1, *(260 + (7 * i) % 55 for i in range(12))]


def placed(stack: ExitStack, device: Any, dtype: DType, values: np.ndarray) -> Tensor:
    ctx = Context()
    tensor = ctx.new_tensor(dtype, (*values.shape[::-1],))
    stack.enter_context(ggmlb.alloc_ctx_tensors(ctx, device.buffer_type))
    tensor.set_array(values)
    return tensor


@pytest.mark.parametrize("n", [1, 1000, 100_000])
def test_a_sum_is_in_the_order_of_the_machines_on_each(cluster: Cluster, n: int) -> None:
    get = cluster.reg.get_proc_address
    init, allreduce, free = (get(f"comm_{name}") for name in ("init", "allreduce_tensor", "free"))
    assert init and allreduce and free
    rng = np.random.default_rng(n)
    with ExitStack() as stack:
        streams = [stack.enter_context(device.init_backend()) for device in cluster.devices]
        comm = init(streams)
        values = [rng.standard_normal(n).astype(np.float32) for _ in streams]
        parts = [placed(stack, d, DType.F32, v) for d, v in zip(cluster.devices, values, strict=True)]
        expected = values[0].copy()
        for value in values[1:]:
            expected += value
        assert allreduce(comm, parts)
        for part in parts:
            np.testing.assert_array_equal(part.to_numpy(), expected)
        halves = [placed(stack, d, DType.F16, v) for d, v in zip(cluster.devices, values, strict=True)]
        assert not allreduce(comm, halves)
        assert not allreduce(comm, parts[::-1]), "tensors of other machines"
        assert init([streams[0], streams[0]]) is None
        free(comm)


def test_a_shard_of_a_model_on_each_machine(cluster: Cluster, tmp_path: Path) -> None:
    """As on two local devices, to the bit; each machine has one call for each stage of a token."""
    path = write_text_model(tmp_path / "model.gguf", "llama")
    with TextModel(path, ["CPU+CPU", "CPU"], n_ctx=64) as local:
        logits = local.logits(PROMPT)
        made = local.generate(PROMPT, max_tokens=8, temperature=0)
    devices: Any = cluster.devices
    with TextModel(path, ["node0/CPU+node1/CPU", "CPU"], n_ctx=64) as model:
        np.testing.assert_array_equal(model.logits(PROMPT), logits)
        assert model.generate(PROMPT, max_tokens=8, temperature=0).tokens == made.tokens
        n_stages = 1 + 2 * model.config.n_layer
        before = [device.link.n_calls for device in devices]
        model.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)  # planned before
        for device, n in zip(devices, before, strict=True):
            assert (device.link.n_calls - n) / 24 < n_stages + 1.5


def test_a_node_that_is_lost_in_a_sum_is_told(cluster: Cluster) -> None:
    """The last test of this file: the machine is gone."""
    import ray

    devices: Any = cluster.devices[:2]
    meta = ggmlb.meta_device(devices, lambda t: ggmlb.SplitState(SplitAxis(0), ((32, 32),)))
    weights, ctx = Context(), Context()
    w, x = (weights.new_tensor(DType.F32, (64, m)) for m in (64, 2))
    y = ctx.mul_mat(w, x)
    with meta.init_backend() as stream, ggmlb.alloc_ctx_tensors(weights, stream):
        for tensor in (w, x):
            tensor.set_array(np.ones((tensor.ne[1], 64), np.float32))
        graph = ggmlb.Graph().build_forward_expand(y)
        with ggmlb.GraphAllocator(meta.buffer_type) as allocator:
            allocator.alloc_graph(graph)
            stream.graph_compute(graph)
            assert set(y.to_numpy().ravel()) == {64.0}
            ray.kill(devices[1].link._actor)
            with pytest.raises(ggmlb.DeviceLostError, match="node1 is lost"):
                stream.graph_compute(graph)
            with suppress(ggmlb.DeviceLostError):  # of node0, which waited for it
                stream.synchronize()
