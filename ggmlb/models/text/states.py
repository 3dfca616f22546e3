"""StateMemory: the states of recurrent layers, in slots that sequences own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Context, DType, Tensor
from ggmlb.core.errors import AllocationError, ModelError
from ggmlb.models.devices import alloc_zeros
from ggmlb.models.text.config import State

N_SLOTS = 16
"""Sequences whose states are kept at once."""


class StateMemory:
    """The states of each layer after the last token of each sequence, on the device of the layer.

    A sequence owns a slot from its first token on. What came before a token cannot be had back: of a
    sequence, all tokens stay or none.

    Args:
        sizes: Of a layer's states.
        homes: A stream for each layer, on the device whose memory holds the layer's states.
        n_cells: Most tokens of a sequence.
        n_slots: Most sequences.

    Attributes:
        convolved: For each layer, the inputs that the convolution still sees,
            f32 `[(n_conv - 1) * n_inner, n_slots + 1]`.
        scanned: For each layer, the states of the scan, f32 `[n_state * n_inner, n_slots + 1]`.
        n_cells: Most tokens of a sequence.
        spare: The number of the last slot, for sequences that fill up a batch.
        buffers: The memory.
        nbytes: Memory of all states [bytes].
        has_nan: Whether states may be NaN; a new sequence begins with zeros whatever was there.

    Raises:
        AllocationError: A device lacks room.
    """

    def __init__(self, sizes: State, homes: Sequence[Backend], n_cells: int, n_slots: int = N_SLOTS) -> None:
        self.kind = "recurrent states"
        self.has_nan = False
        self.n_cells = n_cells
        self.spare = n_slots
        self.convolved: list[Tensor] = []
        self.scanned: list[Tensor] = []
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        contexts: dict[int, tuple[Context, Backend]] = {}
        kinds = (
            ("conv", (sizes.n_conv - 1) * sizes.n_inner, self.convolved),
            ("scan", sizes.n_state * sizes.n_inner, self.scanned),
        )
        for layer, home in enumerate(homes):
            ctx, _ = contexts.setdefault(id(home), (Context(), home))
            for kind, n, tensors in kinds:
                tensors.append(ctx.new_tensor(DType.F32, (n, n_slots + 1), f"state_{kind}.{layer}"))
        self.buffers = alloc_zeros(contexts.values())
        self.nbytes = sum(t.nbytes for t in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.convolved, *self.scanned)

    # -- slots ---------------------------------------------------------------------------------

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether there are slots for so many sequences, beside those that others own.

        Args:
            needs: For the number of each sequence, the tokens that it has at most.
        """
        return len(needs.keys() | self._slots.keys()) <= self.spare

    def length(self, sequence: int) -> int:
        """The number of tokens of a sequence that its states have seen."""
        return self._lengths.get(sequence, 0)

    def slot_of(self, sequence: int) -> int:
        """Return the slot of a sequence; a new one gets a free slot, its states zero.

        Raises:
            AllocationError: All slots are owned.
        """
        slot = self._slots.get(sequence)
        if slot is None:
            slot = next((i for i in range(self.spare) if i not in self._slots.values()), None)
            if slot is None:
                raise AllocationError(
                    f"a sequence needs a slot for its states, but other sequences own all {self.spare}: end "
                    "one of them (Session.close)"
                )
            for tensor in self._tensors:
                tensor.memset(0, slot * tensor.nb[1], tensor.nb[1])
            self._slots[sequence] = slot
        return slot

    def advance(self, sequence: int, n: int) -> None:
        """Note that the states of a sequence have seen `n` more tokens."""
        self._lengths[sequence] = self.length(sequence) + n

    def remove(self, sequence: int, start: int = 0) -> int:
        """Forget a sequence from a position on; that is all of it, where its states have seen more.

        Returns:
            The number of tokens that stay.
        """
        n = self.length(sequence)
        if 0 < n <= start:
            return n
        self._slots.pop(sequence, None)
        self._lengths.pop(sequence, None)
        return 0

    # -- state ---------------------------------------------------------------------------------

    def save(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Return positions and states of a sequence."""
        found: dict[str, npt.NDArray[Any]] = {"positions": np.arange(self.length(sequence), dtype=np.int32)}
        slot = self._slots.get(sequence, self.spare)
        for tensor in self._tensors:
            found[tensor.name] = tensor.get(slot * tensor.nb[1], tensor.nb[1])
        return found

    def check(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise unless `load` can take a state.

        Raises:
            ModelError: It is not of this model.
        """
        for tensor in self._tensors:
            row = state.get(tensor.name)
            if row is None or row.dtype != np.uint8 or row.shape != (tensor.nb[1],):
                raise ModelError(
                    f"the state does not fit: {tensor.name} must have {tensor.nb[1]} bytes; load it into the "
                    "model that it was saved from"
                )

    def load(self, sequence: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Give a sequence what `save` returned.

        Raises:
            AllocationError: All slots are owned.
        """
        n = state["positions"].size
        if not n:
            return
        slot = self.slot_of(sequence)
        for tensor in self._tensors:
            tensor.set(state[tensor.name], slot * tensor.nb[1])
        self._lengths[sequence] = n

    def free(self) -> None:
        """Free the memory."""
        for buffer in self.buffers:
            buffer.free()
