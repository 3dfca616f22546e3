"""Decoder: logits of batches of tokens of any sequences, by cached graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Scheduler, Tensor
from ggmlb.models.runs import Runs
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.experts import ExpertCache
from ggmlb.models.text.graph import TextGraph
from ggmlb.models.text.memory import FREE, KvMemory

N_BATCH = 512
"""Most tokens that are computed together."""

N_OUT = 64
"""Most tokens of a batch whose logits are computed."""

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, N_BATCH)
"""Tokens of graphs: a batch is filled up to one of these."""

MOST_NOT_OFFLOADED = 16
"""Most of `SIZES` for which no device copies weights to multiply them."""

LEAST_PART = 96
"""Tokens that are computed together, whatever fills up: a part more would read all weights again."""

MOST_WASTE = 1.2
"""How much larger than a batch its graph may be, where the batch could be cut."""

Floats = npt.NDArray[np.float32]
Sizes = tuple[int, int, int]
"""Of a graph: tokens, tokens whose logits are computed, cells that are looked at."""


class Token(NamedTuple):
    """A token of a batch.

    Attributes:
        id: Its number in the vocabulary.
        sequence: The number of its sequence, 0 or more.
        position: Its place in the sequence, from 0.
        wants_logits: Whether the logits after it are asked for.
    """

    id: int
    sequence: int
    position: int
    wants_logits: bool = False


class AnyDecoder(Protocol):
    """A `Decoder`, or the `RecurrentDecoder` of a recurrent model."""

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last batch; `None` before the first."""

    def decode(self, batch: Sequence[Token]) -> Floats:
        """Compute a batch; return the logits of the tokens that want them, shape `(n, n_vocab)`."""

    def hidden(self, batch: Sequence[Token]) -> Floats:
        """As `decode`, but return normalised hidden states, shape `(n, n_embd)`."""

    def reserve(self) -> None:
        """Allocate the memory that the largest batches need, so that none allocates any.

        Raises:
            AllocationError: A device lacks room.
        """

    def free(self) -> None:
        """Free the memory of the graphs."""


