"""The n-th allocation, copy, kernel build or kernel fails, for every n: the error is ours, and all goes on.

After each failure nothing may be left allocated that was not before, and the scheduler, reset, must compute
the right result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

import ggmlb
from ggmlb import Scheduler, Status
from ggmlb.backends.cpu.plan import CpuPlan
from ggmlb.backends.opencl import program
from ggmlb.interface import Backend
from ggmlb.runtime.alloc import alloc_tensors
from ggmlb.testing.fake import FakeBackend, FakeBuffer, FakeBufferType, FakeReg
from tests.support.chain import Chain

X = np.random.default_rng(0).standard_normal((3, 8), np.float32)


def compute(chain: Chain, sched: Scheduler) -> None:
    sched.alloc_graph(chain.graph)
    chain.x.set_array(X)
    sched.graph_compute(chain.graph)
    np.testing.assert_allclose(chain.y.to_numpy(), chain.expected(X), rtol=1e-4, atol=1e-5)


class Fault:
    """Makes the n-th call of some functions fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._left = -1
        self.hit = False

    def plant(self, owner: Any, name: str, make: Callable[[], Exception]) -> None:
        function = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if not self._left:
                self.hit = True
                raise make()
            return function(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, failing)

    def own_library(self, module: ModuleType, name: str) -> ModuleType:
        """Give a module of ours a library of its own, so that what is planted there is met by nobody else."""
        own = ModuleType(name)
        own.__dict__.update(vars(getattr(module, name)))
        self._monkeypatch.setattr(module, name, own)
        return own

    def at(self, n: int) -> None:
        """Let the n-th call from now on fail; 0 for none."""
        self._left, self.hit = n, False


def fake(message: str) -> Callable[[], Exception]:
    return lambda: ggmlb.BackendError(message)


def library(message: str) -> Callable[[], Exception]:
    return lambda: RuntimeError(message)  # an array library's own, which a user must not meet


def no_room() -> Exception:
    return ggmlb.AllocationError("no room")


def opencl(message: str) -> Callable[[], Exception]:
    return lambda: cl.RuntimeError(cl._cl._ErrorRecord(msg=message, code=-5, routine="of the test"))


class Steps:
    """Makes each step of a plan a method that can be made to fail."""

    @staticmethod
    def run(step: Callable[[], None]) -> None:
        step()


FAKE = {
    "allocation": lambda f: f.plant(FakeBufferType, "_alloc_buffer", no_room),
    "copy": lambda f: [
        f.plant(owner, name, fake("a copy failed"))
        for owner, name in (
            (FakeBackend, "_cpy_tensor_async"),
            (FakeBackend, "_copy_on_stream"),
            (FakeBackend, "_set_tensor_async"),
            (FakeBuffer, "_set_tensor"),
            (FakeBuffer, "_get_tensor"),
        )
    ],
    "build": lambda f: f.plant(FakeBackend, "_plan", fake("a build failed")),
    "kernel": lambda f: f.plant(Steps, "run", library("a kernel failed")),
}

OPENCL = {
    "allocation": lambda f: f.plant(cl, "Buffer", lambda: cl.MemoryError("no room", -4)),
    "copy": lambda f: f.plant(cl, "enqueue_copy", opencl("a copy failed")),
    # PyOpenCL makes kernels itself, too, where it looks for attributes; so only ours fail.
    "build": lambda f: f.plant(f.own_library(program, "cl"), "Kernel", opencl("a build failed")),
    "kernel": lambda f: f.plant(cl, "enqueue_nd_range_kernel", opencl("a kernel failed")),
}


@pytest.fixture
def fault(monkeypatch) -> Fault:
    return Fault(monkeypatch)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("parallel", [False, True], ids=["", "parallel"])
