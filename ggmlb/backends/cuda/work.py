"""Steps, the lowered form of nodes, and their binding to addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.common.kinds import Item
from ggmlb.backends.cuda.buffer import CudaBuffer
from ggmlb.backends.cuda.driver import CopyKind
from ggmlb.backends.cuda.lowering import CudaLowering, Request
from ggmlb.backends.cuda.program import layout
from ggmlb.backends.gpu import Launch, kinds
from ggmlb.backends.gpu.scratch import place_pieces
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer
from ggmlb.parallel import row_split

if TYPE_CHECKING:
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.driver import Call

UncapturedCall: TypeAlias = Callable[[int], None]
"""A call on a stream that cannot be captured into a CUDA graph, for example because it waits."""


class Step(NamedTuple):
    """A call, and its key without arguments; `None` if it cannot be captured."""

    call: Call
    key: Hashable | None


@dataclass(slots=True)
class Part:
    """A node, or a group of fused nodes, with its steps.

    Attributes:
        nodes: The computed nodes, the result last.
        steps: Its steps.
    """

    nodes: tuple[Tensor, ...]
    steps: list[Step]


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


class Bound:
    """The steps of a graph, bound to addresses.

    Attributes:
        parts: The nodes with their steps.
        buffers: All buffers that the steps use.
        has_indices: Whether steps read indices.
    """

    def __init__(self, plan: object, backend: CudaBackend, graph: Graph) -> None:
        self._backend, device = backend, backend.device
        items = fuse(graph, backend.can_fuse)
        by = CudaLowering(device.target, device.facts.capability, device.has_blas)
        found = kinds.BoundItems(items, device.kinds, by, by, _is_apart)
        device.driver.prepare([r for r, _ in found.new if isinstance(r, Launch)], device.index)
        nbytes, offsets = place_pieces(found.pieces)
        found.give(
            backend.arena.get(backend, nbytes) if nbytes else None,
            offsets,
            backend.bad_indices.bind(plan, found.records, backend),
        )
        self.has_indices = bool(found.records)
        self.buffers: dict[int, CudaBuffer] = {}
        for buffer in found.memory:
            if buffer is not None:
                self._use(buffer)
        values, starts = found.blocks({b: b.address for b in self.buffers.values()})
        blocks = values.data.cast("B")
        steps = [
            self._step(request, key, blocks[start:end])
            for (request, key), start, end in zip(found.steps, starts, starts[1:], strict=False)
        ]
        self.parts: list[Part] = []
        done = 0
        for item, n in zip(items, found.n_steps, strict=True):
            nodes = item.nodes if isinstance(item, Group) else (item,)
            if _is_apart(item):
                self.parts.append(Part(nodes, [Step(self._split_product(item), None)]))
            elif n:
                self.parts.append(Part(nodes, steps[done : done + n]))
            done += n

    def _step(self, request: Request, key: Hashable, block: memoryview) -> Step:
        device = self._backend.device
        if isinstance(request, Launch):
            own = bytes(block[: layout(request.kernel).size])  # without the padding to whole words
            return Step(device.driver.bind(request, own, device.index), key)
        words = block.cast("q").tolist()
        starts = [base + offset for base, offset in zip(words[::2], words[1::2], strict=True)]
        addresses = dict(zip(map(id, request.mems), starts, strict=True))
        return Step(self._backend.blas.bind(request, lambda mem: addresses[id(mem)], self._upload), key)

    def _split_product(self, node: Tensor) -> UncapturedCall:
        product = row_split.RowSplitProduct(node, self._backend, self._backend.helpers)
        for buffer in product.buffers:
            self._use(buffer)
        return lambda stream: product.run()

    def _use(self, buffer: Buffer) -> CudaBuffer:
        """Record a buffer used by the steps."""
        if not isinstance(buffer, CudaBuffer):
            raise BackendError(f"{self._backend.name} cannot reach memory of {buffer!r}")
        self.buffers[id(buffer)] = buffer
        return buffer

    def _upload(self, table: npt.NDArray[np.uint64]) -> int:
        """Copy a table to device memory owned by the plan."""
        buffer = self._use(allocate(self._backend, table.nbytes))
        buffer.copy("write a table of addresses", CopyKind.TO_DEVICE, 0, table)
        return buffer.address


def _is_apart(item: Item) -> TypeGuard[Tensor]:
    """Whether a node is a product with a split weight, which several devices compute."""
    return isinstance(item, Tensor) and row_split.is_split(item) and not item.is_empty
