"""Abacus: a device on host memory that adds, multiplies and squares float32 with NumPy.

The least that a backend needs: a registration, a device, a buffer type, a buffer, and a stream whose
plan is a list of calls. It uses nothing of ggmlb but the public names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

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

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ALIGNMENT = 64


class AbacusBuffer(Buffer):
    """Bytes in host memory."""

    def __init__(self, buft: AbacusBufferType, nbytes: int) -> None:
        super().__init__(buft, nbytes)
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._memory: Bytes = memory[start : start + nbytes]

    @property
    def base(self) -> Bytes:
        """The memory itself."""
        return self._memory

    def _bytes(self, tensor: Tensor, offset: int, size: int) -> Bytes:
        return self._memory[tensor.offset + offset :][:size]

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        self._bytes(tensor, offset, data.size)[:] = data

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        out[:] = self._bytes(tensor, offset, out.size)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._bytes(tensor, offset, size)[:] = value

    def _clear(self, value: int) -> None:
        self._memory[:] = value


class AbacusBufferType(BufferType):
    """Host memory of this backend."""

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
    description = "NumPy on the host"
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
        """Return why a node is declined: not contiguous float32, or no function; views need none."""
        if op.op in (Op.NONE, Op.RESHAPE, Op.VIEW, Op.PERMUTE, Op.TRANSPOSE):
            return None
        if op.op not in FUNCTIONS:
            return f"no function for {op.op_desc()}"
        for tensor in (op, *_operands(op)):
            if tensor.dtype != DType.F32 or not tensor.is_contiguous():
                return f"{tensor.describe()} is not contiguous float32"
            if any(n not in (1, whole) for n, whole in zip(tensor.ne, op.ne, strict=True)):
                return f"{tensor.describe()} would have to be repeated"  # NumPy only broadcasts ones
        return None


FUNCTIONS: dict[Op, Callable[..., Any]] = {Op.ADD: np.add, Op.MUL: np.multiply, Op.SQR: np.square}


def _operands(node: Tensor) -> list[Tensor]:
    return [operand for operand in node.src if operand is not None]


def _view(tensor: Tensor) -> Floats:
    memory = tensor.placed("compute").base[tensor.offset : tensor.offset + tensor.nbytes]
    floats: Floats = memory.view(np.float32).reshape(tensor.ne[::-1])
    return floats


class AbacusPlan(GraphPlan):
    """One bound call per node."""

    def __init__(self, backend: AbacusBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self.steps = [
            partial(FUNCTIONS[node.op], *map(_view, _operands(node)), _view(node))
            for node in graph.nodes
            if node.op in FUNCTIONS
        ]


class AbacusBackend(Backend):
    """A stream that is done when the call returns."""

    name = "Abacus"
    guid = "third-party-abacus"

    def _plan(self, graph: Graph) -> GraphPlan:
        return AbacusPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        assert isinstance(plan, AbacusPlan)
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
    """Return a fitness above 0: it runs on any machine."""
    return 1


@cache
def backend_reg() -> AbacusReg:
    """Return the registration: the function that the entry point names."""
    return AbacusReg()
