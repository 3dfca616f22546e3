"""Decoder: computes batches of tokens of any sequences, by cached graphs."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Buffer, Context, Device, DeviceType, DType, Graph, Op, Scheduler, Tensor
from ggmlb.core.errors import ArgumentError, BackendError
from ggmlb.models.rates import Rates
from ggmlb.models.runs import Runs
from ggmlb.models.text.changes import Changes
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.cost import Cost, TokenCosts
from ggmlb.models.text.experts import ExpertCache
from ggmlb.models.text.graph import ATTENTION, TextGraph, best_of, computed_mask
from ggmlb.models.text.kv_cache import FREE, SPARE
from ggmlb.models.text.memory import SequenceMemory
from ggmlb.models.text.sampling import CANDIDATE, N_BEST
from ggmlb.models.text.step import LensGraph, StepGraph

N_BATCH = 512
"""Largest batch [tokens]."""

N_OUT = 64
"""Maximum number of tokens with outputs in a batch."""

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, N_BATCH)
"""Tokens of graphs: a batch is padded to one of these sizes."""

MOST_NOT_OFFLOADED = 16
"""Largest of `SIZES` at which no device copies weights to multiply by them (`Device.offload_op`)."""

LEAST_PART = 96
"""Batches below this many tokens are never split to save padding: each part reads all weights."""

MOST_WASTE = 1.2
"""Ratio of padded to real tokens above which a batch is split."""

CELLS = 256
"""Graphs read a multiple of this number of KV cells; kernels skip masked ones."""

LEADING_BITS, LEAST_CELLS = 3, 4096
"""Cells that graphs read where a GPU computes, so that there are few graphs.

