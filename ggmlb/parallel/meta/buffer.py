"""Memory of a meta device: a buffer on each of its devices, holding sharded tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.core.enums import Op
from ggmlb.core.errors import ArgumentError
from ggmlb.core.placement import placement_clock
from ggmlb.core.sharding import MIRRORED
from ggmlb.core.tensor import Tensor, contiguous_nb
from ggmlb.interface import Buffer, BufferType, PartedBuffer
from ggmlb.interface.data import Bytes
from ggmlb.parallel.meta.layout import slice_of
from ggmlb.parallel.meta.state import checked
from ggmlb.runtime.alloc import alloc_tensors

if TYPE_CHECKING:
    from ggmlb.core.sharding import SplitState
    from ggmlb.parallel.meta.device import MetaDevice


class MetaBufferType(BufferType):
    """Memory of a meta device: one buffer type per device.

    Attributes:
        parts: The buffer type of each device.
    """

    device: MetaDevice

    def __init__(self, device: MetaDevice, parts: Sequence[BufferType]) -> None:
        if not parts:
            raise ArgumentError("a MetaBufferType needs at least one buffer type")
        name = f"Meta({','.join(p.name for p in parts)})"
        super().__init__(device, name, max(p.alignment for p in parts))
        self.parts = tuple(parts)

    @property
    def max_size(self) -> int:
        """Smallest of the devices' largest buffers [bytes]."""
        return min(p.max_size for p in self.parts)

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes for the whole, uncut tensor on the device that needs most for it."""
        return max(p.alloc_size(tensor) for p in self.parts)

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        with ExitStack() as made:
            buffers = [made.enter_context(p.alloc_buffer(nbytes)) for p in self.parts]
            made.pop_all()
        return MetaBuffer(self, buffers, nbytes)

    def _planned_buffer(self, nbytes: int) -> Buffer:
        return self._alloc_buffer(nbytes)

    def place_tensors(self, tensors: Sequence[Tensor]) -> Buffer:
        """Place weights; each device allocates memory for its slices only.

        `get_split_state` of the meta device shards each weight. Results of ops are sharded by their
        operands, and each device allocates memory for whole results.

        Raises:
            AllocationError: A device lacks room; nothing is placed.
            ArgumentError: A split state does not fit its tensor.

        Source: ggml_backend_meta_alloc_ctx_tensors_from_buft.
        """
        n = len(self.parts)
        states = [
            checked(self.device.get_split_state(t), t, n) if t.op is Op.NONE else MIRRORED for t in tensors
        ]
        slices = [
            [
                _named(Tensor(t.dtype, slice_of(t.dtype, t.ne, s, j).ne), t)
                for t, s in zip(tensors, states, strict=True)
            ]
            for j in range(n)
        ]
        with ExitStack() as made:
            buffers = [
                made.enter_context(alloc_tensors(own, buft))
                for own, buft in zip(slices, self.parts, strict=True)
            ]
            made.pop_all()
        whole = MetaBuffer(self, buffers, max(b.size for b in buffers))
        for i, (tensor, state) in enumerate(zip(tensors, states, strict=True)):
            whole.static[tensor] = tuple(own[i] for own in slices)
            if tensor.op is Op.NONE:
                self.device.given[tensor] = state
            tensor.buffer, tensor.offset = whole, 0
        placement_clock.tick()
        return whole


class MetaBuffer(PartedBuffer):
    """A buffer on each device.

    A tensor placed by an allocator has its slices at its own offset in each buffer. For a tensor placed by
    `place_tensors`, the offsets of the slices are independent.

    Attributes:
        static: Slices of the tensors that `place_tensors` placed.
    """

    buft: MetaBufferType

    def __init__(self, buft: MetaBufferType, parts: Sequence[Buffer], size: int) -> None:
        self.static: weakref.WeakKeyDictionary[Tensor, tuple[Tensor, ...]] = weakref.WeakKeyDictionary()
        super().__init__(buft, parts, size)

    def state(self, root: Tensor) -> SplitState:
        """Return how a tensor in this buffer, not a view, is cut over the devices or repeated on them."""
        return self.buft.device.state(root)

    def slices(self, root: Tensor) -> tuple[Tensor, ...]:
        """Return each device's slice of a tensor in this buffer that is not a view."""
        places = self.static.get(root)
        if places is not None and root.op is Op.NONE:
            return places
        made = []
        for j, part in enumerate(self.parts):
            state = self.state(root)
            ne, nb, _ = slice_of(root.dtype, root.ne, state, j)
            own = _named(Tensor(root.dtype, ne, nb if state.is_cut else root.nb), root)
            own.buffer, own.offset = part, root.offset if places is None else places[j].offset
            part.init_tensor(own)
            made.append(own)
        return tuple(made)

    def _init_tensor(self, tensor: Tensor) -> None:
        if self.static and tensor.view_src is None:
            raise ArgumentError(
                f"{tensor.describe()} cannot be placed in this {self.name} buffer, which holds weight slices "
                "only; allocate another buffer"
            )

    def _reset(self) -> None:
        super()._reset()
        self.static.clear()
        self.size = min(part.size for part in self.parts)  # an allocator may place a whole tensor in each

    # -- data: bytes of a view are bytes of its root -------------------------------------------------

    def scatter(self, tensor: Tensor, data: Bytes, offset: int) -> Iterator[tuple[Tensor, Bytes, int]]:
        """Divide bytes of a tensor over devices; yield each slice, its bytes, and their offset in the slice.

        A partial write to a cut tensor is completed to a whole one: the rest is read first.
        """
        root, start = _in_root(tensor, offset)
        slices, state = self.slices(root), self.state(root)
        if not state.is_cut:
            yield from ((own, data, start) for own in slices)
            return
        whole = data
        if data.size < root.nbytes:
            whole = self._gathered(root)
            whole[start : start + data.size] = data
        for own, parts in zip(slices, _shards(root, state, whole), strict=True):
            yield own, np.concatenate(parts, axis=1).ravel(), 0

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        for own, part, start in self.scatter(tensor, data, offset):
            own.set(part, start)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        root, start = _in_root(tensor, offset)
        if self.state(root).is_cut:
            out[:] = self._gathered(root)[start : start + out.size]
        else:
            out[:] = self.slices(root)[0].get(start, out.size)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._set_tensor(tensor, np.full(size, value, np.uint8), offset)

    def _gathered(self, root: Tensor) -> Bytes:
        """Return all bytes of a cut tensor."""
        whole = np.empty(root.nbytes, np.uint8)
        for own, parts in zip(self.slices(root), _shards(root, self.state(root), whole), strict=True):
            if not own.nbytes:
                continue
            rest: Bytes = own.get().reshape(parts[0].shape[0], -1, parts[0].shape[2])
            for part in parts:
                part[...], rest = rest[:, : part.shape[1]], rest[:, part.shape[1] :]
        return whole


def _named(own: Tensor, whole: Tensor) -> Tensor:
    own.name, own.flags = whole.name, whole.flags
    return own


def _in_root(tensor: Tensor, offset: int) -> tuple[Tensor, int]:
    """Return the tensor that owns the memory, and the offset in it of a byte of a view."""
    if tensor.view_src is None:
        return tensor, offset
    return tensor.view_src, tensor.view_offs + offset


def _shards(root: Tensor, state: SplitState, whole: Bytes) -> Iterator[list[Bytes]]:
    """View the bytes of a whole tensor as the devices' parts, of shape (blocks, units, bytes of a unit)."""
    unit = contiguous_nb(root.dtype, root.ne)[state.axis]
    per_unit = root.dtype.block_size if state.axis == 0 else 1
    blocks = whole.reshape(-1, root.ne[state.axis] // per_unit, unit)
    starts, at = [], 0
    for segment in state.segments:
        starts.append(at)
        at += sum(segment) // per_unit
    for j in range(len(state.segments[0])):
        parts = []
        for segment, start in zip(state.segments, starts, strict=True):
            begin = start + sum(segment[:j]) // per_unit
            parts.append(blocks[:, begin : begin + segment[j] // per_unit])
        yield parts
