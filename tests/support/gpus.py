"""The first device of each backend with kernels, for what all must do; and how to hold up GPUs' streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ggmlb import (
    Backend,
    BackendUnavailable,
    Context,
    DType,
    Graph,
    Tensor,
    alloc_ctx_tensors,
    device_by_name,
)
from ggmlb.backends.cuda import CudaReg

OPENCL = pytest.param("OpenCL0", id="opencl")
LLVM = pytest.param("LLVM", id="llvm")
GGML = pytest.param("ggml:CPU", id="ggml")
PLAYED = pytest.param("played", id="played")
CARD = pytest.param("CUDA0", id="card", marks=pytest.mark.gpu)
CUDA = (PLAYED, CARD)
"""The host that plays CUDA's driver, and where there is one, the card."""


SPIN = r"""
extern "C" __global__ void spin(long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""


def host_driver(**params: Any) -> Any:
    """Return the simulated driver; a machine with a card needs neither NVRTC's wheel nor a C++ compiler."""
    from tests.support.ptx.machine import why_not

    pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")
    if why := why_not():
        pytest.skip(why)
    from tests.support.host_driver import HostDriver

    return HostDriver(**params)


def first(kind: str) -> Any:
    """Return the device of that name, or the first of a simulated driver; without a ggml library, skip."""
    try:
        return CudaReg(host_driver()).devices[0] if kind == "played" else device_by_name(kind)
    except BackendUnavailable as why:
        if not kind.startswith("ggml"):
            raise
        pytest.skip(str(why))


def device_fixture(*kinds: Any) -> Any:
    """Make the fixture `device` of a module: one of each kind."""

    @pytest.fixture(scope="module", params=kinds)
    def device(request: pytest.FixtureRequest) -> Any:
        return first(request.param)

    return device


def is_played(backend: Backend) -> bool:
    """Whether the stream is of the simulated driver: one thread's at a time, and idle until waited for."""
    driver = getattr(backend.device, "driver", None)
    return type(driver).__name__ == "HostDriver"


def hold_up(backend: Any, milliseconds: int = 30) -> None:
    """Keep the stream busy. The simulated driver's streams need no holding up: they run when waited for."""
    if is_played(backend):
        return
    import cupy

    class Stream:
        """The stream as CuPy takes it from other libraries."""

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, backend.stream.handle

    kernel = cupy.RawKernel(SPIN, "spin")
    with backend.device.on(), cupy.cuda.Stream.from_external(Stream()):
        kernel((1,), (1,), (cupy.int64(milliseconds * 2_000_000),))


class Gate:
    """Holds up an OpenCL queue until it is opened."""

    closed: list[Gate] = []  # noqa: RUF012 (of all gates)

    def __init__(self, backend: Any) -> None:
        import pyopencl as cl

        self._event = cl.UserEvent(backend.device.context)
        cl.enqueue_barrier(backend.queue, wait_for=[self._event])
        self.closed.append(self)

    def open(self) -> None:
        """Let the queue go on."""
        self.closed.remove(self)
        self._event.set_status(0)  # CL_COMPLETE

    def open_later(self) -> threading.Timer:
        """Let the queue go on in a while, by another thread."""
        timer = threading.Timer(0.1, self.open)
        timer.start()
        return timer


@contextmanager
def held(backend: Any) -> Iterator[None]:
    """Keep a stream from the work that is queued in the block; on a card, for some milliseconds."""
    if backend.device.reg.name != "OpenCL":
        hold_up(backend)
        yield
        return
    gate = Gate(backend)
    try:
        yield
    finally:
        gate.open()


def is_reached(device: Any, event: int) -> bool:
    """Whether a device's event is reached, by its handle."""
    with device.on():
        return bool(device.driver.event_done(event))


def leaf(backend: Backend, n_elements: int = 1000) -> Tensor:
    """Return a row of floats in the stream's memory."""
    ctx = Context()
    made = ctx.new_tensor(DType.F32, (n_elements,))
    alloc_ctx_tensors(ctx, backend)
    return made


def scaled(backend: Backend, factor: float = 2.0, n: int = 1000) -> tuple[Tensor, Tensor, Graph]:
    """Return a row of floats, its multiple, and the graph that computes it, in the stream's memory."""
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (n,))
    y = ctx.scale(a, factor)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)
