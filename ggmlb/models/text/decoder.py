"""Decoder: logits of batches of tokens of any sequences, by cached graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Buffer, Device, Scheduler, Tensor
from ggmlb.models.rates import Rates
from ggmlb.models.runs import Runs
from ggmlb.models.text.attention import AttentionGraph
from ggmlb.models.text.changes import Changes
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.cost import Cost, TokenCosts
from ggmlb.models.text.experts import ExpertCache
from ggmlb.models.text.graph import TextGraph
from ggmlb.models.text.memory import FREE, KvMemory
from ggmlb.models.text.step import LensGraph, StepGraph

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

ATTENTION = "attn_weights"
"""The name of attention weights in a layer."""

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Traced = Mapping[str, list[Array]]
"""Where values of nodes are added, by their names."""

NOTHING: Traced = {}


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


AnyMemory = TypeVar("AnyMemory")


class BaseDecoder(ABC, Generic[AnyMemory]):
    """Base class of what computes batches of tokens.

    Args:
        config: The model's sizes.
        weights: By the names that the graph uses.
        memory: Where earlier tokens are kept.
        backends: Streams, highest priority first.
        changes: What is added to hidden states and products.
        n_ubatch: Most tokens of a sequence in a batch's parts, which devices compute one behind the other; 0:
            one part at a time.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: AnyMemory,
        backends: Sequence[Backend],
        changes: Changes,
        n_ubatch: int = 0,
    ) -> None:
        self._config = config
        self._weights = weights
        self._memory = memory
        self.changes = changes
        self._runs: Runs[Hashable, Any] = Runs(backends, parallel=n_ubatch > 0)
        self._n_ubatch = n_ubatch

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last batch, to see its splits and placement; `None` before the first."""
        return None if self._runs.last is None else self._runs.scheduler

    def device_of(self, name: str) -> str:
        """Return the name of the device that computed a node of the last batch."""
        last = self._runs.last
        found = None if last is None else self._runs.scheduler.get_tensor_backend(last.named[name].tensor)
        return "an unknown device" if found is None else found.name

    @property
    def buffers(self) -> list[Buffer]:
        """The memory of the graphs."""
        return self._runs.scheduler.buffers

    @abstractmethod
    def reserve(self) -> None:
        """Allocate the memory that the largest batches need, so that none allocates any.

        Raises:
            AllocationError: A device lacks room.
        """

    @abstractmethod
    def decode(self, batch: Sequence[Token], is_lent: bool = False) -> Floats:
        """Compute a batch; return the logits of the tokens that want them, shape `(n, n_vocab)`.

        Args:
            batch: Tokens.
            is_lent: Whether the next batch may overwrite the result, so that it need not be copied.
        """

    @abstractmethod
    def hidden(self, batch: Sequence[Token]) -> Floats:
        """As `decode`, but return normalised hidden states, shape `(n, n_embd)`."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names that `trace` knows, in the order in which the nodes are computed."""

    @abstractmethod
    def _token_graph(self) -> StepGraph:
        """Return the graph of one token."""

    def costs(self, rates: Mapping[Device, Rates]) -> list[Cost]:
        """Return what one token costs each stream; its graph is split, and not computed.

        Args:
            rates: Of the devices; empty for no times.
        """
        scheduler = self._runs.scheduler
        scheduler.split_graph(self._token_graph().graph)
        found = TokenCosts(self._config, rates).of(scheduler)
        scheduler.reset()
        return found

    def trace(self, batch: Sequence[Token], names: Collection[str]) -> dict[str, Array]:
        """Compute a batch of one sequence, all of whose tokens want logits.

        Returns:
            Values of nodes, tokens outermost; of attention weights the shape is `(n_head, n_tokens, n_seen)`.
        """
        traced: dict[str, list[Array]] = {name: [] for name in names}
        self._trace(batch, traced)
        return {name: np.concatenate(parts) for name, parts in traced.items()}

    @abstractmethod
    def _trace(self, batch: Sequence[Token], traced: Traced) -> None:
        """Compute a batch, and add values of nodes."""

    def _start(
        self, graph: StepGraph, positions: npt.NDArray[np.int32] | list[int], n: int, traced: Traced
    ) -> None:
        """Queue a graph; where nodes are traced, compute it, and add their values.

        Args:
            graph: With its inputs, except what is added.
            positions: Those of its tokens.
            n: Tokens of which values are added, the first ones.
            traced: Where.
        """
        graph.set_changes(self.changes, positions)
        if not traced:
            self._runs.start(graph)
            return
        nodes = {name: graph.named[name] for name in traced}
        values = self._runs.traced(graph, (node.tensor for node in nodes.values()))
        for name, node in nodes.items():
            traced[name].append(values[node.tensor].reshape(-1, *node.row)[:n])

    def lens(self, states: Floats) -> Floats:
        """Return the logits of any hidden states, as after the last layer.

        Args:
            states: Shape `(n, n_embd)`.

        Returns:
            Shape `(n, n_vocab)`.
        """
        found = np.empty((len(states), self._config.n_vocab), np.float32)
        for start in range(0, len(states), N_OUT):
            rows = found[start : start + N_OUT]
            part = np.zeros((N_OUT, self._config.n_embd), np.float32)
            part[: len(rows)] = states[start : start + N_OUT]
            graph: LensGraph = self._runs.get(
                ("lens", self.changes.key),
                lambda: LensGraph(self._config, self._weights, N_OUT, self.changes),
            )
            graph.states.set(part)
            graph.set_changes(self.changes, np.zeros(0, np.int32))
            self._runs.start(graph)
            self._runs.wait()
            rows[:] = graph.logits.to_numpy().reshape(N_OUT, -1)[: len(rows)]
        return found

    def free(self) -> None:
        """Free the memory of the graphs."""
        self._runs.free()


