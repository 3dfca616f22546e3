"""RecurrentDecoder: computes batches of tokens of recurrent models (Mamba), by cached graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ggmlb.core.errors import ArgumentError
from ggmlb.models.text.decoder import (
    MAX_QUEUED,
    N_BATCH,
    N_OUT,
    BaseDecoder,
    Floats,
    Token,
    Traced,
    largest_batches,
)
from ggmlb.models.text.graph import RecurrentGraph
from ggmlb.models.text.state_cache import StateCache


class RecurrentDecoder(BaseDecoder[StateCache]):
    """Decoder of models with recurrent states (Mamba) instead of a KV cache.

    A batch is computed in steps, each of the same number of tokens of some sequences: powers of two, so that
    few graphs serve all batches, though there can be no padding tokens. Steps without outputs are only
    queued. Where a step fails, the sequences of the batch, and of those queued before it, are removed.
    """

    def _fail(self, changed: Iterable[int] = ()) -> None:
        """Remove the sequences of the queued steps, and those of a failed batch."""
        sequences = {*self._queued, *changed}
        self._queued.clear()
        for sequence in sequences:
            self._memory.remove(sequence)

    def _largest(self) -> Iterator[RecurrentGraph]:
        n_most = 1 << (self._memory.spare - 1).bit_length()
        for n in largest_batches(self._runs.scheduler.backends, N_BATCH):
            for n_sequences in (1, min(n, n_most)):
                n_tokens = min(n // n_sequences, self._n_ubatch or n)
                yield self._graph(n_tokens, n_sequences, min(n_tokens * n_sequences, N_OUT))

    def _token_graph(self) -> RecurrentGraph:
        return self._graph(1, 1, 1)

    def _graph(self, n_tokens: int, n_sequences: int, n_out: int) -> RecurrentGraph:
        sizes = n_tokens, n_sequences, n_out
        return RecurrentGraph(self._config, self._weights, self._memory, *sizes, self.changes)

    def _compute(self, batch: Sequence[Token], output: str, traced: Traced) -> Floats:
        left: dict[int, list[int]] = defaultdict(list)
        for i, token in enumerate(batch):
            left[token.sequence].append(i)
        rows: dict[int, Floats] = {}
        try:
            for sequence, places in left.items():
                self._begin(sequence, batch[places[0]].position)
            while left:
                most = min(max(map(len, left.values())), self._n_ubatch or len(batch))
                n_tokens = 1 << (most.bit_length() - 1)
                step = {s: p[:n_tokens] for s, p in left.items() if len(p) >= n_tokens}
                for sequence in step:
                    del left[sequence][:n_tokens]
                    if not left[sequence]:
                        del left[sequence]
                rows |= self._step(batch, step, output, traced)
        except BaseException:  # states include a part of the batch
            self._fail(token.sequence for token in batch)
            raise
        found = [rows[i] for i, token in enumerate(batch) if token.wants_logits]
        return np.stack(found) if found else np.zeros((0, 0), np.float32)

    def _begin(self, sequence: int, position: int) -> None:
        if position != self._memory.length(sequence):
            raise ArgumentError(
                f"sequence {sequence} continues at position {position}, but its states hold "
                f"{self._memory.length(sequence)} tokens; remove it first"
            )
        self._memory.slot_of(sequence)

    def _step(
        self,
        batch: Sequence[Token],
        step: Mapping[int, Sequence[int]],
        output: str,
        traced: Traced,
    ) -> dict[int, Floats]:
        """Compute the same number of tokens of some sequences; return rows by their indices in the batch."""
        memory = self._memory
        n_tokens = len(next(iter(step.values())))
        n_sequences = 1 << (len(step) - 1).bit_length()
        n = n_tokens * n_sequences
        places = [i for found in step.values() for i in found]
        ids = np.zeros(n, np.int32)
        ids[: len(places)] = [batch[i].id for i in places]
        slots = np.full(n_sequences, memory.spare, np.int32)
        slots[: len(step)] = [memory.slot_of(sequence) for sequence in step]
        wanted = [j for j, i in enumerate(places) if batch[i].wants_logits]
        n_out = 0 if not wanted else 1 << (len(wanted) - 1).bit_length()
        chosen = np.zeros(n_out, np.int32)
        chosen[: len(wanted)] = wanted
        sizes = (n_tokens, n_sequences, n_out)
        graph: RecurrentGraph = self._runs.get((*sizes, self.changes.key), lambda: self._graph(*sizes))
        graph.set_inputs(ids, slots, chosen)
        positions = np.zeros(n, np.int32)
        positions[: len(places)] = [batch[i].position for i in places]
        self._start(graph, positions, n, traced)
        for sequence in step:
            memory.advance(sequence, n_tokens)
        found = getattr(graph, output)
        if found is None:
            self._queued += step
            if len(self._queued) > MAX_QUEUED:
                self.wait()
            return {}
        table = self._runs.read(found).reshape(n_out, -1)
        self._queued.clear()
        at = wanted if n_out == n else range(len(wanted))
        return {places[j]: table[row].copy() for j, row in zip(wanted, at, strict=True)}
