"""SequenceMemory: the KV cache and recurrent states of sequences, by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Buffer, DType
from ggmlb.models.text.blocks import Attention
from ggmlb.models.text.kv_cache import KvCache, MemoryPart
from ggmlb.models.text.state_cache import StateCache


class SequenceMemory:
    """Keys and values of the layers with attention, and states of recurrent layers; a layer may have both.

    Args:
        attentions: The attention of each layer; `None` where there is none.
        states: Elements of each recurrent state of a sequence, by name, in each layer.
        kv_homes: A stream for each layer, on the device whose memory holds its keys and values.
        state_homes: The same for its states.
        n_cells: Context size [tokens].
        kv_type: Type of keys and values.
        n_slots: Sequences whose recurrent states fit at once.

    Attributes:
        cells: Keys and values; `None` if no layer has attention.
        slots: Recurrent states; `None` if no layer is recurrent.
        parts: Those of both that there are.
        n_cells: As given.

    Raises:
        ArgumentError: The type's blocks do not divide a head.
        AllocationError: A device lacks room.
    """

    def __init__(
        self,
        attentions: Sequence[Attention | None],
        states: Sequence[Mapping[str, int]],
        kv_homes: Sequence[Backend],
        state_homes: Sequence[Backend],
        n_cells: int,
        kv_type: DType,
        n_slots: int,
    ) -> None:
        self.n_cells = n_cells
        self.parts: list[MemoryPart] = []
        self.cells: KvCache | None = None
        self.slots: StateCache | None = None
        try:
            if any(attentions):
                self.cells = KvCache(attentions, kv_homes, n_cells, kv_type)
                self.parts.append(self.cells)
            if any(states):
                self.slots = StateCache(states, state_homes, n_cells, n_slots)
                self.parts.append(self.slots)
        except BaseException:
            self.free()
            raise

    def __str__(self) -> str:
        """The parts, with their types."""
        return " and ".join(f"{part.dtype.name.lower()} {part.kind}" for part in self.parts)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers of all parts."""
        return tuple(buffer for part in self.parts for buffer in part.buffers)

    @property
    def nbytes(self) -> int:
        """Size of all tensors [bytes]."""
        return sum(part.nbytes for part in self.parts)

    def wait_by(self, wait: Callable[[], object]) -> None:
        """Set the function that waits for queued work before the host reads or writes tensors."""
        for part in self.parts:
            part.before_access = wait

    def note_nan(self) -> None:
        """Note that the memory may hold NaN."""
        for part in self.parts:
            part.has_nan = True

    # -- sequences -----------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """Return the number of a sequence's tokens."""
        return min(part.length(sequence) for part in self.parts)

    def reachable(self, sequence: int, most: int) -> int:
        """Return the length of the longest prefix, at most `most` tokens, that can be copied."""
        most = min(most, self.length(sequence))
        return most if self.slots is None else self.slots.reachable(sequence, most)

    def advance(self, sequences: Sequence[int], n: int) -> None:
        """Add `n` tokens, the same number for each sequence, to the lengths of their recurrent states."""
        if self.slots is not None:
            for sequence in sequences:
                self.slots.advance(sequence, n // len(sequences))

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether sequences fit beside the present ones; `needs`: maximum tokens by sequence number."""
        return all(part.fits(needs) for part in self.parts)

    def remove(self, sequence: int, start: int = 0) -> int:
        """Remove a sequence's tokens from position `start` on; return the number of tokens that remain.

        With recurrent states, those of the longest checkpoint remain (`StateCache.checkpoint`).
        """
        for part in reversed(self.parts):  # states first: they decide
            start = part.remove(sequence, start)
        return start

    # -- state ---------------------------------------------------------------------------------

    def copy(self, source: int, target: int, n: int) -> int:
        """Copy the first `n` tokens of a sequence into an empty one; return how many are copied.

        They are fewer if a failed batch removed some, or recurrent states include no more.

        Raises:
            AllocationError: Too little is free.
        """
        n = self.reachable(source, n)
        state: dict[str, npt.NDArray[Any]] = {"positions": np.arange(n, dtype=np.int32)}
        for part in self.parts if n else ():
            state |= part.save(source, n)
        try:
            self.load(target, state)
        except BaseException:
            self.remove(target)
            raise
        return n

    def save(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Return a sequence's state: its positions, and its part of each tensor by name, as bytes."""
        found: dict[str, npt.NDArray[Any]] = {"positions": np.arange(self.length(sequence), dtype=np.int32)}
        for part in self.parts:
            found |= part.save(sequence)
        return found

    def check(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise a ModelError if a saved state does not fit this model or this type of cache.

        Raises:
            ModelError: It is of another model, or of another type of KV cache.
        """
        for part in self.parts:
            part.check(state)

    def load(self, sequence: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore in a sequence the state that `save` returned.

        Raises:
            AllocationError: Too little is free.
        """
        for part in self.parts if state["positions"].size else ():
            part.load(sequence, state)

    def free(self) -> None:
        """Free the memory."""
        for part in self.parts:
            part.free()