class Decoder(BaseDecoder[KvMemory]):
    """Computes batches of tokens, and keeps their keys and values.

    Args:
        cache: Experts in devices' memory, or `None`; the others as for `BaseDecoder`.
        kv_moved: Where attention of a layer is computed, if not on the layer's device.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: KvMemory,
        backends: Sequence[Backend],
        changes: Changes,
        n_ubatch: int = 0,
        cache: ExpertCache | None = None,
        kv_moved: Mapping[int, Backend] | None = None,
    ) -> None:
        super().__init__(config, weights, memory, backends, changes, n_ubatch)
        self._cache = cache
        self._kv_moved = kv_moved or {}
        self._windows = (0, config.window) if config.window else (0,)

    def reserve(self) -> None:
        """Allocate the memory that the largest batches need, so that none allocates any.

        Raises:
            AllocationError: A device lacks room.
        """
        self._runs.reserve(
            self._new_graph(n, n_out, self._memory.n_cells)
            for n in largest_batches(self._runs.scheduler.backends, _padded(self._n_ubatch or N_BATCH))
            for n_out in {min(n, N_OUT), max(1, min(n - 1, N_OUT))}  # of those chosen, or of all
        )

    def decode(self, batch: Sequence[Token], is_lent: bool = False) -> Floats:
        """Compute a batch, and keep its keys and values.

        Args:
            batch: At most `N_BATCH` tokens, of which at most `N_OUT` want logits.
            is_lent: Whether the next batch may overwrite the result.

        Returns:
            Logits of the tokens that want them, in their order, shape `(n, n_vocab)`.

        Raises:
            AllocationError: Too few cells are free.
        """
        if is_lent and len(batch) == 1 and batch[0].wants_logits:
            return self._next(batch[0])
        return self._each(batch, lambda graph: graph.logits, self._config.n_vocab)

    def hidden(self, batch: Sequence[Token]) -> Floats:
        """As `decode`, but return normalised hidden states, shape `(n, n_embd)`."""
        return self._each(batch, lambda graph: graph.hidden, self._config.n_embd)

    def _next(self, token: Token) -> Floats:
        """Compute one token, as most steps do, and return its logits, which the next batch overwrites."""
        memory = self._memory
        cell = memory.take(token.sequence, token.position)
        try:
            sizes = 1, 1, self._n_kv()
            graph: TextGraph = self._runs.get((*sizes, self.changes.key), lambda: self._new_graph(*sizes))
            rows = [memory.row(token.sequence, token.position, window) for window in self._windows]
            masks = [row[: 2 * sizes[2]] for row in rows]
            graph.set_token(token.id, token.position, cell, masks)
            self._start(graph, [token.position], 1, NOTHING)
            self._runs.wait()
        except BaseException:
            memory.release(np.array([cell]))
            raise
        return graph.lent(graph.logits).reshape(1, -1)

    def _each(
        self,
        batch: Sequence[Token],
        output: Callable[[TextGraph], Tensor],
        width: int,
        traced: Traced = NOTHING,
    ) -> Floats:
        """Compute a batch in parts that waste little; return rows of an output, and add to `traced`."""
        memory = self._memory
        ids, sequences, positions = np.array([token[:3] for token in batch], np.int32).reshape(-1, 3).T
        cells = memory.find_cells(len(batch))
        memory.occupy(cells, sequences, positions)
        n_kv = self._n_kv()
        found = [np.empty((0, width), np.float32)]
        start = 0
        try:
            while start < len(batch):
                end = start + self._part(len(batch) - start)
                chosen = [i for i, token in enumerate(batch[start:end]) if token.wants_logits]
                part = slice(start, end)
                graph = self._graph(ids[part], sequences[part], positions[part], cells[part], chosen, n_kv)
                filled = _filled(positions[part], graph.ids.ne[0])
                self._start(graph, filled, end - start, traced)
                if chosen or not self._n_ubatch:
                    self._runs.wait()
                if chosen:
                    found.append(graph.lent(output(graph)).reshape(-1, width)[: len(chosen)].copy())
                start = end
        except BaseException:  # the cells have no keys and values, or but some layers'
            memory.release(cells)
            raise
        return found[1] if len(found) == 2 else np.concatenate(found)

    def _new_graph(self, n_tokens: int, n_out: int, n_kv: int) -> TextGraph:
        sizes = (n_tokens, n_out, n_kv)
        graph = TextGraph(self._config, self._weights, self._memory, *sizes, self._cache, self.changes)
        for layer, home in self._kv_moved.items():
            if layer in graph.layers:
                heads = graph.named[f"blk.{layer}.attn_heads"].tensor
                self._runs.scheduler.set_tensor_backend(heads, home)
        return graph

    def _token_graph(self) -> TextGraph:
        return self._new_graph(1, 1, self._memory.n_cells)

    def _part(self, n: int) -> int:
        """How many of `n` tokens to compute together."""
        return min(n, self._n_ubatch) if self._n_ubatch else _part(n)

    def _graph(
        self,
        ids: npt.NDArray[np.int32],
        sequences: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        chosen: Sequence[int],
        n_kv: int,
    ) -> TextGraph:
        """Return the graph of tokens that look at `n_kv` cells; its outputs are of those chosen."""
        memory = self._memory
        n = len(ids)
        n_tokens = _padded(n)
        n_out = n_tokens if len(chosen) == n_tokens else min(_padded(max(len(chosen), 1)), n_tokens)
        filled = _filled(sequences, n_tokens, FREE), _filled(positions, n_tokens)
        if n_tokens > n:
            cells = np.concatenate([cells, memory.n_cells + np.arange(n_tokens - n)])
        sizes = (n_tokens, n_out, n_kv)
        graph: TextGraph = self._runs.get((*sizes, self.changes.key), lambda: self._new_graph(*sizes))
        graph.set_inputs(
            _filled(ids, n_tokens),
            filled[1],
            cells,
            self._masks(*filled, n_kv),
            _filled(np.array(chosen, np.int32), n_out),
        )
        return graph

    def names(self) -> list[str]:
        """Return the names that `trace` knows, in the order in which the nodes are computed."""
        found: list[str] = []
        for name in self._token_graph().named:
            layer, _, part = name.rpartition(".")
            found += [f"{layer}.{ATTENTION}", name] if part == "attn_heads" else [name]
        return found

    def trace(self, batch: Sequence[Token], names: Collection[str]) -> dict[str, Array]:
        """As `BaseDecoder.trace`; attention weights are computed from what is kept."""
        layers = [int(name.split(".")[1]) for name in names if name.endswith(ATTENTION)]
        queries = {layer: f"blk.{layer}.attn_q_rope" for layer in layers}
        nodes = {name for name in names if not name.endswith(ATTENTION)}
        found = super().trace(batch, nodes.union(queries.values()))
        if layers:
            attention = self._attention(batch, {layer: found[name] for layer, name in queries.items()})
            found |= {f"blk.{layer}.{ATTENTION}": weights for layer, weights in attention.items()}
        return {name: found[name] for name in names}

    def _trace(self, batch: Sequence[Token], traced: Traced) -> None:
        self._each(batch, lambda graph: graph.hidden, self._config.n_embd, traced)

    def _attention(self, batch: Sequence[Token], queries: Mapping[int, Array]) -> dict[int, Array]:
        """Return the attention weights of a batch of one sequence, whose keys are kept, by layer.

        Args:
            batch: The tokens.
            queries: For each layer, rotated queries.

        Returns:
            Shape `(n_head, n_tokens, n_seen)`: those of the sequence's tokens so far, by position.
        """
        memory, n = self._memory, len(batch)
        n_kv = self._n_kv()
        sequence = batch[0].sequence
        positions = np.array([token.position for token in batch], np.int32)
        masks = self._masks(np.full(n, sequence, np.int32), positions, n_kv)
        cells = np.flatnonzero(memory.sequence == sequence)
        cells = cells[np.argsort(memory.position[cells])]
        layers = tuple(queries)
        graph: AttentionGraph = self._runs.get(
            (ATTENTION, layers, n, n_kv), lambda: AttentionGraph(self._config, memory, layers, n, n_kv)
        )
        graph.set_inputs(queries, masks)
        self._runs.start(graph)
        self._runs.wait()
        shape = (self._config.n_head, n, n_kv)
        return {layer: y.to_numpy().reshape(shape)[..., cells] for layer, y in graph.weights.items()}

    def _n_kv(self) -> int:
        return min(_padded_cells(self._memory.n_used), self._memory.n_cells)

    def _masks(
        self, sequences: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], n_kv: int
    ) -> list[npt.NDArray[np.float16]]:
        return [self._memory.mask(sequences, positions, n_kv, window) for window in self._windows]


def _filled(values: npt.NDArray[np.int32], n: int, value: int = 0) -> npt.NDArray[np.int32]:
    """Return `n` values, of which those that are missing are `value`."""
    if len(values) == n:
        return values
    found = np.full(n, value, np.int32)
    found[: len(values)] = values
    return found


def largest_batches(backends: Sequence[Backend], n_most: int) -> tuple[int, ...]:
    """Tokens of the batches that need most memory.

    Of several devices, one with memory of its own may take the products of large batches with weights in
    host memory (`Device.offload_op`), and leave those of small batches to the device that has them.
    """
    may_offload = len(backends) > 1 and not all(b.device.buffer_type.is_host for b in backends)
    return (n_most, min(n_most, MOST_NOT_OFFLOADED)) if may_offload else (n_most,)


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
