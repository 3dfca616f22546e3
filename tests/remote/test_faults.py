"""Machines that are lost: an error that names them within seconds, and others that go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import (
    Backend,
    BackendError,
    Buffer,
    Context,
    Device,
    DeviceLostError,
    DType,
    Graph,
    Scheduler,
    Tensor,
)
from ggmlb.backends.ray.cluster import Cluster
from tests.remote.conftest import STORE
from tests.support.processes import ROOT


@pytest.fixture
def cluster(address: str) -> Iterator[Cluster]:
    """A connection of its own: its actors end."""
    with ggmlb.connect(address, ["CPU"]) as connection:
        yield connection


class Chain:
    """Three layers, whose weights are on the devices in turn; all is released with the stack."""

    def __init__(self, names: list[str], stack: ExitStack) -> None:
        self.stack = stack
        self.backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in names]
        self.sched = Scheduler(self.backends)
        stack.callback(lambda: self.sched.free())
        self.buffers: dict[Context, Buffer] = {}
        ctx = Context()
        self.x = y = ctx.set_input(ctx.new_tensor(DType.F32, (64, 4), "x"))
        for i in range(3):
            weights = Context()
            w = weights.new_tensor(DType.F32, (64, 64), f"w{i}")
            self.place(weights, self.backends[i % len(names)])
            y = ctx.silu(ctx.mul_mat(w, y))
        self.y: Tensor = ctx.set_output(y)
        self.graph = Graph().build_forward_expand(self.y)

    def place(self, weights: Context, backend: Backend) -> None:
        """Place the weights of a layer, and set them."""
        buffer = self.buffers[weights] = self.stack.enter_context(ggmlb.alloc_ctx_tensors(weights, backend))
        buffer.usage = "WEIGHTS"
        for w in weights.tensors:
            rng = np.random.default_rng(int(w.name[1:]))
            w.set_array(rng.standard_normal((64, 64)).astype(np.float32) / 8)

    def compute(self) -> np.ndarray:
        self.sched.alloc_graph(self.graph)
        self.x.set_array(np.arange(256, dtype=np.float32).reshape(4, 64) / 256)
        self.sched.graph_compute(self.graph)
        return self.y.to_numpy()

    def go_on_without(self, *devices: str) -> None:
        """Place what was on devices that are lost on the first of the others."""
        self.sched = self.sched.without(*devices)
        for weights, buffer in list(self.buffers.items()):
            if buffer.buft.device.name in devices:
                buffer.free()
                self.place(weights, self.sched.backend(0))


def process(device: Any) -> int:
    """Number of the process of a device's machine."""
    import ray

    number: int = ray.get(device.link._actor.ping.remote())
    return number


def kill(device: Any) -> None:
    """The process of the devices is killed."""
    os.kill(process(device), signal.SIGKILL)


def stop(device: Any) -> None:
    """The process of the devices stalls."""
    os.kill(process(device), signal.SIGSTOP)


def remove(device: Any) -> None:
    """The machine is gone."""
    number = process(device)
    for of in (parent(number), number):  # in this order, or Ray's process tells of the other's end
        os.kill(of, signal.SIGKILL)


def stall(device: Any) -> None:
    """The machine is there, and nothing on it answers: as when its network stalls."""
    number = process(device)
    for of in (parent(number), number):
        os.kill(of, signal.SIGSTOP)


def raylet(node: Any) -> int:
    """Number of Ray's process on a node, the parent of the actors' processes."""
    number: int = node.all_processes["raylet"][0].process.pid
    return number


def parent(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.fixture
def third(nodes: Any) -> Iterator[Any]:
    """A third machine, to be lost."""
    node = nodes.add_node(num_cpus=1, object_store_memory=STORE)
    yield node
    nodes.remove_node(node, allow_graceful=False)
    nodes.wait_for_nodes(timeout=600)  # till Ray knows


@pytest.mark.parametrize("fault", [kill, stop])
def test_a_lost_process_is_named_and_others_go_on(cluster: Cluster, fault: Callable[[Any], None]) -> None:
    lose(cluster, cluster.devices[1], fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [remove, stall])
def test_a_lost_machine_is_named_and_others_go_on(
    nodes: Any, third: Any, fault: Callable[[Any], None]
) -> None:
    with ggmlb.connect(nodes.address, ["CPU"]) as cluster:
        (lost,) = [device for device in cluster.devices if parent(process(device)) == raylet(third)]
        lose(cluster, lost, fault)


def lose(cluster: Cluster, lost: Device, fault: Callable[[Any], None]) -> None:
    """Lose a device: what it held is placed on the others, and the same graph has the same result."""
    near = next(device for device in cluster.devices if device is not lost)
    number = process(lost)
    with ExitStack() as stack:
        stack.callback(end, number)
        chain = Chain([near.name, lost.name, "CPU"], stack)
        right = chain.compute()
        fault(lost)
        start = time.monotonic()
        with pytest.raises(DeviceLostError, match=r"node\d is lost, with node\d/CPU and \d+ buf") as raised:
            chain.compute()
        assert time.monotonic() - start < 60  # it hangs otherwise; 10 s where the machine is quiet
        assert raised.value.devices == (lost.name,)
        assert raised.value.nbytes > 64 * 64 * 4
        with pytest.raises(DeviceLostError):
            chain.compute()
        chain.go_on_without(*raised.value.devices)
        for _ in range(2):
            np.testing.assert_array_equal(chain.compute(), right)
        assert [backend.name for backend in chain.sched.backends] == [near.name, "CPU"]


def end(number: int) -> None:
    """End a process that may be stopped, if it is there."""
    if is_node(number):
        os.kill(number, signal.SIGKILL)


def test_waiting_ends_within_ten_seconds() -> None:
    from ggmlb.backends.ray.link import ANSWER_S, LOOK_S

    assert LOOK_S + ANSWER_S <= 8


def test_every_call_to_a_lost_machine_tells_it(cluster: Cluster) -> None:
    device = ggmlb.device_by_name("node0/CPU")
    stream, event = device.init_backend(), device.event_new()
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (1000,))
    y = ctx.scale(a, 2.0)
    buffer = ggmlb.alloc_ctx_tensors(ctx, stream)
    graph = Graph().build_forward_expand(y)
    a.set_array(np.ones(1000))
    stream.graph_compute(graph)
    out = np.zeros(1000, np.float32)
    os.kill(process(device), signal.SIGKILL)
    with pytest.raises(DeviceLostError):
        y.get()
    todo: list[Callable[[], object]] = [
        lambda: a.set(out),
        y.get,
        lambda: a.memset(0),
        lambda: stream.set_tensor_async(a, out),
        lambda: stream.get_tensor_async(y, out),
        lambda: stream.graph_compute(graph),
        lambda: stream.event_record(event),
        buffer.clear,
        lambda: device.buffer_type.alloc_buffer(256),
        lambda: device.memory,
        device.init_backend,
    ]
    for call in todo:
        with pytest.raises(DeviceLostError, match="node0 is lost"):
            call()
    event.free()
    buffer.free()
    stream.free()


