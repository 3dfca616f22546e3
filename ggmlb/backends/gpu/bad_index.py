"""Bad indices: out-of-range indices that kernels record in device memory, for the host to raise.

A kernel that reads indices from a tensor (rows, experts) skips one out of range, and records it in its node's
slot, which is otherwise 0. A wait for a stream's work checks the slots that the work could write: this
costs a copy of some bytes, and nothing if no node has indices.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ggmlb.backends.gpu.launch import BadIndex
from ggmlb.core.errors import BackendError

if TYPE_CHECKING:
    from ggmlb.interface import Buffer

SLOT: Final = 16
"""Bytes of a slot: a flag (i32 and 4 bytes of padding), and the index (i64)."""

N_SLOTS: Final = 256
"""Slots per block, allocated together."""

MAX_BLOCKS: Final = 16
"""Number of blocks from which on a stream is synchronized, to reuse slots of dropped plans."""

Words: TypeAlias = "npt.NDArray[np.int64]"


class SlotBlock:
    """A block of slots in one buffer.

    Attributes:
        buffer: Their memory.
        is_used: Whether work that may write to them was queued since the last check.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.is_used = False
        self.free = list(reversed(range(N_SLOTS)))
        self.nodes: dict[int, tuple[str, int]] = {}

    def words(self) -> Words:
        """Return host memory for the slots up to the last one in use."""
        return np.zeros((max(self.nodes, default=-1) + 1, SLOT // 8), np.int64)


class Slot(NamedTuple):
    """The slot for one node's bad index."""

    block: SlotBlock
    number: int

    @property
    def offset(self) -> int:
        """Offset of its first byte."""
        return self.number * SLOT


class PlanSlots:
    """The slots of a plan; its queued work may still write to them after it is dropped.

    Attributes:
        places: The slots by the launches' `BadIndex`.
        blocks: The blocks of the slots.
    """

    __slots__ = ("__weakref__", "blocks", "places")

    def __init__(self, places: Mapping[BadIndex, Slot]) -> None:
        self.places = places
        self.blocks = tuple({slot.block for slot in places.values()})

    def note_use(self) -> None:
        """Mark the slots as used by queued work."""
        for block in self.blocks:
            block.is_used = True


class SlotStream(Protocol):
    """A stream whose plans have slots."""

    @property
    def name(self) -> str:
        """The device's name, for messages."""

    def alloc_buffer(self, nbytes: int) -> Buffer:
        """Return memory of its device."""

    def read_slots(self, block: SlotBlock, words: Words) -> None:
        """Queue, behind its work, a copy of a block's first slots to host memory."""

    def clear_slot(self, slot: Slot) -> None:
        """Queue setting a slot to 0."""

    def synchronize(self) -> None:
        """Wait for its work, and check the slots."""


class BadIndices:
    """The slots of a stream's plans, without a reference to the stream."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._blocks: list[SlotBlock] = []
        # Garbage collection may drop plans at any point: they only record their slots.
        self._dropped: deque[Slot] = deque()
        self._n_looking = 0

    def take(self, records: Iterable[BadIndex], stream: SlotStream) -> PlanSlots:
        """Allocate the slots of a plan's records; they are released when dropped."""
        places = {bad: self._slot(bad, stream) for bad in dict.fromkeys(records)}
        slots = PlanSlots(places)
        weakref.finalize(slots, self._dropped.extend, tuple(places.values())).atexit = False
        return slots

    def _slot(self, bad: BadIndex, stream: SlotStream) -> Slot:
        slot = self._free_slot(bad)
        if slot is None and len(self._blocks) >= MAX_BLOCKS and self._dropped:
            stream.synchronize()
            slot = self._free_slot(bad)
        while slot is None:
            block = SlotBlock(stream.alloc_buffer(N_SLOTS * SLOT))
            block.buffer.clear(0)
            with self._lock:
                self._blocks.append(block)
            slot = self._free_slot(bad)
        return slot

    def _free_slot(self, bad: BadIndex) -> Slot | None:
        with self._lock:
            for _ in range(0 if self._n_looking else len(self._dropped)):
                dropped = self._dropped.popleft()
                if dropped.block.is_used:  # queued work may write to it
                    self._dropped.append(dropped)
                else:
                    del dropped.block.nodes[dropped.number]
                    dropped.block.free.append(dropped.number)
            block = next((b for b in self._blocks if b.free), None)
            if block is None:
                return None
            slot = Slot(block, block.free.pop())
            block.nodes[slot.number] = bad.node.describe(), bad.n
            return slot

    def looked_at(self, stream: SlotStream) -> AbstractContextManager[None]:
        """Context manager that checks the slots after its block, which must wait for all queued work.

        Raises:
            BackendError: On leaving the block: an index was out of range; names the nodes.
        """
        return self._look(stream) if any(block.is_used for block in self._blocks) else nullcontext()

    @contextmanager
    def _look(self, stream: SlotStream) -> Iterator[None]:
        with self._lock:
            self._n_looking += 1
            used = [block for block in self._blocks if block.is_used]
            for block in used:
                block.is_used = False
        try:
            found = [(block, block.words()) for block in used]
            for block, words in found:
                stream.read_slots(block, words)
            yield
            complaints = [line for block, words in found for line in _complaints(block, words, stream)]
        except BaseException:
            for block in used:
                block.is_used = True
            raise
        finally:
            with self._lock:
                self._n_looking -= 1
        if complaints:
            raise BackendError(f"{stream.name} failed to compute {'; '.join(complaints)}")


def _complaints(block: SlotBlock, words: Words, stream: SlotStream) -> Iterator[str]:
    """Yield a complaint for each slot with a bad index, and clear the slot."""
    for number in np.flatnonzero(words[:, 0]).tolist():
        stream.clear_slot(Slot(block, number))
        node, n = block.nodes[number]
        yield f"{node}: row number {words[number, 1]} for a tensor of {n} rows"
