"""Training of LoRA adapters: the graph of whole sequences, and its trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ggmlb import Backend, Scheduler, Tensor, TensorFlag
from ggmlb.core.errors import ArgumentError
from ggmlb.core.lifetime import Closeable
from ggmlb.models.text.blocks.attention import attend, hidden_tokens
from ggmlb.models.text.graph import LayersGraph
from ggmlb.optimize import Dataset, OptContext

if TYPE_CHECKING:
    from ggmlb.models.text.adapter import Adapter
    from ggmlb.models.text.blocks import Attention
    from ggmlb.models.text.changes import Changes
    from ggmlb.models.text.config import TextConfig
    from ggmlb.optimize import Optimizer, Schedule


class TrainingGraph(LayersGraph):
    """The forward graph of whole sequences with causal attention, for training.

    Attention consists of products and a soft max, which have gradients.

    Attributes:
        ids: Input: token numbers, i32 `[n_ctx, n_sequences]`.
        logits: f32 `[n_vocab, n_ctx * n_sequences]`.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        n_ctx: int,
        n_sequences: int,
        changes: Changes,
    ) -> None:
        n_tokens = n_ctx * n_sequences
        super().__init__(config, weights, n_ctx > config.n_ctx_orig, changes)
        self._n_ctx, self._n_sequences = n_ctx, n_sequences
        self.ids = self.ctx.set_input(self.ctx.new_tensor("i32", (n_ctx, n_sequences), "ids"))
        sequences, place = np.zeros(n_ctx, np.int32), np.arange(n_ctx, dtype=np.int32)
        self.positions = self.ctx.from_array(np.tile(place, n_sequences), name="positions")
        self._masks = {}
        for window in config.windows:
            hidden = hidden_tokens(sequences, place, (sequences, place), window)
            mask = np.where(hidden, -np.inf, 0).astype(np.float16)
            self._masks[window] = self.ctx.from_array(mask, name=f"mask_{window}")
        self.logits = self._head(self._hidden(self.ctx.reshape_1d(self.ids, n_tokens)))[1]

    def temperature(self, factor: float, period: int) -> Tensor:
        """Return the scale of queries, a constant of the positions."""
        place = np.tile(np.arange(self._n_ctx), self._n_sequences)[:, None, None]
        return self.ctx.from_array((1 + factor * np.log1p(place // period)).astype(np.float32))

    def _scaled(self, adapter: Adapter, y: Tensor, rank: int) -> Tensor:
        return self.ctx.scale(y, adapter.multiplier(rank))

    def attend(self, attention: Attention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention over the tokens of each sequence, by ops with gradients."""
        ctx, sizes = self.ctx, (self._n_ctx, self._n_sequences)
        q, k, v = (ctx.permute(ctx.reshape_4d(x, *x.ne[:2], *sizes), 0, 2, 1, 3) for x in (query, key, value))
        sinks = attention.sinks(self.weights, layer)
        mixed = attend(ctx, attention, q, k, v, self._masks[attention.window], sinks, has_gradient=True)
        return ctx.reshape_3d(mixed, *mixed.ne[:2], query.ne[2])


class Training(Closeable):
    """Trainer of an adapter, made by `TextModel.training`; the model's own weights stay as they are.

    The model can be used meanwhile, as in a callback: it has the factors of the last step. A context manager,
    which frees the memory of training; the adapter stays.

    Attributes:
        graph: The graph of a batch of sequences.
        adapter: The adapter.
        scheduler: Computes the graphs.
        opt: The optimizer context: steps, evaluation, checkpoints.

    Raises:
        AllocationError: A device lacks room.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        backends: Sequence[Backend],
        adapter: Adapter,
        optimizer: Optimizer | Schedule,
        opt_period: int,
        seed: int,
    ) -> None:
        self.graph, self.adapter = graph, adapter
        with ExitStack() as resources:
            resources.callback(self._unmark)
            for tensor in self._factors():
                tensor.flags |= TensorFlag.PARAM
            self.scheduler = resources.enter_context(Scheduler(backends, keep_graphs=True))
            self.opt = OptContext(
                self.scheduler, graph.ids, graph.logits, "cross_entropy", optimizer,
                opt_period=opt_period, class_labels=True, n_batch=graph.ids.ne[1], seed=seed,
            )  # fmt: skip
            resources.enter_context(self.opt)
            self._resources = resources.pop_all()

    def dataset(self, tokens: Sequence[int]) -> Dataset:
        """Return the data set of a text: sequences of tokens, labelled by the next token of each.

        Raises:
            ArgumentError: The text is shorter than a batch.
        """
        n_ctx, n_batch = self.graph.ids.ne[:2]
        n = (len(tokens) - 1) // n_ctx
        if n < n_batch:
            raise ArgumentError(
                f"dataset: {len(tokens)} tokens; a batch has {n_batch} sequences of {n_ctx}, and needs "
                f"{n_batch * n_ctx + 1}: give a longer text, or smaller batches"
            )
        numbers = np.array(tokens[: n * n_ctx + 1], np.int32)
        return Dataset(numbers[:-1].reshape(n, n_ctx), labels=numbers[1:].reshape(n, n_ctx))

    def _factors(self) -> list[Tensor]:
        return [tensor for factors in self.adapter.factors.values() for tensor in factors]

    def _unmark(self) -> None:
        for tensor in self._factors():
            tensor.flags &= ~TensorFlag.PARAM

    def close(self) -> None:
        """Free the memory of training; has no effect if already closed."""
        self._resources.close()