Those of few tokens: `CELLS` times a number of this many leading bits; others: a power of 2, at least this.
"""

MAX_QUEUED = 16
"""Number of queued batches without outputs at which the host waits: each holds uploads in host memory."""

WIDTHS = {"logits": "n_vocab", "hidden": "n_embd"}
"""The sizes (in `TextConfig`) of a row of each output of the graphs."""

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Traced = Mapping[str, list[Array]]
"""Lists to which values of nodes are appended, by name."""

N_TAIL = 8
"""Tokens of a prompt after the checkpoint of its states."""


class Token(NamedTuple):
    """A token of a batch, with its sequence and position.

    Attributes:
        id: Its number in the vocabulary.
        sequence: The number of its sequence, 0 or more.
        position: Its position in the sequence, from 0.
        wants_logits: Whether it has outputs.
    """

    id: int
    sequence: int
    position: int
    wants_logits: bool = False


class BatchStep(NamedTuple):
    """The tokens of a batch that one graph computes.

    Attributes:
        places: Their indices in the batch, one sequence after the other.
        sequences: If layers are recurrent: the sequences, each of which has the same number of tokens.
        checkpoints: Sequences whose states are copied before the step.
    """

    places: npt.NDArray[np.int64]
    sequences: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()


class Decoder:
    """Computes batches of tokens.

    If layers are recurrent, a batch is computed in steps of the same number of tokens of some sequences: a
    power of two, so that few graphs serve all batches, though there can be no padding tokens. Steps without
    outputs are only queued. Where one fails, its cells are freed; with recurrent states, its sequences are
    removed, and those of the steps queued before it.

    Args:
        config: The model's sizes.
        weights: By the names that the graph uses.
        memory: The KV cache, recurrent states, or both.
        backends: Streams, highest priority first.
        changes: Steering vectors and adapters.
        n_ubatch: Tokens of a sequence per step of a pipeline over devices; 0: no pipeline.
        experts: The cache of experts, or `None`.
        kv_moved: Where attention of a layer is computed, if not on the layer's device.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: SequenceMemory,
        backends: Sequence[Backend],
        changes: Changes,
        n_ubatch: int = 0,
        experts: ExpertCache | None = None,
        kv_moved: Mapping[int, Backend] | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._memory = memory
        self.changes = changes
        self._runs: Runs[Hashable, Any] = Runs(backends, parallel=n_ubatch > 0)
        self._n_ubatch = n_ubatch
        self._experts = experts
        self._kv_moved = {i: b for i, b in (kv_moved or {}).items() if config.attentions[i]}
        self._windows = config.windows
        keys = memory.cells.keys.values() if memory.cells else ()
        homes = {tensor.placed("attend").buft for tensor in keys}
        apart = [b for b in backends if b.default_buffer_type in homes and not b.default_buffer_type.is_host]
        self._computes_masks = {b.default_buffer_type: b for b in apart if _computes_mask(b, memory.n_cells)}
        self._is_coarse = any(b.device.type is DeviceType.GPU for b in apart)
        head = weights["output.weight"].placed("decode").buft
        ranks = any(b.default_buffer_type == head and _ranks(b, config.n_vocab) for b in backends)
        self._n_best = N_BEST if ranks else 0
        self._lost: set[int] = set()
        self._queued: list[tuple[npt.NDArray[np.int64], set[int]]] = []  # cells and sequences of steps
        waiting = weakref.WeakMethod(self.wait)  # the memory must not keep the decoder

        def wait() -> None:
            if (method := waiting()) is not None:
                method()

        memory.wait_by(wait)

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last batch, with its splits and placement; `None` before the first batch."""
        return None if self._runs.last is None else self._runs.scheduler

    def device_of(self, name: str) -> str:
        """Return the name of the device that computed the node `name` of the last batch."""
        last = self._runs.last
        found = None if last is None else self._runs.scheduler.get_tensor_backend(last.named[name].tensor)
        return "an unknown device" if found is None else found.name

    @property
    def buffers(self) -> list[Buffer]:
        """The compute buffers of the graphs, and host memory for their results."""
        return self._runs.buffers

    def reserve(self) -> None:
        """Allocate compute memory for the largest batches, so that no later batch allocates any.

        Raises:
            AllocationError: A device lacks room.
        """
        c = self._config
        self._runs.reserve(self._largest(), 4 * N_OUT * max(c.n_vocab, c.n_embd))

    def decode(self, batch: Sequence[Token]) -> Floats:
        """Compute a batch, cache it, and return logits.

        Args:
            batch: At most `N_BATCH` tokens, at most `N_OUT` of them with logits; those of a sequence in
                order, each after the last.

        Returns:
            Logits of the tokens that want them, in their order, shape `(n, n_vocab)`.

        Raises:
            AllocationError: The cache is full, or a device lacks room.
        """
        return self._compute(batch, "logits", {})

    def likeliest(self, batch: Sequence[Token], k: int) -> Array:
        """As `decode`, but the next batch overwrites the result, which may have the most likely tokens only.

        Args:
            batch: As for `decode`.
            k: Number of most likely tokens whose logits are needed; 0: all.

        Returns:
            `CANDIDATE`s by ascending number, shape `(n, N_BEST)`, all finite: they include all tokens with a
            logit of at least the `k`-th largest. Or all logits, shape `(n, n_vocab)`.
        """
        if len(batch) == 1 and batch[0].wants_logits:
            return self._next(batch[0], k)
        return self._compute(batch, "logits", {}, k)

    def _read(self, graph: TextGraph, output: str, wanted: slice | Array, k: int = 0) -> Array:
        """Wait; return rows `wanted` of an output of the last graph; of logits, if `k`, as `likeliest`."""
        if 0 < k < N_BEST and graph.best:
            ids, logits = (x.reshape(-1, N_BEST)[wanted] for x in self._runs.read(*graph.best))
            least = logits.min(axis=1, keepdims=True)  # others in the vocabulary may be equal to it
            if np.count_nonzero(logits > least, axis=1).min() >= k and np.isfinite(logits.sum()):
                found = np.empty(ids.shape, CANDIDATE)
                found["id"], found["logit"] = ids, logits
                found.view(np.int64).sort(axis=1)  # the upper half, as on all processors of ggml, is the id
                return found
        (rows,) = self._runs.read(getattr(graph, output))
        return rows.reshape(-1, getattr(self._config, WIDTHS[output]))[wanted]

    def wait(self) -> None:
        """Wait for the queued batches, if there are any; if that fails, their tokens are lost."""
        if self._queued:
            try:
                self._runs.wait()
            except BaseException:
                self._fail()
                raise
            self._queued.clear()

    def hidden(self, batch: Sequence[Token]) -> Floats:
        """Compute a batch, cache it, and return normalised hidden states, shape `(n, n_embd)`."""
        return self._compute(batch, "hidden", {})

    def costs(self, rates: Mapping[Device, Rates]) -> list[Cost]:
        """Return the cost of one token on each stream, with times if `rates` are given; computes nothing.

        Args:
            rates: Of the devices; empty for no times.
        """
        scheduler = self._runs.scheduler
        scheduler.split_graph(self._token_graph().graph)
        found = TokenCosts(self._config, rates).of(scheduler)
        scheduler.reset()
        return found

    def _start(
        self, graph: StepGraph, positions: npt.NDArray[np.int32] | list[int], n: int, traced: Traced
    ) -> None:
        """Queue a graph; if nodes are traced, compute it, and append their values.

        Args:
            graph: With its inputs, except those of `changes`.
            positions: The positions of its tokens.
            n: Number of its first tokens whose values are appended.
            traced: Lists by name.
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
        """Return logits of hidden states, by the model's output norm and output matrix (logit lens).

        Args:
            states: Shape `(n, n_embd)`.

        Returns:
            Shape `(n, n_vocab)`.
        """
        self.wait()
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
            (logits,) = self._runs.read(graph.logits)
            rows[:] = logits.reshape(N_OUT, -1)[: len(rows)]
        return found

    def free(self) -> None:
        """Free the compute memory of the graphs."""
        self._runs.free()

    # -- steps ---------------------------------------------------------------------------------

    def _largest(self) -> Iterator[TextGraph]:
        """Yield the graphs that need most memory."""
        slots, n_cells = self._memory.slots, self._memory.n_cells if self._memory.cells else 0
        most = N_BATCH if slots else _padded(self._n_ubatch or N_BATCH)
        n_sequences = {1, 1 << (slots.spare - 1).bit_length()} if slots else {1}
        for n_batch in largest_batches(self._runs.scheduler.backends, most):
            for n_seqs in sorted({min(n, n_batch) for n in n_sequences}):
                n = n_seqs * min(n_batch // n_seqs, self._n_ubatch or n_batch)
                for n_out in {min(n, N_OUT), max(1, min(n - 1, N_OUT))}:  # of some tokens, or of all
                    # Gaps beside a small mask may be worse used than those beside a large one.
                    for n_kv in {n_cells, min(self._least_cells(n), n_cells)}:
                        yield self._new_graph(n, n_out, n_kv, n_seqs)

    def _next(self, token: Token, k: int) -> Array:
        """Compute one token, as most steps do; return its logits as `likeliest`."""
        number, sequence, position, _ = token
        cells, slots = self._memory.cells, self._memory.slots
        if self._lost:
            self._check_lost([token])
        slot = self._slot(sequence, position) if slots else 0
        cell = cells.take(sequence, position) if cells else 0
        try:
            n_kv = self._n_kv(1)
            key = 1, 1, n_kv, 1, self.changes.key
            graph: TextGraph = self._runs.get(key, lambda: self._new_graph(1, 1, n_kv))
            masks = [cells.row(sequence, position, w)[: 2 * n_kv] for w in self._windows] if cells else ()
            graph.set_token(number, position, cell, slot, masks)
            self._start(graph, [position], 1, {})
            logits = self._read(graph, "logits", slice(1), k)
        except BaseException:
            self._fail(np.array([cell]), {sequence})
            raise
        if slots:
            slots.advance(sequence, 1)
        self._queued.clear()
        return logits

    def _slot(self, sequence: int, position: int) -> int:
        """Return the slot of a sequence's states, which is to continue at a position.

        Raises:
            AllocationError: All slots are in use.
            ArgumentError: Its states include other tokens than those before the position.
        """
        slots = self._memory.slots
        assert slots is not None
        if position != slots.length(sequence):
            raise ArgumentError(
                f"sequence {sequence} continues at position {position}, but its states hold "
                f"{slots.length(sequence)} tokens; remove it first"
            )
        return slots.slot_of(sequence)

    def _compute(self, batch: Sequence[Token], output: str, traced: Traced, k: int | None = None) -> Array:
        """Compute a batch; return an output of the graphs by the name of its attribute.

        The result is as that of `likeliest`; if `k` is `None`, as that of `decode`. Values of nodes are
        appended to `traced`. Without outputs, the batch is only queued: the host prepares the next one while
        the devices compute, and errors are raised by a later call.
        """
        memory = self._memory
        if self._lost:
            self._check_lost(batch)
        ids, sequences, positions = np.array([token[:3] for token in batch], np.int32).reshape(-1, 3).T
        order = np.argsort(sequences, kind="stable")
        if np.count_nonzero(np.diff(sequences)) > np.count_nonzero(np.diff(sequences[order])):
            wanted = [i for i in order.tolist() if batch[i].wants_logits]
            rows = self._compute([batch[i] for i in order], output, traced)
            return rows[np.argsort(wanted)]
        if memory.slots:
            for i in np.flatnonzero(np.diff(sequences, prepend=FREE)).tolist():
                self._slot(int(sequences[i]), int(positions[i]))
        cells = np.zeros(len(batch), np.int64)
        if memory.cells:
            cells = memory.cells.find_cells(len(batch))
            memory.cells.occupy(cells, sequences, positions)
        n_kv = self._n_kv(len(batch))
        weighed = tuple(int(name.split(".")[1]) for name in traced if name.endswith(ATTENTION))
        wants = np.array([token.wants_logits for token in batch], bool)
        row_of = np.cumsum(wants) - 1
        found = np.empty((int(wants.sum()), getattr(self._config, WIDTHS[output])), np.float32)
        try:
            for step in self._steps(sequences, wants):
                part = step.places
                if memory.slots:
                    memory.slots.checkpoint(step.checkpoints)
                chosen = np.flatnonzero(wants[part]).astype(np.int32)
                tokens = ids[part], sequences[part], positions[part], cells[part]
                graph = self._graph(*tokens, step.sequences, chosen, n_kv, weighed)
                padded = _filled(positions[part], graph.ids.ne[0])
                self._start(graph, padded, len(part), traced)
                memory.advance(step.sequences, len(part))
                if not chosen.size:
                    self._queued.append((cells[part], {*step.sequences}))
                    if len(self._queued) > MAX_QUEUED:
                        self.wait()
                    continue
                is_first = graph.chosen is not None or chosen.size == len(part)
                k = k if len(part) == len(batch) else None
                rows = self._read(graph, output, slice(chosen.size) if is_first else chosen, k or 0)
                self._queued.clear()
                if k is not None:
                    return rows
                found[row_of[part[chosen]]] = rows
        except BaseException:  # keys, values and states may be those of some layers only
            self._fail(cells, {*sequences.tolist()})
            raise
        return found

    def _steps(self, sequences: npt.NDArray[np.int32], wants: npt.NDArray[np.bool_]) -> Iterator[BatchStep]:
        """Yield the steps of a batch, given the sequence of each token, and whether it has outputs.

        Checkpoints are made before the last tokens of a prompt: those of a chat's next prompt often differ.
        """
        n, start = len(sequences), 0
        if self._memory.slots is None:
            while start < n:
                end = start + self._part(n - start)
                yield BatchStep(np.arange(start, end))
                start = end
            return
        left: dict[int, list[int]] = defaultdict(list)
        for i, sequence in enumerate(sequences.tolist()):
            left[sequence].append(i)
        prompts = {s: p for s, p in left.items() if len(p) > 1 and wants[p[-1]] and wants[p].sum() == 1}
        ends = {s: p[-N_TAIL:] for s, p in prompts.items()}
        starts = {s: rest for s, p in left.items() if (rest := p[:-N_TAIL] if s in ends else p)}
        for part, checkpoints in ((starts, ()), (ends, (*ends,))):
            while part:
                most = min(max(map(len, part.values())), self._n_ubatch or n)
                n_tokens = 1 << (most.bit_length() - 1)
                step = {s: places[:n_tokens] for s, places in part.items() if len(places) >= n_tokens}
                part = {s: rest for s, p in part.items() if (rest := p[n_tokens:] if s in step else p)}
                places = np.array([i for places in step.values() for i in places])
                yield BatchStep(places, tuple(step), checkpoints)
                checkpoints = ()

    def _fail(self, cells: npt.NDArray[np.int64] | None = None, sequences: Collection[int] = ()) -> None:
        """Remove the tokens of the queued steps, and those of a failed batch (`cells` and `sequences`).

        With a KV cache alone, the sequences of the queued steps are lost: see `_check_lost`.
        """
        queued, self._queued = self._queued, []
        memory = self._memory
        if memory.slots:
            for sequence in {*sequences}.union(*(names for _, names in queued)):
                memory.remove(sequence)
        elif memory.cells:
            before = np.concatenate([np.zeros(0, np.int64), *(of_step for of_step, _ in queued)])
            self._lost.update(memory.cells.sequence[before].tolist())
            memory.cells.release(before if cells is None else np.concatenate([before, cells]))

    def _check_lost(self, batch: Sequence[Token]) -> None:
        """Raise if a sequence continues after tokens that were lost with a failed batch.

        Raises:
            BackendError: Some of its tokens must be computed again.
        """
        for token in batch:
            if token.sequence in self._lost:
                n = self._memory.length(token.sequence)
                if n != token.position:
                    raise BackendError(
                        f"sequence {token.sequence} continues at position {token.position}, but only {n} of "
                        "its tokens are in the KV cache, because an earlier batch failed; start it again"
                    )
                self._lost.remove(token.sequence)

    def _new_graph(
        self, n_tokens: int, n_out: int, n_kv: int, n_sequences: int = 1, weighed: Sequence[int] = ()
    ) -> TextGraph:
        graph = TextGraph(
            self._config,
            self._weights,
            self._memory,
            n_tokens,
            n_out,
            n_kv,
            n_sequences,
            self._experts,
            self.changes,
            self._computes_masks,
            weighed,
            self._n_best,
        )
        for (_, memory), node in graph.computed.items():
            while node.op is not Op.NONE:  # up to the inputs
                self._runs.scheduler.set_tensor_backend(node, self._computes_masks[memory])
                node = node.operand(0)
        for layer, home in self._kv_moved.items():
            if layer in graph.layers:
                heads = graph.named[f"blk.{layer}.attn_heads"].tensor
                self._runs.scheduler.set_tensor_backend(heads, home)
        return graph

    def _token_graph(self) -> TextGraph:
        """Return the graph of one token that sees all cells."""
        return self._new_graph(1, 1, self._memory.n_cells if self._memory.cells else 0)

    def _part(self, n: int) -> int:
        """Return how many of `n` tokens to compute together."""
        return min(n, self._n_ubatch) if self._n_ubatch else _part(n)

    def _graph(
        self,
        ids: npt.NDArray[np.int32],
        sequences: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        of: Sequence[int],
        chosen: npt.NDArray[np.int32],
        n_kv: int,
        weighed: Sequence[int],
    ) -> TextGraph:
        """Return the graph of tokens that see `n_kv` cells, with its inputs; `chosen` tokens have outputs.

        If layers are recurrent, the tokens are as many of each of the sequences `of`. Attention weights of
        the layers `weighed` are computed, too.
        """
        memory = self._memory
        n = len(ids)
        n_sequences = 1 << (len(of) - 1).bit_length() if of else 1
        n_tokens = n // len(of) * n_sequences if of else _padded(n)
        n_out = n_tokens if len(chosen) == n_tokens else min(_padded(max(len(chosen), 1)), n_tokens)
        filled = _filled(sequences, n_tokens, FREE), _filled(positions, n_tokens)
        if n_tokens > n:
            cells = np.concatenate([cells, memory.n_cells + np.arange(n_tokens - n) % SPARE])
        slots = np.zeros(n_sequences, np.int32)
        if memory.slots:
            slots[:] = memory.slots.spare
            slots[: len(of)] = [memory.slots.slot_of(sequence) for sequence in of]
        sizes = (n_tokens, n_out, n_kv, n_sequences)
        key = (*sizes, self.changes.key, *weighed)
        graph: TextGraph = self._runs.get(key, lambda: self._new_graph(*sizes, weighed))
        graph.set_inputs(_filled(ids, n_tokens), *filled, cells, slots, _filled(chosen, n_out))
        return graph

    def names(self) -> list[str]:
        """Return the names that `trace` accepts, of nodes and attention weights, in order of computation."""
        found: list[str] = []
        for name in self._token_graph().named:
            layer, _, part = name.rpartition(".")
            found += [f"{layer}.{ATTENTION}", name] if part == "attn_heads" else [name]
        return found

    def trace(self, batch: Sequence[Token], names: Collection[str]) -> dict[str, Array]:
        """Compute a batch of one sequence; return the values of the nodes `names` for all its tokens.

        Returns:
            Values of nodes, tokens outermost; of attention weights the shape is `(n_head, n_tokens, n_seen)`.
        """
        traced: dict[str, list[Array]] = {name: [] for name in names}
        self._compute(batch, "hidden", traced)
        found = {name: np.concatenate(parts) for name, parts in traced.items()}
        for name in names:
            if name.endswith(ATTENTION) and self._memory.cells:
                own = self._memory.cells.cells_of(batch[0].sequence)
                found[name] = found[name].transpose(1, 0, 2)[..., own]
        return found

    def _n_kv(self, n_tokens: int = 0) -> int:
        """Return how many cells a graph of `n_tokens` reads; few different numbers where a GPU computes."""
        if self._memory.cells is None:
            return 0
        n = -(-max(self._memory.cells.n_used, 1) // CELLS)
        if n_tokens and self._is_coarse:
            n_bits = (n - 1).bit_length()
            step = 1 << max(n_bits - LEADING_BITS, 0)
            few = -(-n // step) * step
            n = few if n_tokens <= N_OUT else max(1 << n_bits, self._least_cells(n_tokens) // CELLS)
        return min(n * CELLS, self._memory.n_cells)

    def _least_cells(self, n_tokens: int) -> int:
        """Return the least number of cells that a graph of `n_tokens` reads, of a large cache."""
        return LEAST_CELLS if n_tokens > N_OUT and self._is_coarse else CELLS


def _filled(values: npt.NDArray[np.int32], n: int, value: int = 0) -> npt.NDArray[np.int32]:
    """Return values padded to `n` by `value`."""
    if len(values) == n:
        return values
    found = np.full(n, value, np.int32)
    found[: len(values)] = values
    return found


def largest_batches(backends: Sequence[Backend], n_most: int) -> tuple[int, ...]:
    """Return the batch sizes, at most `n_most`, that need the most memory on these streams.

    A device with separate memory may take the products of large batches with weights in host memory
    (`Device.offload_op`), and leave those of small batches to the host.
    """
    may_offload = len(backends) > 1 and not all(b.device.buffer_type.is_host for b in backends)
    return (n_most, min(n_most, MOST_NOT_OFFLOADED)) if may_offload else (n_most,)


def _padded(n: int) -> int:
    """Return the size of the graph for `n` tokens: few sizes, so that one graph serves many batches."""
    return SIZES[bisect_left(SIZES, n)]


def _part(n: int) -> int:
    """Return how many of `n` tokens to compute together, so that there is little padding."""
    padded = _padded(n)
    if n <= LEAST_PART or padded <= MOST_WASTE * n:
        return n
    return SIZES[bisect_left(SIZES, n) - 1]


def _computes_mask(backend: Backend, n_kv: int) -> bool:
    """Whether a backend computes all nodes of a mask over `n_kv` cells (`computed_mask`)."""
    ctx = Context()
    operands = (ctx.new_tensor(DType.F16, ne) for ne in ((n_kv,), (n_kv,), (1, N_BATCH)))
    graph = Graph().build_forward_expand(computed_mask(ctx, *operands))
    return all(backend.supports_op(node) for node in graph.nodes)


def _ranks(backend: Backend, n_vocab: int) -> bool:
    """Whether a backend finds the most likely tokens (`best_of`), faster than the host after reading all."""
    if backend.device.type is not DeviceType.GPU or n_vocab <= N_BEST:
        return False
    ctx, graph = Context(), Graph()
    for node in best_of(ctx, ctx.new_tensor(DType.F32, (n_vocab, N_OUT)), N_BEST):
        graph.build_forward_expand(node)
    return all(backend.supports_op(node) for node in graph.nodes)
