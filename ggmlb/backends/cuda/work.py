"""Steps, the lowered form of nodes, and their binding to addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.buffer import CudaBuffer
from ggmlb.backends.cuda.driver import CopyKind
from ggmlb.backends.cuda.program import argument_block
from ggmlb.backends.gpu import BadIndex, Launch, Scratch, place
from ggmlb.backends.gpu.bad_index import PlanSlots
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.driver import Call
    from ggmlb.backends.cuda.gemm import Gemm

UncapturedCall: TypeAlias = Callable[[int], None]
"""A call on a stream that cannot be captured into a CUDA graph, for example because it waits."""

Request: TypeAlias = "Launch | Gemm | UncapturedCall"


class Step(NamedTuple):
    """A call, and its key without arguments; `None` if it cannot be captured."""

    call: Call
    key: Hashable | None


@dataclass(slots=True)
class Part:
    """A node, or a group of fused nodes, with its steps.

    Attributes:
        nodes: The computed nodes, the result last.
        requests: Its launches before binding.
        steps: Its steps after binding.
    """

    nodes: tuple[Tensor, ...]
    requests: list[Request]
    steps: list[Step] = field(default_factory=list)


class Arena:
    """The scratch memory of a stream, shared by its plans, which run in order.

    Memory that is too small is replaced; plans bound to it keep it.
    """

    def __init__(self) -> None:
        self._buffer: CudaBuffer | None = None

    def get(self, backend: CudaBackend, nbytes: int) -> CudaBuffer:
        """Return memory of at least `nbytes`, with undefined contents."""
        if self._buffer is None or self._buffer.size < nbytes:
            self._buffer = allocate(backend, nbytes)
        return self._buffer


def allocate(backend: CudaBackend, nbytes: int) -> CudaBuffer:
    """Allocate memory of the backend's device for its stream."""
    buffer = backend.device.buffer_type.alloc_buffer(nbytes)
    assert isinstance(buffer, CudaBuffer)
    return buffer


class Binder:
    """Binds requests to addresses.

    Attributes:
        buffers: All buffers that the steps use.
        slots: Slots for bad indices of the steps.
    """

    def __init__(self, backend: CudaBackend) -> None:
        self.buffers: dict[int, CudaBuffer] = {}
        self._backend = backend
        self._arena = 0
        self._offsets: dict[Scratch, int] = {}
        self.slots = PlanSlots({})

    def bind(self, parts: list[Part]) -> None:
        """Set the steps of all parts, in order of execution."""
        nbytes, self._offsets = place([_mems(r) for part in parts for r in part.requests])
        if nbytes:
            self._arena = self.use(self._backend.arena.get(self._backend, nbytes)).address
        launches = [r for part in parts for r in part.requests if isinstance(r, Launch)]
        self._backend.device.driver.prepare(launches, self._backend.device.index)
        args = [arg.buffer for launch in launches for arg in launch.args if isinstance(arg, Mem)]
        records = [buffer for buffer in args if isinstance(buffer, BadIndex)]
        self.slots = self._backend.bad_indices.take(records, self._backend)
        for part in parts:
            part.steps = [self._step(request) for request in part.requests]
            part.requests = []

    def use(self, buffer: CudaBuffer) -> CudaBuffer:
        """Record a buffer used by the steps."""
        self.buffers[id(buffer)] = buffer
        return buffer

    def _step(self, request: Request) -> Step:
        if isinstance(request, Launch):
            device = self._backend.device
            block = argument_block(request, self._base)
            key = request.kernel.name, request.defines, request.wg
            return Step(device.driver.bind(request, block, device.index), key)
        if callable(request):
            return Step(request, None)
        call = self._backend.blas.bind(request, self._address, self._upload)
        # The library may use other kernels for other shapes.
        shape = request.m, request.n, request.k, request.count, bool(request.places)
        return Step(call, ("gemm", request.a.dtype, *shape))

    def _base(self, mem: Mem) -> int:
        """Return the base address of a mem's memory."""
        if isinstance(mem.buffer, Scratch):
            return self._arena + self._offsets[mem.buffer]
        if isinstance(mem.buffer, BadIndex):
            slot = self.slots.places[mem.buffer]
            return self.use(cast("CudaBuffer", slot.block.buffer)).address + slot.offset
        if not isinstance(mem.buffer, CudaBuffer):
            raise BackendError(f"{self._backend.name} cannot reach memory of {mem.buffer!r}")
        return self.use(mem.buffer).address

    def _address(self, mem: Mem) -> int:
        return self._base(mem) + mem.offset

    def _upload(self, table: npt.NDArray[np.uint64]) -> int:
        """Copy a table to device memory owned by the plan."""
        buffer = self.use(allocate(self._backend, table.nbytes))
        buffer.copy("write a table of addresses", CopyKind.TO_DEVICE, 0, table)
        return buffer.address


def _mems(request: Request) -> list[Mem | int | float]:
    if isinstance(request, Launch):
        return list(request.args)
    return [] if callable(request) else list(request.mems)