@pytest.mark.parametrize("place", ["first", "last"])
def test_the_nth_call_failing_is_an_error_and_the_next_run_is_right(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Every call of a run of three splits fails once, from opening the devices to reading the result.

    What fails is the first command of a call, so that no other is done; or its last, when all are done.
    """
    from ggmlb.backends.ray.link import Link

    devices: Sequence[Any] = cluster.devices
    send, countdown = Link._send, -1

    def fail(link: Link, commands: Sequence[Any]) -> None:
        nonlocal countdown
        countdown -= 1
        wrong = [("nothing",)] if countdown == -1 else []
        send(link, [*wrong, *commands] if place == "first" else [*commands, *wrong])

    def run() -> list[np.ndarray]:
        for device in devices:
            device._declined.clear()  # it is asked again
        with ExitStack() as stack:
            chain = Chain(["node0/CPU", "node1/CPU", "CPU"], stack)
            return [chain.compute() for _ in range(3)]

    right = run()
    monkeypatch.setattr(Link, "_send", fail)
    n_failed = 0
    while countdown < 0:
        countdown = n_failed
        try:
            np.testing.assert_array_equal(run(), right)
            assert countdown >= 0, f"call {n_failed} failed, and nothing told it"
        except BackendError as error:
            assert "'nothing' failed" in str(error)
            n_failed += 1
    assert n_failed > 15
    assert [device.link.sizes for device in devices] == [{}, {}], "memory is left"


def test_a_scheduler_goes_on_after_each_call_of_a_split_run_failed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ggmlb.backends.ray.link import Link

    send, countdown = Link._send, -1

    def fail(link: Link, commands: Sequence[Any]) -> None:
        nonlocal countdown
        countdown -= 1
        send(link, [*commands, ("nothing",)] if countdown == -1 else commands)

    with ExitStack() as stack:
        chain = Chain(["node0/CPU", "node1/CPU", "CPU"], stack)
        right = chain.compute()
        monkeypatch.setattr(Link, "_send", fail)
        n_failed = 0
        while countdown < 0:
            countdown = n_failed
            with suppress(BackendError):
                chain.compute()
            if countdown < 0:
                n_failed += 1
                np.testing.assert_array_equal(chain.compute(), right)
        monkeypatch.undo()
        assert n_failed >= 2


def test_what_was_read_ahead_is_read_again_after_a_failure(cluster: Cluster) -> None:
    device: Any = ggmlb.device_by_name("node0/CPU")
    with device.init_backend() as stream:
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (100,))
        y = ctx.scale(x, 2.0)
        with ggmlb.alloc_ctx_tensors(ctx, stream):
            graph = Graph().build_forward_expand(y)
            x.set_array(np.ones(100))
            for _ in range(2):
                stream.graph_compute(graph)
                y.get()
            device.link.queue("nothing")
            with pytest.raises(BackendError, match="failed"):
                stream.graph_compute(graph)
            assert y.to_numpy().tolist() == [2.0] * 100


DRIVER = """
import sys, ggmlb, ray
cluster = ggmlb.connect(sys.argv[1], ["CPU"])
buffers = [device.buffer_type.alloc_buffer(1 << 20) for device in cluster.devices]
print(*[ray.get(device.link._actor.ping.remote()) for device in cluster.devices], flush=True)
sys.stdin.read()
"""


def test_a_driver_that_dies_leaves_no_process(address: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = [sys.executable, "-c", DRIVER, address]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as driver:
        assert driver.stdout is not None
        numbers = [int(n) for n in driver.stdout.readline().split()]
        assert len(numbers) >= 2
        driver.kill()
    deadline = time.monotonic() + 60
    while any(is_node(number) for number in numbers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_node(number: int) -> bool:
    try:
        return b"NodeActor" in Path(f"/proc/{number}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
