"""Devices of other machines: facts, memory, copies, and what is sent."""

from __future__ import annotations

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, DeviceType, DType, Graph, Scheduler, Status
from ggmlb.backends.ray.cluster import Cluster
from ggmlb.core.tensor import Tensor


def layers(ctx: Context, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Products and activations, one after another."""
    found = []
    for w in weights:
        x = ctx.silu(ctx.mul_mat(w, x))
        found.append(x)
    return found


def computed(
    devices: list[str], homes: list[int], xs: list[np.ndarray]
) -> tuple[list[np.ndarray], list[int]]:
    """Results of layers on devices; and the bytes sent to other machines for each computation."""
    backends = [ggmlb.init_by_name(name) for name in devices]
    links = {b.device.link for b in backends if "/" in b.name}
    weights = [Context().new_tensor(DType.F32, (64, 64), f"w{i}") for i in range(len(homes))]
    rng = np.random.default_rng(1)
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(DType.F32, (64, 8), "x"))
    ys = layers(ctx, x, weights)
    results, sent = [], []
    with Scheduler(backends) as sched:
        for w, home in zip(weights, homes, strict=True):
            own = Context()
            own.tensors.append(w)
            ggmlb.alloc_ctx_tensors(own, backends[home]).usage = "WEIGHTS"
            w.set_array(rng.standard_normal((64, 64)).astype(np.float32) / 8)
        graph = Graph().build_forward_expand(ctx.set_output(ys[-1]))
        sched.alloc_graph(graph)
        for values in xs:
            before = sum(link.n_sent for link in links)
            x.set_array(values)
            sched.graph_compute(graph)
            results.append(ys[-1].to_numpy())
            sent.append(sum(link.n_sent for link in links) - before)
    for backend in backends:
        backend.free()
    return results, sent


def inputs(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.standard_normal((8, 64)).astype(np.float32) for _ in range(n)]


def test_they_are_registered_and_told(cluster: Cluster) -> None:
    device = ggmlb.device_by_name("node1/CPU")
    assert device in cluster.devices
    assert device.type is DeviceType.ACCEL
    assert device.memory[1] > 1 << 30
    assert "on " in device.description


@pytest.mark.parametrize("homes", [[0, 0, 0, 0], [2, 0, 0, 2], [0, 1, 0, 1], [0, 2, 1, 2]])
def test_layers_anywhere_have_the_bits_of_one_cpu(cluster: Cluster, homes: list[int]) -> None:
    xs = inputs(4)
    right, _ = computed(["CPU"], [0] * 4, xs)
    got, _ = computed(["node0/CPU", "node1/CPU", "CPU"], homes, xs)
    np.testing.assert_array_equal(got, right)


def test_a_plan_that_is_unchanged_sends_no_graph(cluster: Cluster) -> None:
    """Two splits: an input of 2 KiB, and one that the other node sends; else handles and ranges."""
    xs = inputs(5)
    _, sent = computed(["node0/CPU", "node1/CPU", "CPU"], [0, 0, 1, 1], xs)
    assert sent[0] > 2048 + 1000
    assert max(sent[2:]) < 2048 + 600
    assert min(sent[2:]) > 2048


@pytest.mark.parametrize("n", [0, -1, 1 << 31])
def test_numbers_of_threads_are_checked(cluster: Cluster, n: int) -> None:
    with (
        ggmlb.init_by_name("node1/CPU") as backend,
        pytest.raises(ggmlb.ArgumentError, match="give 1 or more"),
    ):
        backend.device.reg.get_proc_address("set_n_threads")(backend, n)


def test_features_are_those_of_each_machine(cluster: Cluster) -> None:
    """Both nodes are this machine."""
    cpu = ggmlb.reg_by_name("CPU")
    own = [(f"CPU_{name}", value) for name, value in cpu.get_proc_address("get_features")(cpu)]
    reg = cluster.reg
    told = reg.get_proc_address("get_features")(reg)
    assert own
    assert told == [(f"{node}/{name}", value) for node in ("node0", "node1") for name, value in own]


def test_an_abort_callback_stops_a_machine_between_steps(cluster: Cluster) -> None:
    """It is asked before the graph is sent, and while the machine computes."""
    n, n_nodes = 1024, 100
    with ggmlb.init_by_name("node1/CPU") as backend:
        ctx = Context()
        x = y = ctx.new_tensor(DType.F32, (n, n), "x")
        first = ctx.scale(x, 2.0)
        graph = Graph().build_forward_expand(first)
        for _ in range(n_nodes):
            y = ctx.set_output(ctx.mul_mat(x, ctx.cont(ctx.transpose(y))))  # a step of its own
        graph.build_forward_expand(y)
        set_abort = backend.device.reg.get_proc_address("set_abort_callback")
        with ggmlb.alloc_ctx_tensors(ctx, backend) as buffer:
            buffer.clear(0)
            x.set_array(np.eye(n, dtype=np.float32))
            asked: list[int] = []

            def abort() -> bool:
                asked.append(1)
                return len(asked) == 2

            set_abort(backend, abort)
            assert backend.graph_compute(graph) is Status.ABORTED
            assert len(asked) == 2
            assert not y.to_numpy().any()
            small = Graph().build_forward_expand(first)
            assert backend.graph_compute(small) is Status.SUCCESS
            np.testing.assert_array_equal(first.to_numpy(), 2 * np.eye(n, dtype=np.float32))

            def fail() -> bool:
                asked.append(1)
                if len(asked) == 2:
                    raise KeyError("ours")
                return False

            asked.clear()
            set_abort(backend, fail)
            with pytest.raises(KeyError, match="ours"):
                backend.graph_compute(graph)
            assert not y.to_numpy().any()
