"""KvCache: keys and values of earlier tokens, in cells that sequences share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Context, DType, Tensor
from ggmlb.core.errors import AllocationError, ArgumentError, ModelError
from ggmlb.models.devices import alloc_zeros
from ggmlb.models.text.blocks.attention import Attention, hidden_tokens

FREE = -1
"""The sequence number of a free cell."""

HIDDEN = 0xFC00
"""-inf as f16: the mask's value for hidden cells."""

SPARE = 128
"""Cells after the last, for padding tokens of a batch; nothing reads them."""


class MemoryPart(ABC):
    """Base class of the KV cache and of recurrent states, the parts of a `SequenceMemory`.

    Args:
        homes: A stream for each layer, on the device whose memory holds the layer's part.
        n_cells: Context size [tokens].
        dtype: Type of the tensors.
        kinds: For each layer, the names of its tensors, with the shape of each.

    Attributes:
        tensors: For each name, the tensors by layer.
        n_cells: As given.
        buffers: The memory.
        nbytes: Size of all tensors [bytes].
        has_nan: Whether the memory may hold NaN.
        before_access: Called before the host reads or writes the tensors: waits for queued work.

    Raises:
        AllocationError: A device lacks room.
    """

    kind: ClassVar[str]
    """Name for messages."""

    def __init__(
        self,
        homes: Sequence[Backend],
        n_cells: int,
        dtype: DType,
        kinds: Sequence[Mapping[str, tuple[int, int]]],
    ) -> None:
        self.n_cells = n_cells
        self.dtype = dtype
        self.has_nan = False
        self.before_access: Callable[[], object] = lambda: None
        self.tensors: dict[str, dict[int, Tensor]] = {}
        self._all: list[Tensor] = []
        contexts: dict[int, tuple[Context, Backend]] = {}
        for layer, home in enumerate(homes):
            ctx, _ = contexts.setdefault(id(home), (Context(), home))
            for kind, ne in kinds[layer].items():
                tensor = ctx.new_tensor(dtype, ne, f"{kind}.{layer}")
                self.tensors.setdefault(kind, {})[layer] = tensor
                self._all.append(tensor)
        self.buffers = alloc_zeros(contexts.values())  # kernels may multiply masked values: no NaN there
        self.nbytes = sum(tensor.nbytes for tensor in self._all)

    @abstractmethod
    def length(self, sequence: int) -> int:
        """Return the number of a sequence's tokens."""

    @abstractmethod
    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether sequences fit beside the cached ones; `needs`: maximum tokens by sequence number."""

    @abstractmethod
    def remove(self, sequence: int, start: int = 0) -> int:
        """Remove a sequence's tokens from position `start` on; return the number of tokens that remain."""

    @abstractmethod
    def save(self, sequence: int, n: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return a sequence's part of each tensor by name, as bytes; `n`: of its first tokens only."""

    def check(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise a ModelError if a saved state does not fit this model or this type of cache.

        Raises:
            ModelError: It is of another model, or of another type of KV cache.
        """
        n = state["positions"].size
        for tensor in self._all:
            rows, shape = state.get(tensor.name), self._saved_shape(tensor, n)
            if rows is None or rows.dtype != np.uint8 or rows.shape != shape:
                raise ModelError(
                    f"the state does not fit: {tensor.name} must be bytes of shape {list(shape)}; load it "
                    "into the model that it was saved from, with the same kv_type"
                )

    @abstractmethod
    def _saved_shape(self, tensor: Tensor, n: int) -> tuple[int, ...]:
        """The shape of a tensor's bytes in a state of `n` tokens."""

    @abstractmethod
    def load(self, sequence: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore in a sequence without tokens what `save` returned; `state` has its positions, too.

        Raises:
            AllocationError: Too little is free.
        """

    def free(self) -> None:
        """Free the cache's memory."""
        for buffer in self.buffers:
            buffer.free()


class KvCache(MemoryPart):
    """Keys and values of up to `n_cells` tokens for each layer.

    A cell holds one token of one sequence, at one position. Any cell may serve any sequence. Cells are set to
    0 when they are freed if `has_nan`, since some kernels multiply masked values.

    Args:
        attentions: The attention of each layer.
        homes: As for `MemoryPart`.
        n_cells: Tokens of all sequences together.
        dtype: f16, q8_0, q4_0 or f32.

    Attributes:
        keys: By layer, `[n_key * n_head_kv, n_cells + SPARE]`.
        values: By layer, `[n_value * n_head_kv, n_cells + SPARE]`; none where keys hold the values.
        n_used: Number of cells up to the last one in use.
        idle: Sequences that are removed to make room, in the order of the keys.

    Raises:
        ArgumentError: The type's blocks do not divide a head.
        AllocationError: A device lacks room.
    """

    kind = "KV cache"

    def __init__(
        self, attentions: Sequence[Attention | None], homes: Sequence[Backend], n_cells: int, dtype: DType
    ) -> None:
        for n in sorted({n for a in attentions if a for n in (a.n_key, a.n_value)}):
            if n % dtype.block_size:
                raise ArgumentError(
                    f"kv_type {dtype.name.lower()} has blocks of {dtype.block_size} elements, which do not "
                    f"divide this model's heads of {n}; use f16"
                )
        kinds = [{k: (n, n_cells + SPARE) for k, n in a.memory.items()} if a else {} for a in attentions]
        super().__init__(homes, n_cells, dtype, kinds)
        self.keys, self.values = self.tensors["cache_k"], self.tensors.get("cache_v", {})
        self.n_used = 0
        self.idle: dict[int, None] = {}
        self._first_free = 0  # no cell before it is free
        self._rows: dict[tuple[int, int], _MaskRow] = {}
        self.sequence = np.full(n_cells, FREE, np.int32)
        self.position = np.zeros(n_cells, np.int32)
        self._sequences, self._positions = self.sequence.data, self.position.data

    # -- cells ---------------------------------------------------------------------------------

    def find_cells(self, n: int) -> npt.NDArray[np.int64]:
        """Return the indices of `n` free cells, without occupying them; idle sequences make room.

        Raises:
            AllocationError: Fewer cells are free.
        """
        first = self._first_free
        free = np.flatnonzero(self.sequence[first : first + n] == FREE) + first
        if free.size < n:
            free = np.flatnonzero(self.sequence == FREE)[:n]
        while free.size < n and self.idle:
            self.remove(next(iter(self.idle)))
            free = np.flatnonzero(self.sequence == FREE)[:n]
        if free.size < n:
            raise AllocationError(
                f"{n} tokens do not fit the KV cache: {free.size} of {self.n_cells} cells are free; end "
                "other sequences, or open the model with a larger n_ctx"
            )
        return free

    def occupy(
        self, cells: npt.NDArray[np.int64], sequences: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> None:
        """Assign `cells` (from `find_cells`) to tokens, given by their sequences and positions."""
        if cells.size == 1:
            self._hold(int(cells[0]), int(sequences[0]), int(positions[0]))
        elif cells.size:
            self.sequence[cells] = sequences
            self.position[cells] = positions
            self._first_free = int(cells[-1]) + 1
            self.n_used = max(self.n_used, self._first_free)
            self._rows.clear()

    # The next three methods are for batches of one token. Arrays would take 110 us longer: 2 % of a step of
    # SmolLM2-135M on one Zen 4 core.

    def take(self, sequence: int, position: int) -> int:
        """Occupy a free cell with a token; return the cell's index.

        Raises:
            AllocationError: No cell is free.
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
        """Return a last token's attention mask over all cells as bytes; `window`: tokens it sees (0: all)."""
        row = self._rows.get((sequence, window))
        if row is None or row.position != position:
            token = np.array([sequence], np.int32), np.array([position], np.int32)
            mask = self.mask(*token, self.n_cells, window)[0]
            seen = np.flatnonzero(mask == 0)
            row = _MaskRow(mask, seen[np.argsort(self.position[seen])], position, window)
            self._rows[sequence, window] = row
        return row.raw

    def release(self, cells: npt.NDArray[Any]) -> None:
        """Free cells, given by their indices or as a boolean mask."""
        if self.has_nan:
            self.before_access()
            freed = np.arange(self.n_cells)[cells]
            for run in np.split(freed, np.flatnonzero(np.diff(freed) != 1) + 1) if freed.size else ():
                for tensor in self._all:
                    tensor.memset(0, int(run[0]) * tensor.nb[1], run.size * tensor.nb[1])
        self.sequence[cells] = FREE
        held = np.flatnonzero(self.sequence != FREE)
        self.n_used = int(held[-1]) + 1 if held.size else 0
        self._first_free = int((self.sequence == FREE).argmax())
        self._rows.clear()

    def length(self, sequence: int) -> int:
        """Return the number of a sequence's cells."""
        return int(np.count_nonzero(self.sequence == sequence))

    def remove(self, sequence: int, start: int = 0) -> int:
        """Free a sequence's cells from position `start` on; return the number of tokens that remain."""
        if not start:
            self.idle.pop(sequence, None)
        self.release((self.sequence == sequence) & (self.position >= start))
        return self.length(sequence)

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether sequences fit beside all but the idle ones; `needs`: maximum tokens by sequence number."""
        held = (self.sequence != FREE) & ~np.isin(self.sequence, [*needs, *self.idle])
        return sum(needs.values()) + int(np.count_nonzero(held)) <= self.n_cells

    def mask(
        self,
        sequences: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        n_kv: int,
        window: int = 0,
    ) -> npt.NDArray[np.float16]:
        """Return the mask of tokens over the first `n_kv` cells: 0 where a token sees a cell, else -inf.

        Args:
            sequences: The sequence of each token; `FREE` for a padding token, which sees every cell.
            positions: The position of each token in its sequence.
            n_kv: Number of cells.
            window: Sliding window [tokens], the token itself included; 0: all earlier tokens.

        Returns:
            Shape `(n_tokens, n_kv)`.
        """
        cells = self.sequence[:n_kv], self.position[:n_kv]
        hidden = hidden_tokens(sequences, positions, cells, window)
        hidden[sequences == FREE] = False
        return np.where(hidden, np.float16(-np.inf), np.float16(0))

    def spans(
        self,
        sequences: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        n_kv: int,
        window: int = 0,
    ) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
        """Return the mask in short form, for `TextGraph`: the tokens that see a cell are consecutive.

        Token `i` sees cell `k` if `abs(i - centre[k]) < half[k]`. Arguments as `mask`; the tokens of a
        sequence are consecutive, in the order of their positions. Padding tokens see what the last one sees.

        Returns:
            `centre` and `half`, each of shape `(n_kv,)`.
        """
        cells, at = self.sequence[:n_kv], self.position[:n_kv]
        first, end = np.zeros((2, n_kv), np.int32)
        n = int(np.count_nonzero(sequences != FREE))
        starts = np.flatnonzero(np.diff(sequences[:n], prepend=FREE)).tolist()
        for start, stop in zip(starts, (*starts[1:], n), strict=True):
            own = np.flatnonzero(cells == sequences[start])
            places = positions[start:stop]
            first[own] = start + np.searchsorted(places, at[own])
            last = start + np.searchsorted(places, at[own] + window) if window else np.full(own.size, stop)
            end[own] = np.where(last == n, len(sequences), last)
        half = np.where(first < end, (end - first) / 2, -1)
        return ((first + end - 1) / 2).astype(np.float16), half.astype(np.float16)

    # -- state ---------------------------------------------------------------------------------

    def save(self, sequence: int, n: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return keys and values of (the first `n` tokens of) a sequence, in the order of positions."""
        cells = self.cells_of(sequence)[:n]
        first, end = (int(cells.min()), int(cells.max()) + 1) if cells.size else (0, 0)
        self.before_access()
        found: dict[str, npt.NDArray[Any]] = {}
        for tensor in self._all:
            nb = tensor.nb[1]
            found[tensor.name] = tensor.get(first * nb, (end - first) * nb).reshape(-1, nb)[cells - first]
        return found

    def cells_of(self, sequence: int) -> npt.NDArray[np.int64]:
        """Return the cells of a sequence, in the order of positions."""
        cells = np.flatnonzero(self.sequence == sequence)
        return cells[np.argsort(self.position[cells])]

    def _saved_shape(self, tensor: Tensor, n: int) -> tuple[int, ...]:
        return n, tensor.nb[1]

    def load(self, sequence: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore in a sequence the keys and values that `save` returned."""
        positions = state["positions"]
        cells = self.find_cells(positions.size)
        self.before_access()
        starts = np.flatnonzero(np.diff(cells, prepend=-2) != 1).tolist()
        for tensor in self._all:
            rows = state[tensor.name]
            for start, end in zip(starts, (*starts[1:], cells.size), strict=True):
                tensor.set(rows[start:end], int(cells[start]) * tensor.nb[1])
        self.occupy(cells, np.full(positions.size, sequence, np.int32), positions)


class _MaskRow:
    """The mask of the last token of a sequence; the next token changes two cells of it at most.

    Args:
        mask: The mask of all cells.
        seen: The visible cells, in the order of positions.
        position: The position of the token.
        window: Sliding window [tokens]; 0: all earlier tokens.

    Attributes:
        position: The position of the token.
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
        """Extend the mask to the next token; return `False` if the token is not the next one."""
        if position != self.position + 1:
            return False
        self.position = position
        if self._window:
            if len(self._seen) == self._window:
                self._cells[self._seen[0]] = HIDDEN
            self._seen.append(cell)
        self._cells[cell] = 0
        return True
