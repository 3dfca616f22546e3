"""Where a device's programs lie: in its memory, sharded over several devices, or with weights elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggmlb.core.enums import BufferUsage
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType, view_init
from ggmlb.parallel.meta import MetaBuffer, MetaBufferType
from ggmlb.runtime.alloc import alloc_tensors
from ggmlb.testing.guarded import GuardedMemory, Held, Image, Memory, Watch, results

if TYPE_CHECKING:
    from ggmlb.testing.programs import Built


def memory_of(buft: BufferType) -> Memory:
    """Return memory of a device's own type for programs."""
    return DealtMemory(buft) if isinstance(buft, MetaBufferType) else GuardedMemory(buft)


class DealtMemory:
    """Memory of a meta device: inputs are sharded as weights are, and each device's part is watched.

    Args:
        buft: The meta device's.
    """

    def __init__(self, buft: MetaBufferType) -> None:
        self._buft = buft
        self._guarded = GuardedMemory(buft)
        self._inputs: Buffer | None = None

    def place(self, built: Built) -> Image:
        """Place a program; `Image.upload` writes its inputs."""
        self._free_inputs()
        leafs = [built.tensors[leaf.name] for leaf in built.case.leafs]
        self._inputs = alloc_tensors(leafs, self._buft)
        roots = [t for t in built.ctx.tensors if t.view_src is None]
        _, results_buffer, end = self._guarded.lay([t for t in roots if t.buffer is None])
        for tensor in built.ctx.tensors:
            if tensor.view_src is not None:
                view_init(tensor)
        written = {t.view_src or t for t in results(built)}
        watches = [
            *_watched(self._inputs, None, roots, written),
            *_watched(results_buffer, end, roots, written),
        ]
        return Image(built, watches)

    def free(self) -> None:
        """Give the memory back."""
        self._free_inputs()
        self._guarded.free()

    def _free_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.free()
        self._inputs = None


def _watched(
    buffer: Buffer, size: int | None, roots: Iterable[Tensor], written: set[Tensor]
) -> Iterable[Watch]:
    """Watch each device's part of a buffer, of which the first `size` bytes are used, or all."""
    assert isinstance(buffer, MetaBuffer)
    here = [(t, buffer.slices(t)) for t in roots if t.buffer is buffer]
    for j, part in enumerate(buffer.parts):
        held = [Held(t, slices[j].offset, slices[j].nbytes) for t, slices in here]
        if part.size:
            watch = Watch(part, part.size if size is None else size, held)
            for t, start, nbytes in held:
                if t in written:
                    watch.written[start : start + nbytes] = True
            yield watch


class WeightMemory:
    """Memory of a kind that a device has for weights, beside its own for all the rest of a program.

    Args:
        buft: For the first operand of the last op.
        rest: For all other tensors.
    """

    def __init__(self, buft: BufferType, rest: Memory) -> None:
        self._buft = buft
        self._rest = rest
        self._weight: Buffer | None = None

    def place(self, built: Built) -> Image:
        """Place a program; `Image.upload` writes its inputs.

        Raises:
            Error: The memory does not take the weight: `ArgumentError`, `DTypeError`, `ShapeError`.
        """
        self._free_weight()
        node = built.graph.nodes[-1]
        self._weight = alloc_weight(node, self._buft)
        image = self._rest.place(built)
        image.kept.append(weight_of(node))
        return image

    def free(self) -> None:
        """Give the weight's memory back; the rest belongs to others."""
        self._free_weight()

    def _free_weight(self) -> None:
        if self._weight is not None:
            self._weight.free()
        self._weight = None


def weight_of(node: Tensor) -> Tensor:
    """Return the first operand of an op, or what it is a view of."""
    operand = node.operand(0)
    return operand.view_src or operand


def alloc_weight(node: Tensor, buft: BufferType) -> Buffer:
    """Place the weight of an op, and nothing else.

    Raises:
        AllocationError: There is no room.
        Error: The memory does not take the weight: `ArgumentError`, `DTypeError`, `ShapeError`.
    """
    buffer = alloc_tensors([weight_of(node)], buft)
    buffer.usage = BufferUsage.WEIGHTS
    return buffer
