"""What a plan is made of while nodes are lowered: calls, and the memory they use beside tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.cuda.arguments import argument_block
from ggmlb.backends.cuda.buffer import ALIGNMENT, CudaBuffer
from ggmlb.kernels import Mem
from ggmlb.tensor import contiguous_nb

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.driver import Call
    from ggmlb.dtypes import DType
    from ggmlb.kernels import Launch
    from ggmlb.tensor import Ne, Tensor

LEAST_SCRATCH = 1 << 20


class Step(NamedTuple):
    """A call, and what it is but for its arguments; `None` where it cannot be part of a CUDA graph."""

    call: Call
    key: Hashable | None


@dataclass(slots=True)
class Part:
    """The steps of a node, or of nodes that are computed together.

    Attributes:
        nodes: What is computed, the result last.
        steps: How.
    """

    nodes: tuple[Tensor, ...]
    steps: list[Step]


class Scratch:
    """Scratch memory of a stream: its steps run one after another, so nodes and plans share it.

    Memory that is too small is replaced, not grown: plans that were bound to it keep it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._buffer: CudaBuffer | None = None
        self._used = 0

    def restart(self) -> None:
        """Let all of it be taken again."""
        self._used = 0

    def take(self, nbytes: int) -> tuple[CudaBuffer, int]:
        """Return a buffer and the offset of `nbytes` in it, undefined, valid until `restart`."""
        buffer = self._buffer
        if buffer is None or self._used + nbytes > buffer.size:
            size = max(nbytes, 2 * buffer.size if buffer else LEAST_SCRATCH)
            new = self._device.buffer_type.alloc_buffer(size)
            assert isinstance(new, CudaBuffer)
            self._buffer, self._used, buffer = new, 0, new
        start = self._used
        self._used = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        return buffer, start


class Work:
    """Collects the parts of a plan.

    Attributes:
        device: The device it is for.
        parts: What was lowered so far.
        buffers: All memory that the steps use.
    """

    def __init__(self, device: CudaDevice, scratch: Scratch) -> None:
        self.device = device
        self.parts: list[Part] = []
        self.buffers: dict[int, CudaBuffer] = {}
        self._scratch = scratch

    def begin(self, *nodes: Tensor) -> None:
        """Begin the next node; scratch of the one before may be taken again."""
        self.parts.append(Part(nodes, []))
        self._scratch.restart()

    def launch(self, launch: Launch) -> None:
        """Add a kernel's launch."""
        for arg in launch.args:
            if isinstance(arg, Mem):
                self.use(arg.buffer)
        call = self.device.driver.bind(launch, argument_block(launch), self.device.index)
        self.call(call, (launch.kernel.name, launch.defines, launch.wg))

    def call(self, call: Call, key: Hashable | None) -> None:
        """Add a call; `key` tells it from others, apart from arguments and sizes.

        With a key of `None` it runs outside CUDA graphs: it waits, allocates, or does what capture refuses.
        """
        self.parts[-1].steps.append(Step(call, key))

    def use(self, buffer: object) -> None:
        """Note that the steps use a buffer."""
        if isinstance(buffer, CudaBuffer):
            self.buffers[id(buffer)] = buffer

    def scratch(self, dtype: DType, ne: Ne) -> Mem:
        """Return packed scratch of undefined contents, this node's own."""
        nb = contiguous_nb(dtype, ne)
        buffer, offset = self._scratch.take(nb[3] * ne[3])
        self.use(buffer)
        return Mem(buffer, offset, dtype, ne, nb)

    def own(self, dtype: DType, ne: Ne) -> Mem:
        """Return packed memory of undefined contents that is the plan's own, to share between nodes."""
        nb = contiguous_nb(dtype, ne)
        buffer = self.device.buffer_type.alloc_buffer(nb[3] * ne[3])
        self.use(buffer)
        return Mem(buffer, 0, dtype, ne, nb)