class Decoder:
    """Computes batches of tokens, and keeps their keys and values.

    Args:
        config: The model's sizes.
        weights: By the names that the graph uses.
        memory: Of keys and values.
        backends: Streams, highest priority first.
        n_ubatch: Tokens of a batch's parts, which devices compute one behind the other; 0: one at a time.
        cache: Experts in devices' memory, or `None`.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: KvMemory,
        backends: Sequence[Backend],
        n_ubatch: int = 0,
        cache: ExpertCache | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._memory = memory
        self._runs: Runs[Sizes, TextGraph] = Runs(backends, parallel=n_ubatch > 0)
        self._n_ubatch = n_ubatch
        self._cache = cache

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last batch, to see its splits and placement; `None` before the first."""
        return None if self._runs.last is None else self._runs.scheduler

    def reserve(self) -> None:
        """Allocate the memory that the largest batches need, so that none allocates any.

        Raises:
            AllocationError: A device lacks room.
        """
        self._runs.reserve(
            self._graph(n, min(n, N_OUT), self._memory.n_cells)
            for n in largest_batches(self._runs.scheduler.backends, _padded(self._n_ubatch or N_BATCH))
        )

    def decode(self, batch: Sequence[Token]) -> Floats:
        """Compute a batch, and keep its keys and values.

        Args:
            batch: At most `N_BATCH` tokens, of which at most `N_OUT` want logits.

        Returns:
            Logits of the tokens that want them, in their order, shape `(n, n_vocab)`.

        Raises:
            AllocationError: Too few cells are free.
        """
        return self._each(batch, lambda graph: graph.logits, self._config.n_vocab)

    def hidden(self, batch: Sequence[Token]) -> Floats:
        """As `decode`, but return normalised hidden states, shape `(n, n_embd)`."""
        return self._each(batch, lambda graph: graph.hidden, self._config.n_embd)

    def _each(self, batch: Sequence[Token], output: Callable[[TextGraph], Tensor], width: int) -> Floats:
        """Compute a batch in parts that waste little, and return rows of an output."""
        memory = self._memory
        ids, sequences, positions = np.array([token[:3] for token in batch], np.int32).reshape(-1, 3).T
        cells = memory.find_cells(len(batch))
        memory.occupy(cells, sequences, positions)
        n_kv = min(_padded_cells(memory.n_used), memory.n_cells)
        found = [np.empty((0, width), np.float32)]
        start = 0
        try:
            while start < len(batch):
                end = start + self._part(len(batch) - start)
                chosen = [i for i, token in enumerate(batch[start:end]) if token.wants_logits]
                part = slice(start, end)
                graph = self._start(ids[part], sequences[part], positions[part], cells[part], chosen, n_kv)
                if chosen or not self._n_ubatch:
                    self._runs.wait()
                if chosen:
                    found.append(output(graph).to_numpy().reshape(-1, width)[: len(chosen)])
                start = end
        except BaseException:  # the cells have no keys and values, or but some layers'
            memory.sequence[cells] = FREE
            raise
        return found[1] if len(found) == 2 else np.concatenate(found)

    def _graph(self, n_tokens: int, n_out: int, n_kv: int) -> TextGraph:
        return TextGraph(self._config, self._weights, self._memory, n_tokens, n_out, n_kv, self._cache)

    def _part(self, n: int) -> int:
        """How many of `n` tokens to compute together."""
        return min(n, self._n_ubatch) if self._n_ubatch else _part(n)

    def _start(
        self,
        ids: npt.NDArray[np.int32],
        sequences: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        chosen: Sequence[int],
        n_kv: int,
    ) -> TextGraph:
        """Queue tokens that look at `n_kv` cells; return the graph, whose outputs are of those chosen."""
        memory, config = self._memory, self._config
        n = len(ids)
        n_tokens = _padded(n)
        n_out = n_tokens if len(chosen) == n_tokens else min(_padded(max(len(chosen), 1)), n_tokens)
        filled = _filled(sequences, n_tokens, FREE), _filled(positions, n_tokens)
        windows = (0, config.window) if config.window else (0,)
        masks = [memory.mask(*filled, n_kv, window) for window in windows]
        spare = memory.n_cells + np.arange(n_tokens - n)
        sizes = (n_tokens, n_out, n_kv)
        graph = self._runs.get(sizes, lambda: self._graph(*sizes))
        graph.set_inputs(
            _filled(ids, n_tokens),
            filled[1],
            np.concatenate([cells, spare]),
            masks,
            _filled(np.array(chosen, np.int32), n_out),
        )
        self._runs.start(graph)
        return graph

    def free(self) -> None:
        """Free the memory of the graphs."""
        self._runs.free()


def _filled(values: npt.NDArray[np.int32], n: int, value: int = 0) -> npt.NDArray[np.int32]:
    """Return `n` values, of which those that are missing are `value`."""
    found = np.full(n, value, np.int32)
    found[: len(values)] = values
    return found


def largest_batches(backends: Sequence[Backend], n_most: int) -> tuple[int, ...]:
    """Tokens of the batches that need most memory.

    Of several devices, one may take the products of large batches with weights in host memory
    (`Device.offload_op`), and leave those of small batches to the device that has them.
    """
    return (n_most,) if len(backends) == 1 else (n_most, min(n_most, MOST_NOT_OFFLOADED))


def _padded(n: int) -> int:
    """The size of the graph for `n` tokens: few sizes, so that one serves many batches."""
    return SIZES[bisect_left(SIZES, n)]


def _part(n: int) -> int:
    """How many of `n` tokens to compute together, so that few fill up a graph."""
    padded = _padded(n)
    if n <= LEAST_PART or padded <= MOST_WASTE * n:
        return n
    return SIZES[bisect_left(SIZES, n) - 1]


def _padded_cells(n: int) -> int:
    """The number of cells that a graph looks at when `n` are in use; kernels skip those that masks hide."""
    return -(-n // 256) * 256
