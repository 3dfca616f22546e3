"""Placement of programs: in a device's memory, sharded, or with weights in another buffer type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggmlb.core.enums import BufferUsage
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType, view_init
from ggmlb.parallel.meta import MetaBuffer, MetaBufferType
from ggmlb.runtime.alloc import alloc_tensors
from ggmlb.testing.guarded import GuardedMemory, Held, Image, ProgramMemory, WatchedBuffer, results

if TYPE_CHECKING:
    from ggmlb.testing.programs import Built


def memory_of(buft: BufferType) -> ProgramMemory:
    """Return memory for programs in a device's own buffer type."""
    return ShardedMemory(buft) if isinstance(buft, MetaBufferType) else GuardedMemory(buft)


class ShardedMemory:
    """Memory of a meta device for programs: inputs are sharded, and each device's part is checked for writes.

    Args:
        buft: The meta device's buffer type.
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
        """Free the memory."""
        self._free_inputs()
        self._guarded.free()

    def _free_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.free()
        self._inputs = None


def _watched(
    buffer: Buffer, size: int | None, roots: Iterable[Tensor], written: set[Tensor]
) -> Iterable[WatchedBuffer]:
    """Watch each device's part of a buffer: its first `size` bytes, or all."""
    assert isinstance(buffer, MetaBuffer)
    here = [(t, buffer.slices(t)) for t in roots if t.buffer is buffer]
    for j, part in enumerate(buffer.parts):
        held = [Held(t, slices[j].offset, slices[j].nbytes) for t, slices in here]
        if part.size:
            watch = WatchedBuffer(part, part.size if size is None else size, held)
            for t, start, nbytes in held:
                if t in written:
                    watch.written[start : start + nbytes] = True
            yield watch


class WeightMemory:
    """Memory of one buffer type for the weight, and of the device's own for the rest of a program.

    Args:
        buft: Buffer type of the first operand of the last op.
        rest: Memory of all other tensors.
    """

    def __init__(self, buft: BufferType, rest: ProgramMemory) -> None:
        self._buft = buft
        self._rest = rest
        self._weight: Buffer | None = None

    def place(self, built: Built) -> Image:
        """Place a program; `Image.upload` writes its inputs.

        Raises:
            Error: The memory refuses the weight: `ArgumentError`, `DTypeError`, `ShapeError`.
        """
        self._free_weight()
        node = built.graph.nodes[-1]
        self._weight = alloc_weight(node, self._buft)
        image = self._rest.place(built)
        image.kept.append(weight_of(node))
        return image

    def free(self) -> None:
        """Free the weight's buffer only; the memory of the other tensors belongs to the test bench."""
        self._free_weight()

    def _free_weight(self) -> None:
        if self._weight is not None:
            self._weight.free()
        self._weight = None


def weight_of(node: Tensor) -> Tensor:
    """Return the tensor that holds an op's weight: its first operand, or what that is a view of."""
    operand = node.operand(0)
    return operand.view_src or operand


def alloc_weight(node: Tensor, buft: BufferType) -> Buffer:
    """Place an op's first operand, a weight, in memory of type `buft`; leave the others unplaced.

    Raises:
        AllocationError: The device lacks room.
        Error: The memory refuses the weight: `ArgumentError`, `DTypeError`, `ShapeError`.
    """
    buffer = alloc_tensors([weight_of(node)], buft)
    buffer.usage = BufferUsage.WEIGHTS
    return buffer
