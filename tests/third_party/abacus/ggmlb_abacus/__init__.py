"""Abacus: a device on host memory that adds, multiplies and scales float32 with NumPy.

The least that a backend needs: a registration, a device, a buffer type, a buffer, and a stream whose
plan is a list of calls. It uses nothing of ggmlb but the public names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ggmlb import (
    Backend,
    BackendReg,
    Buffer,
    BufferType,
    Device,
    DeviceType,
    DType,
    Graph,
    GraphPlan,
    Op,
    Status,
    Tensor,
)

ALIGNMENT = 64


class AbacusBuffer(Buffer):
    """Bytes in host memory."""

    def __init__(self, buft: AbacusBufferType, nbytes: int) -> None:
        super().__init__(buft, nbytes)
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._memory = memory[start : start + nbytes]

    @property
    def base(self) -> np.ndarray:
        """The memory itself."""
        return self._memory

    def _bytes(self, tensor: Tensor, offset: int, size: int) -> np.ndarray:
        return self._memory[tensor.offset + offset :][:size]

    def _set_tensor(self, tensor: Tensor, data: np.ndarray, offset: int) -> None:
        self._bytes(tensor, offset, data.size)[:] = data

    def _get_tensor(self, tensor: Tensor, out: np.ndarray, offset: int) -> None:
        out[:] = self._bytes(tensor, offset, out.size)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._bytes(tensor, offset, size)[:] = value

    def _clear(self, value: int) -> None:
        self._memory[:] = value


class AbacusBufferType(BufferType):
    """Host memory, in the hands of this backend."""

    is_host = True

    def __init__(self, device: AbacusDevice) -> None:
        super().__init__(device, "Abacus", ALIGNMENT)

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        try:
            return AbacusBuffer(self, nbytes)
        except MemoryError as error:
            raise self.out_of_memory(nbytes, str(error)) from None


class AbacusDevice(Device):
    """The one device."""

    name = "Abacus0"
    description = "NumPy, one bead at a time"
    type = DeviceType.ACCEL
    memory = (0, 0)

    def __init__(self, reg: AbacusReg) -> None:
        self._reg = reg
        self._buft = AbacusBufferType(self)

    @property
    def reg(self) -> AbacusReg:
        """Its registration."""
        return self._reg

    @property
    def buffer_type(self) -> BufferType:
        """Host memory."""
        return self._buft

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream; there are no parameters."""
        self.check_params(params)
        return AbacusBackend(self)

    def supports_buft(self, buft: BufferType) -> bool:
        """Any host memory, also that of other backends."""
        return buft.is_host

    def declines(self, op: Tensor) -> str | None:
        """It takes contiguous float32, and the ops that have a step; views need none."""
        if op.op in (Op.NONE, Op.RESHAPE, Op.VIEW, Op.PERMUTE, Op.TRANSPOSE):
            return None
        if op.op not in FUNCTIONS:
            return f"an abacus has no beads for {op.op}"
        for tensor in (op, *op.src):
            if tensor.dtype != DType.F32 or not tensor.is_contiguous():
                return f"{tensor.describe()} is not contiguous float32"
            if any(n not in (1, whole) for n, whole in zip(tensor.ne, op.ne, strict=True)):
                return f"{tensor.describe()} would have to be repeated"  # NumPy only broadcasts ones
        return None


FUNCTIONS = {Op.ADD: np.add, Op.MUL: np.multiply, Op.SQR: np.square}


def _view(tensor: Tensor) -> np.ndarray:
    memory = tensor.buffer.base[tensor.offset : tensor.offset + tensor.nbytes]
    return memory.view(np.float32).reshape(tensor.ne[::-1])


class AbacusPlan(GraphPlan):
    """One bound call per node."""

    def __init__(self, backend: AbacusBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self.steps = [
            partial(FUNCTIONS[node.op], *map(_view, node.src), _view(node))
            for node in graph.nodes
            if node.op in FUNCTIONS
        ]


class AbacusBackend(Backend):
    """A stream that is done when the call returns."""

    name = "Abacus"
    guid = "third-party-abacus"

    def _plan(self, graph: Graph) -> GraphPlan:
        return AbacusPlan(self, graph)

    def _compute(self, plan: AbacusPlan) -> Status:
        for step in plan.steps:
            step()
        return Status.SUCCESS


class AbacusReg(BackendReg):
    """The registration."""

    name = "Abacus"

    def __init__(self) -> None:
        self._devices = [AbacusDevice(self)]

    @property
    def devices(self) -> Sequence[Device]:
        """The one device."""
        return self._devices


def score() -> int:
    """Any machine will do."""
    return 1


@cache
def backend_reg() -> AbacusReg:
    """What the entry point names."""
    return AbacusReg()
