"""StateCache: the states of recurrent layers, in slots that belong to sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ggmlb import Backend, Context, DType, Tensor
from ggmlb.core.errors import AllocationError
from ggmlb.models.text.kv_cache import MemoryPart

N_SLOTS, LEAST_SLOTS, SLOTS_NBYTES = 16, 4, 1 << 29
"""Most and fewest sequences with states at once; limit of their memory, above the fewest [bytes]."""

MIN_LENGTH, MIN_CHECKPOINTS = 16, 2
"""Fewest tokens of a sequence with a checkpoint; fewest checkpoints, by default a quarter of `n_slots`."""


def n_slots(states: Sequence[Mapping[str, int]]) -> int:
    """Return how many sequences have states at once, given the elements of each layer's states."""
    nbytes = sum(4 * sum(kinds.values()) for kinds in states)
    return max(LEAST_SLOTS, min(N_SLOTS, SLOTS_NBYTES // max(nbytes, 1)))


class StateCache(MemoryPart):
    """The states of each recurrent layer after the last token of each sequence.

    A sequence gets a slot with its first token, whose states are set to 0 then. A sequence is truncated to
    its longest checkpoint that is short enough (`remove`), a copy of earlier states. Checkpoints have slots
    of their own, after those of sequences; a new one replaces the oldest.

    Args:
        states: Elements of each state of a sequence, by name, in each layer.
        homes: As for `MemoryPart`.
        n_cells: Most tokens of a sequence.
        n_slots: Sequences whose states fit at once.

    Attributes:
        spare: The number of the last slot, for padding sequences of a batch.

    Raises:
        AllocationError: A device lacks room.
    """

    kind = "recurrent states"

    def __init__(
        self, states: Sequence[Mapping[str, int]], homes: Sequence[Backend], n_cells: int, n_slots: int
    ) -> None:
        n_all = n_slots + 1 + max(MIN_CHECKPOINTS, n_slots // 4)
        kinds = [{name: (n, n_all) for name, n in of_layer.items()} for of_layer in states]
        super().__init__(homes, n_cells, DType.F32, kinds)
        self.spare = n_slots
        self._free = list(range(n_slots + 1, n_all))
        self._checkpoints: dict[tuple[int, int], int] = {}  # slots by sequence and length, oldest first
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    # -- slots ---------------------------------------------------------------------------------

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether the state slots suffice for the present sequences and those in `needs` (by number)."""
        return len(needs.keys() | self._slots.keys()) <= self.spare

    def length(self, sequence: int) -> int:
        """Return the number of a sequence's tokens that its states include."""
        return self._lengths.get(sequence, 0)

    def slot_of(self, sequence: int) -> int:
        """Return the slot of a sequence; a new one gets a free slot, its states zero.

        Raises:
            AllocationError: All slots are in use.
        """
        slot = self._slots.get(sequence)
        if slot is None:
            slot = next((i for i in range(self.spare) if i not in self._slots.values()), None)
            if slot is None:
                raise AllocationError(
                    f"a sequence needs a slot for its states, but other sequences use all {self.spare}: end "
                    "one of them (Session.close)"
                )
            self.before_access()
            for tensor in self._all:
                tensor.memset(0, slot * tensor.nb[1], tensor.nb[1])
            self._slots[sequence] = slot
        return slot

    def advance(self, sequence: int, n: int) -> None:
        """Count `n` more tokens of a sequence as included in its states."""
        self._lengths[sequence] = self.length(sequence) + n

    def checkpoint(self, sequences: Iterable[int]) -> None:
        """Copy the current states of sequences, to which `remove` may return."""
        for key in ((sequence, self.length(sequence)) for sequence in sequences):
            if key not in self._checkpoints and key[1] >= MIN_LENGTH:
                if not self._free:
                    self._drop(next(iter(self._checkpoints)))
                self._copy(self._slots[key[0]], self._free[-1])
                self._checkpoints[key] = self._free.pop()

    def _drop(self, checkpoint: tuple[int, int]) -> None:
        self._free.append(self._checkpoints.pop(checkpoint))

    def _copy(self, source: int, target: int) -> None:
        """Copy the states in a slot to another, on their devices."""
        self.before_access()
        ctx = Context()
        for t in self._all:
            row, copied = (ctx.view_1d(t, t.ne[0], slot * t.nb[1]) for slot in (source, target))
            row.copy_to(copied)

    def reachable(self, sequence: int, most: int) -> int:
        """Return the length of the longest state or checkpoint of at most `most` tokens; 0: none."""
        lengths = [n for s, n in (*self._lengths.items(), *self._checkpoints) if s == sequence and n <= most]
        return max(lengths, default=0)

    def remove(self, sequence: int, start: int = 0) -> int:
        """Truncate to the longest state or checkpoint of at most `start` tokens; return its length."""
        n = self.reachable(sequence, start)
        for key in [key for key in self._checkpoints if key[0] == sequence and key[1] > n]:
            self._drop(key)
        if not n:
            self._slots.pop(sequence, None)
            self._lengths.pop(sequence, None)
        elif n != self.length(sequence):
            self._copy(self._checkpoints[sequence, n], self._slots[sequence])
            self._lengths[sequence] = n
        return n

    # -- state ---------------------------------------------------------------------------------

    def save(self, sequence: int, n: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return a sequence's states by tensor name, as bytes; `n`: of its checkpoint of this length."""
        slot = self._slots.get(sequence, self.spare)
        if n is not None and n != self.length(sequence):
            slot = self._checkpoints[sequence, n]
        self.before_access()
        return {tensor.name: tensor.get(slot * tensor.nb[1], tensor.nb[1]) for tensor in self._all}

    def _saved_shape(self, tensor: Tensor, n: int) -> tuple[int, ...]:
        return (tensor.nb[1],)

    def load(self, sequence: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore in a sequence the states that `save` returned."""
        slot = self.slot_of(sequence)
        self.before_access()
        for tensor in self._all:
            tensor.set(state[tensor.name], slot * tensor.nb[1])
        self._lengths[sequence] = state["positions"].size
