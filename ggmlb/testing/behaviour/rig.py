"""Rig, the fixture of the behaviour checks: a device, its streams, and graphs with known results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import DeviceType
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, Device, PartedBuffer, tensor_alloc
from ggmlb.interface.registry import device_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.alloc.context import padded

Floats = npt.NDArray[np.float32]

SMALL_BUSY, LARGE_BUSY = 1 << 20, 1 << 24
"""Elements of an op that keeps a CPU, or a GPU, busy."""
BUSY_STEPS = 24
"""Number of ops queued to keep a stream busy."""


class Fault(AssertionError):
    """The device violates a guarantee; the message says what it did."""


class NotApplicable(Exception):
    """The device lacks the feature of the check; the message names it."""


def expect(condition: bool, otherwise: str) -> None:
    """Raise a `Fault` with the message `otherwise` unless the condition holds."""
    if not condition:
        raise Fault(otherwise)


def expect_equal(got: npt.ArrayLike, right: npt.ArrayLike, what: str) -> None:
    """Raise a `Fault` that shows the first different element of `what`, unless `got` equals `right`."""
    a, b = np.asarray(got), np.asarray(right)
    if a.shape != b.shape:
        raise Fault(f"{what}: the shape is {a.shape}; it must be {b.shape}")
    wrong = np.flatnonzero((a != b).reshape(-1))
    if wrong.size:
        i = int(wrong[0])
        told = f"element {i} is {a.reshape(-1)[i]}, {b.reshape(-1)[i]} is right"
        raise Fault(f"{what}: {told} ({wrong.size} of {a.size} are wrong)")


def expect_error(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    """Raise a `Fault` unless the call raises an error of that kind."""
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise Fault(f"{what} must raise {kind.__name__}, it raised {type(error).__name__}: {error}") from None
    raise Fault(f"{what} must raise {kind.__name__}, it raised nothing")


@dataclass
class Doubling:
    """A graph that computes `y = 2 x`, in place or not, and its tensors."""

    x: Tensor
    y: Tensor
    graph: Graph
    buffer: Buffer


class Rig:
    """A device under test, with streams and buffers that are freed at the end of a check.

    Attributes:
        device: The device.
        stream: A stream on it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._streams: list[Backend] = []
        self._buffers: list[Buffer] = []
        self.stream = self.new_stream()

    def new_stream(self, device: Device | None = None) -> Backend:
        """Open another stream, on this device by default."""
        stream = (device or self.device).init_backend()
        self._streams.append(stream)
        return stream

    def cpu(self) -> Backend:
        """Open a stream on the CPU."""
        return self.new_stream(device_by_name("CPU"))

    def keep(self, buffer: Buffer) -> Buffer:
        """Register a buffer to be freed at the end of the check, unless freed before; return it."""
        self._buffers.append(buffer)
        return buffer

    def close(self) -> None:
        """Free all streams and buffers of the check that are not freed yet."""
        for stream in self._streams:
            if not stream.is_freed:
                stream.free()
        for buffer in self._buffers:
            if not buffer.is_freed:
                buffer.free()

    # -- tensors and graphs --------------------------------------------------------------------

    def tensor(self, dtype: DType, *ne: int, stream: Backend | None = None) -> Tensor:
        """Return a new tensor, alone in a buffer of the stream's device, freed after the check."""
        ctx = Context()
        tensor = ctx.new_tensor(dtype, ne, "t")
        self.keep(alloc_ctx_tensors(ctx, stream or self.stream))
        return tensor

    def neighbours(self, nbytes: int, n: int = 3) -> list[Tensor]:
        """Return `n` tensors of `nbytes` bytes each, adjacent in one buffer, in order of address."""
        ctx = Context()
        tensors = [ctx.new_tensor(DType.I8, (nbytes,), f"t{i}") for i in range(n)]
        self.keep(alloc_ctx_tensors(ctx, self.stream))
        return tensors

    def over(self, buffer: Buffer) -> Tensor:
        """Return a tensor over all bytes of a buffer."""
        if isinstance(buffer, PartedBuffer):
            unsupported("its memory is on several devices, each of which is tested separately")
        whole = Context().new_tensor(DType.I8, (buffer.size,), "whole")
        tensor_alloc(buffer, whole, 0)
        return whole

    def room(self, tensor: Tensor) -> int:
        """Return the bytes that a tensor takes in device memory, alignment included."""
        buft = self.stream.default_buffer_type
        return padded(buft.alloc_size(tensor), buft.alignment)

    def double(self, ctx: Context, x: Tensor, *, inplace: bool = False) -> Tensor:
        """Return `2 x`, by an op that the device computes."""
        for op in ("scale", "add"):
            method = getattr(ctx, f"{op}_inplace" if inplace else op)
            y: Tensor = method(x, 2.0 if op == "scale" else x)
            if self.device.supports_op(y):
                return y
            ctx.tensors.remove(y)
        raise NotApplicable("the device computes neither SCALE nor ADD of f32")

    def doubling(
        self, n: int = 1000, *, stream: Backend | None = None, inplace: bool = False, times: int = 1
    ) -> Doubling:
        """Return a graph that doubles `n` elements, `times` times, in memory of the stream's device."""
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (n,), "x")
        y = x
        for _ in range(times):
            y = self.double(ctx, y, inplace=inplace)
        y.name = "y"
        buffer = self.keep(alloc_ctx_tensors(ctx, stream or self.stream))
        return Doubling(x, y, Graph().build_forward_expand(y), buffer)

    @property
    def n_busy(self) -> int:
        """Number of elements with which one op keeps the device busy for a while."""
        is_large = self.device.type in (DeviceType.GPU, DeviceType.IGPU)
        return LARGE_BUSY if is_large and self.device.memory[0] > 1 << 31 else SMALL_BUSY

    def busy(self, stream: Backend | None = None) -> None:
        """Queue work that keeps the stream busy."""
        stream = stream or self.stream
        work = self.doubling(self.n_busy, stream=stream, inplace=True, times=BUSY_STEPS)
        stream.set_tensor_async(work.x, np.zeros(self.n_busy, np.float32))
        stream.graph_compute_async(work.graph)


def numbers(n: int, start: int = 1) -> Floats:
    """Return `n` small whole numbers (2, 3, ... for `start` 1), exact in float32 even if doubled often."""
    return (np.arange(start, start + n) % 251 + 1).astype(np.float32)


def unsupported(why: str) -> NoReturn:
    """Raise `NotApplicable`."""
    raise NotApplicable(why)


Check = Callable[[Rig], None]

CHECKS: dict[str, dict[str, Check]] = {}
"""The checks by group and name; a check's docstring states the guarantee."""


def check(group: str) -> Callable[[Check], Check]:
    """Return a decorator that registers a function, by its name, as a behaviour check in `group`."""

    def register(fn: Check) -> Check:
        CHECKS.setdefault(group, {})[fn.__name__] = fn
        return fn

    return register
