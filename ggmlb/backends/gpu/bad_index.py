"""Indices that were out of range, as kernels note them in device memory, for the host to raise.

A kernel that reads indices from a tensor (row numbers, experts) leaves out what one out of range asks for,
and notes it in a slot of its node. Slots are 0 but for that. Whoever waits for a stream's work looks at the
slots that the work could write to: that costs a copy of some bytes, and nothing where no node has indices.
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

from ggmlb.backends.gpu.launch import BadIndex, Launch, Mem
from ggmlb.core.errors import BackendError

if TYPE_CHECKING:
    from ggmlb.interface import Buffer

SLOT: Final = 16
"""Bytes of a slot: whether an index was noted (i32, and 4 bytes of nothing), and the index (i64)."""

N_SLOTS: Final = 256
"""Slots that are allocated together."""

MAX_BLOCKS: Final = 16
"""With so many blocks, a stream is waited for before there is another: slots of dropped plans then serve."""

Words: TypeAlias = "npt.NDArray[np.int64]"


class SlotBlock:
    """Slots in one buffer.

    Attributes:
        buffer: Their memory.
        is_used: Whether work that may write to them was queued since they were looked at.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.is_used = False
        self.free = list(reversed(range(N_SLOTS)))
        self.nodes: dict[int, tuple[str, int]] = {}

    def words(self) -> Words:
        """Return host memory for the slots up to the last that has a node."""
        return np.zeros((max(self.nodes, default=-1) + 1, SLOT // 8), np.int64)


class Slot(NamedTuple):
    """A place for one node's bad index."""

    block: SlotBlock
    number: int

    @property
    def offset(self) -> int:
        """Of its first byte."""
        return self.number * SLOT


class PlanSlots:
    """The slots of a plan; work that was queued may write to them after it is gone.

    Attributes:
        places: By what launches take.
        blocks: The blocks that they lie in.
    """

    __slots__ = ("__weakref__", "blocks", "places")

    def __init__(self, places: Mapping[BadIndex, Slot]) -> None:
        self.places = places
        self.blocks = tuple({slot.block for slot in places.values()})

    def note_use(self) -> None:
        """Let them be looked at: the plan's work was queued."""
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
        """Wait for its work, and look at the slots."""


class BadIndices:
    """The slots of a stream's plans; it does not keep the stream alive."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._blocks: list[SlotBlock] = []
        # Plans are dropped by garbage collection too, in the middle of anything: they only note their slots.
        self._dropped: deque[Slot] = deque()
        self._n_looking = 0

    def take(self, launches: Iterable[Launch], stream: SlotStream) -> PlanSlots:
        """Return the slots of a plan's launches, which are given back when the plan drops them."""
        places: dict[BadIndex, Slot] = {}
        for launch in launches:
            for arg in launch.args:
                if isinstance(arg, Mem) and isinstance(arg.buffer, BadIndex):
                    places[arg.buffer] = self._slot(arg.buffer, stream)
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
        """Look at the slots when the block ends, in which all work that was queued is waited for.

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
    """Yield what is wrong with each node that a slot has an index of, and clear the slot."""
    for number in np.flatnonzero(words[:, 0]).tolist():
        stream.clear_slot(Slot(block, number))
        node, n = block.nodes[number]
        yield f"{node}: row number {words[number, 1]} for a tensor of {n} rows"