@pytest.mark.parametrize("kind", FAKE)
def test_on_fake_devices(kind, parallel, fault, stack, monkeypatch):
    run = CpuPlan.__init__

    def stepwise(self, *args):
        run(self, *args)
        self.steps = [lambda step=step: Steps.run(step) for step in self.steps]

    monkeypatch.setattr(CpuPlan, "__init__", stepwise)
    reg = FakeReg(2)
    backends = [stack.enter_context(d.init_backend()) for d in reg.devices]
    backends.append(stack.enter_context(ggmlb.init_by_name("CPU")))
    chain = Chain(stack, backends[:2])
    FAKE[kind](fault)

    def used() -> list[tuple[int, int]]:
        return [(d.used, d.n_buffers) for d in reg.devices]

    check_every_n(chain, backends, fault, used, parallel)


@pytest.mark.parametrize("kind", OPENCL)
def test_on_opencl(kind, fault, stack):
    backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in ("OpenCL0", "CPU")]
    chain = Chain(stack, backends)
    device: Any = backends[0].device
    # Each build is a first one: kernel objects of earlier tests do not serve.
    device.programs._idle.clear()
    OPENCL[kind](fault)
    check_every_n(chain, backends, fault, lambda: device.ledger.free, False)


def check_every_n(
    chain: Chain, backends: list[Backend], fault: Fault, used: Callable[[], object], parallel: bool
) -> None:
    start = used()
    for n in range(1, 200):
        with Scheduler(backends, parallel=parallel, sanitize=True) as sched:
            fault.at(n)
            try:
                compute(chain, sched)
            except ggmlb.Error as error:
                assert fault.hit, error
                assert str(error)
            else:
                assert not fault.hit, f"failure {n} went unnoticed"
            hit, _ = fault.hit, fault.at(0)
            sched.reset()
            compute(chain, sched)
        assert used() == start
        if not hit:
            assert n > 1, "nothing was made to fail"
            return
    raise AssertionError("each of 200 calls failed")


def test_after_an_abort_nothing_of_it_is_overwritten(stack):
    backends: list[Backend] = [stack.enter_context(d.init_backend()) for d in FakeReg(2).devices]
    backends.append(stack.enter_context(ggmlb.init_by_name("CPU")))
    chain = Chain(stack, backends, n_layers=6)
    with Scheduler(backends, parallel=True, sanitize=True) as sched:
        compute(chain, sched)
        for _ in range(2):
            backends[-1].abort_callback = lambda: True  # asked after two layers were queued
            assert sched.graph_compute_async(chain.graph) is Status.ABORTED
            backends[-1].abort_callback = None
            compute(chain, sched)


@pytest.mark.parametrize("which", ["eval", "abort"])
@pytest.mark.parametrize("device", ["CPU", "LLVM", "OpenCL0"])
def test_an_error_of_a_callback_is_the_users_own(device, which, stack):
    backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in dict.fromkeys((device, "CPU"))]
    chain = Chain(stack, backends)

    def fail(*_: object) -> bool:
        raise KeyError("mine")

    with Scheduler(backends) as sched:
        for callback in (fail, None):
            if which == "eval":
                sched.set_eval_callback(callback)
            else:
                backends[0].abort_callback = callback
            with pytest.raises(KeyError, match="mine") if callback else nullcontext():
                compute(chain, sched)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [("CPU",), ("OpenCL0", "CPU")], ids="+".join)
def test_two_schedulers_in_two_threads(devices, stack):
    """Each thread has streams of its own on the same devices, and a graph of its own."""
    chains = []
    for _ in range(2):
        backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in devices]
        chains.append((Chain(stack, backends, n_layers=6), backends))
    together = threading.Barrier(2)
    failed: list[BaseException] = []

    def work(chain: Chain, backends: list[Backend]) -> None:
        try:
            with Scheduler(backends) as sched:
                together.wait()
                for _ in range(25):
                    compute(chain, sched)
                    for _ in range(4):
                        chain.x.set_array(X)
                        sched.graph_compute_async(chain.graph)
                    sched.synchronize()
                    np.testing.assert_allclose(chain.y.to_numpy(), chain.expected(X), rtol=1e-4, atol=1e-5)
                    sched.reset()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in chains]
    with ggmlb.sanitize():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("device", ["CPU", "OpenCL0", "LLVM"])
