"""KvMemory: keys and values of earlier tokens, in cells that sequences share."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Buffer, Context, DType, Tensor
from ggmlb.core.errors import AllocationError, ArgumentError, ModelError
from ggmlb.models.devices import alloc_zeros
from ggmlb.models.text.config import TextConfig

FREE = -1
"""The sequence number of a cell that holds nothing."""

HIDDEN = 0xFC00
"""-inf as f16: what a mask has for cells that are not seen."""

SPARE = 128
"""Cells after the last, for tokens that fill up a batch; nothing reads them."""


class Memory(Protocol):
    """What is kept of earlier tokens: a `KvMemory`, or the `StateMemory` of a recurrent model."""

    kind: str
    n_cells: int
    nbytes: int
    buffers: tuple[Buffer, ...]
    has_nan: bool

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether there is room for sequences, given the tokens that each has at most."""

    def remove(self, sequence: int, start: int = 0) -> int:
        """Forget a sequence from a position on, or all of it; return the number of tokens that stay."""

    def save(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Return what is kept of a sequence."""

    def check(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise unless `load` can take a state.

        Raises:
            ModelError: It is of another model.
        """

    def load(self, sequence: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Give a sequence what `save` returned.

        Raises:
            AllocationError: Too little is free.
        """

    def free(self) -> None:
        """Free the memory."""


class KvMemory:
    """Keys and values of `n_cells` tokens for each layer, on the device of the layer.

    A cell holds one token of one sequence, at one position. Any cell may serve any sequence.

    Args:
        config: The model's sizes.
        homes: A stream for each layer, on the device whose memory holds the layer's cells.
        n_cells: Tokens of all sequences together.
        dtype: Type of keys and values: f16, q8_0, q4_0 or f32.

    Attributes:
        keys: For each layer, `[n_key * n_head_kv, n_cells + SPARE]`.
        values: For each layer, `[n_value * n_head_kv, n_cells + SPARE]`.
        n_cells: Tokens that fit.
        n_used: Cells up to the last that holds a token.
        buffers: The memory.
        has_nan: Whether keys or values may be NaN: cells are set to 0 when they are freed, since some kernels
            multiply what a mask hides.

    Raises:
        ArgumentError: The type's blocks do not divide a head.
        AllocationError: A device lacks room.
    """

    def __init__(self, config: TextConfig, homes: Sequence[Backend], n_cells: int, dtype: DType) -> None:
        for n in (config.n_key, config.n_value):
            if n % dtype.block_size:
                raise ArgumentError(
                    f"kv_type {dtype.name.lower()} has blocks of {dtype.block_size} elements; a head of this "
                    f"model has {n}: take f16"
                )
        self.kind = f"{dtype.name.lower()} KV cache"
        self.n_cells = n_cells
        self.n_used = 0
        self.has_nan = False
        self._first_free = 0  # no cell before it is free
        self._rows: dict[tuple[int, int], _Row] = {}
        self.sequence = np.full(n_cells, FREE, np.int32)
        self.position = np.zeros(n_cells, np.int32)
        self._sequences, self._positions = self.sequence.data, self.position.data
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        contexts: dict[int, tuple[Context, Backend]] = {}
        for layer, home in enumerate(homes):
            ctx, _ = contexts.setdefault(id(home), (Context(), home))
            for kind, n, tensors in (("k", config.n_key, self.keys), ("v", config.n_value, self.values)):
                ne = (n * config.n_head_kv, n_cells + SPARE)
                tensors.append(ctx.new_tensor(dtype, ne, f"cache_{kind}.{layer}"))
        self.buffers = alloc_zeros(contexts.values())  # a masked value still is multiplied: no NaN there
        self.nbytes = sum(t.nbytes for t in (*self.keys, *self.values))

    # -- cells ---------------------------------------------------------------------------------

    def find_cells(self, n: int) -> npt.NDArray[np.int64]:
        """Return `n` free cells, the first ones that there are.

        Raises:
            AllocationError: There are not so many.
        """
        first = self._first_free
        free = np.flatnonzero(self.sequence[first : first + n] == FREE) + first
        if free.size < n:
            free = np.flatnonzero(self.sequence == FREE)[:n]
        if free.size < n:
            raise AllocationError(
                f"{n} tokens need cells of the memory of keys and values, but {free.size} of {self.n_cells} "
                "are free: end other sequences, or give the model a larger n_ctx"
            )
        return free

    def occupy(
        self, cells: npt.NDArray[np.int64], sequences: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> None:
        """Give tokens the cells that `find_cells` returned."""
        if cells.size == 1:
            self._hold(int(cells[0]), int(sequences[0]), int(positions[0]))
        elif cells.size:
            self.sequence[cells] = sequences
            self.position[cells] = positions
            self._first_free = int(cells[-1]) + 1
            self.n_used = max(self.n_used, self._first_free)
            self._rows.clear()

    # A decode step takes the three methods below: in a small model, work on arrays, whose code no cache has
    # after the kernels, would be a tenth of the step.

    def take(self, sequence: int, position: int) -> int:
        """Give a token the first free cell, and return that.

        Raises:
            AllocationError: There is none.
        """
        cell = self._first_free
        if cell == self.n_cells or self._sequences[cell] != FREE:
            cell = int(self.find_cells(1)[0])
        self._hold(cell, sequence, position)
        return cell

    def _hold(self, cell: int, sequence: int, position: int) -> None:
        self._sequences[cell] = sequence
        self._positions[cell] = position
        self._first_free = cell + 1
        self.n_used = max(self.n_used, self._first_free)
        for key, row in list(self._rows.items()):
            if key[0] == sequence and not row.add(cell, position):
                del self._rows[key]

    def row(self, sequence: int, position: int, window: int) -> memoryview:
        """Return the bytes of the mask of a sequence's last token over all cells; see `mask`."""
        row = self._rows.get((sequence, window))
        if row is None or row.position != position:
            token = np.array([sequence], np.int32), np.array([position], np.int32)
            mask = self.mask(*token, self.n_cells, window)[0]
            seen = np.flatnonzero(mask == 0)
            row = _Row(mask, seen[np.argsort(self.position[seen])], position, window)
            self._rows[sequence, window] = row
        return row.raw

    def release(self, cells: npt.NDArray[Any]) -> None:
        """Free cells, given by numbers or a mask."""
        if self.has_nan:
            freed = np.arange(self.n_cells)[cells]
            for run in np.split(freed, np.flatnonzero(np.diff(freed) != 1) + 1) if freed.size else ():
                for tensor in (*self.keys, *self.values):
                    tensor.memset(0, int(run[0]) * tensor.nb[1], run.size * tensor.nb[1])
        self.sequence[cells] = FREE
        held = np.flatnonzero(self.sequence != FREE)
        self.n_used = int(held[-1]) + 1 if held.size else 0
        self._first_free = int((self.sequence == FREE).argmax())
        self._rows.clear()

    def remove(self, sequence: int, start: int = 0) -> int:
        """Free the cells of a sequence from a position on.

        Returns:
            The number of tokens that stay.
        """
        self.release((self.sequence == sequence) & (self.position >= start))
        return int(np.count_nonzero(self.sequence == sequence))

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether there are cells for some sequences, beside those that others hold.

        Args:
            needs: For the number of each sequence, the tokens that it has at most.
        """
        held = (self.sequence != FREE) & ~np.isin(self.sequence, list(needs))
        return sum(needs.values()) + int(np.count_nonzero(held)) <= self.n_cells

    def mask(
        self,
        sequences: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        n_kv: int,
        window: int = 0,
    ) -> npt.NDArray[np.float16]:
        """Return what is added to attention scores: 0 where a token sees a cell, -inf elsewhere.

        Args:
            sequences: Of each token; `FREE` for one that fills up, which sees every cell.
            positions: Of each token in its sequence.
            n_kv: Cells that are looked at.
            window: Tokens that are seen, the token itself included; 0: all earlier ones.

        Returns:
            Shape `(n_tokens, n_kv)`.
        """
        cells, at = self.sequence[:n_kv], self.position[:n_kv]
        hidden = (cells != sequences[:, None]) | (at > positions[:, None])
        if window:
            hidden |= at <= positions[:, None] - window
        hidden[sequences == FREE] = False
        return np.where(hidden, np.float16(-np.inf), np.float16(0))

    # -- state ---------------------------------------------------------------------------------

    def save(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Return positions, keys and values of a sequence, in the order of positions."""
        cells = np.flatnonzero(self.sequence == sequence)
        cells = cells[np.argsort(self.position[cells])]
        found: dict[str, npt.NDArray[Any]] = {"positions": self.position[cells]}
        for tensor in (*self.keys, *self.values):
            n = (int(cells.max()) + 1 if cells.size else 0) * tensor.nb[1]
            found[tensor.name] = tensor.get(0, n).reshape(-1, tensor.nb[1])[cells]
        return found

    def check(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise unless `load` can take a state.

        Raises:
            ModelError: It is not of this model, or of another type of keys and values.
        """
        positions = state["positions"]
        for tensor in (*self.keys, *self.values):
            rows = state.get(tensor.name)
            if rows is None or rows.dtype != np.uint8 or rows.shape != (positions.size, tensor.nb[1]):
                raise ModelError(
                    f"the state does not fit: {tensor.name} must have {positions.size} rows of "
                    f"{tensor.nb[1]} bytes; load it into the model that it was saved from, with that kv_type"
                )

    def load(self, sequence: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Give a sequence what `save` returned.

        Raises:
            AllocationError: Too few cells are free.
        """
        positions = state["positions"]
        cells = self.find_cells(positions.size)
        for tensor in (*self.keys, *self.values):
            for cell, row in zip(cells.tolist(), state[tensor.name], strict=True):
                tensor.set(row, cell * tensor.nb[1])
        self.occupy(cells, np.full(positions.size, sequence, np.int32), positions)

    def free(self) -> None:
        """Free the memory."""
        for buffer in self.buffers:
            buffer.free()


class _Row:
    """The mask of the last token of a sequence; the next token changes two cells of it at most.

    Args:
        mask: Of all cells.
        seen: The cells that are seen, in the order of positions.
        position: The token's.
        window: Tokens that are seen; 0: all earlier ones.

    Attributes:
        position: The token's.
        raw: The bytes of the mask.
    """

    def __init__(
        self, mask: npt.NDArray[np.float16], seen: npt.NDArray[np.int64], position: int, window: int
    ) -> None:
        self.position = position
        self.raw = mask.view(np.uint8).data
        self._cells = mask.view(np.uint16).data
        self._seen = deque(seen.tolist(), window)
        self._window = window

    def add(self, cell: int, position: int) -> bool:
        """Go on to the next token; return `False` where another one was added."""
        if position != self.position + 1:
            return False
        self.position = position
        if self._window:
            if len(self._seen) == self._window:
                self._cells[self._seen[0]] = HIDDEN
            self._seen.append(cell)
        self._cells[cell] = 0
        return True