def test_two_threads_may_compute_on_one_stream(device, stack):
    """They take turns: what they plan and compute has the stream's scratch memory to itself."""
    backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in (device, "CPU")]
    weights, random = ggmlb.Context(), np.random.default_rng(0)
    w, w2 = (weights.new_tensor(dtype, (256, 256)) for dtype in ("q4_0", "f16"))
    stack.enter_context(ggmlb.alloc_ctx_tensors(weights, backends[0]))
    for weight in (w, w2):
        weight.set_array(random.normal(size=(256, 256)))

    def results(seed: int, n: int) -> list[np.ndarray]:
        c, x_values = ggmlb.Context(), np.random.default_rng(seed).normal(size=(32, 256))
        x = y = c.set_input(c.new_tensor("f32", (256, 32)))
        for _ in range(3):
            y = c.rms_norm(c.mul_mat(w2, c.mul_mat(w, y)), 1e-5)
        graph = ggmlb.Graph().build_forward_expand(c.set_output(y))
        found = []
        with Scheduler(backends) as sched:
            for _ in range(n):
                sched.alloc_graph(graph)
                x.set_array(x_values)
                sched.graph_compute(graph)
                found.append(y.to_numpy())
        return found

    alone = [results(seed, 1)[0] for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(results, seed, 10) for seed in range(2)]
        for expected, found in zip(alone, both, strict=True):
            assert all(np.array_equal(expected, y) for y in found.result(600))


def test_a_scheduler_goes_on_without_a_device_that_is_lost(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its options and requests; weights that were there are placed again, for the same graph."""
    chain, gpu0, gpu1, cpu = bench.chain(), *bench.backends
    sched = Scheduler(bench.backends, strict=True, keep_graphs=True)
    last = chain.graph.nodes[-1]
    sched.set_tensor_backend(last, cpu)
    sched.set_tensor_backend(chain.graph.nodes[-2], gpu1)
    compute(chain, sched)

    def lose() -> None:
        raise ggmlb.DeviceLostError("it is lost", devices=(gpu1.name, "of the same machine"))

    monkeypatch.setattr(gpu1, "_synchronize", lose)
    with pytest.raises(ggmlb.DeviceLostError) as raised:
        compute(chain, sched)
    with sched.without(*raised.value.devices) as rest:
        assert sched.is_freed
        assert rest.backends == (gpu0, cpu)
        for weight, values in zip(chain.weights, chain.values, strict=True):
            if weight.buffer.buft.device is gpu1.device:
                weight.buffer.free()
                bench.stack.enter_context(alloc_tensors([weight], gpu0.default_buffer_type)).usage = "WEIGHTS"
                weight.set_array(values)
        compute(chain, rest)
        assert rest.get_tensor_backend(last) is cpu
        assert {p.device for p in rest.placement} == {gpu0.name, cpu.name}
        with pytest.raises(ggmlb.ArgumentError, match=rf"the scheduler has {gpu0.name}, CPU; name some"):
            rest.without("GPU9")
        with pytest.raises(ggmlb.ArgumentError, match="none would be left"):
            rest.without(gpu0.name, "CPU")


def test_memory_is_freed_though_queued_work_failed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, (gpu0, *_) = bench.chain(), bench.backends
    sched = Scheduler(bench.backends)
    compute(chain, sched)
    buffers = sched.buffers

    def fail() -> None:
        raise ggmlb.BackendError("it failed")

    with monkeypatch.context() as patch, pytest.raises(ggmlb.BackendError, match="it failed"):
        patch.setattr(gpu0, "_synchronize", fail)
        sched.free()
    assert sched.is_freed
    assert all(buffer.is_freed for buffer in buffers)
    with monkeypatch.context() as patch, pytest.raises(ggmlb.BackendError, match="it failed"):
        patch.setattr(gpu0, "_synchronize", fail)
        gpu0.free()
    assert gpu0.is_freed
