"""Graphs of a step of generation, from tokens to logits through the layers of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggmlb import BufferType, Context, DType, Tensor
from ggmlb.core.errors import ArgumentError
from ggmlb.models.text.blocks.attention import attend, attention_weights
from ggmlb.models.text.experts import KINDS
from ggmlb.models.text.step import StepGraph

if TYPE_CHECKING:
    from ggmlb.models.text.blocks import Attention, Rope
    from ggmlb.models.text.changes import Changes
    from ggmlb.models.text.config import TextConfig
    from ggmlb.models.text.experts import ExpertCache
    from ggmlb.models.text.kv_cache import KvCache
    from ggmlb.models.text.memory import SequenceMemory

MAX_UPLOADED = 64 << 10
"""Largest attention mask that the host computes, if a device can [bytes]."""

ATTENTION = "attn_weights"
"""The name of attention weights in a layer."""


class LayersGraph(StepGraph):
    """Base class of graphs from tokens to logits through the blocks of layers, which use its methods.

    Attributes:
        chosen: Input: indices of tokens with outputs, i32; `None`: all tokens.
        positions: Positions of tokens in their sequences, i32 `[n_tokens]`.
        slots: Of recurrent layers: the slot of each sequence, i32 `[n_sequences]`.
        sizes: Of recurrent layers: tokens of each sequence, and sequences.
    """

    positions: Tensor
    slots: Tensor
    sizes: tuple[int, int]

    def __init__(
        self, config: TextConfig, weights: Mapping[str, Tensor], is_long: bool, changes: Changes
    ) -> None:
        super().__init__(config, weights, changes)
        self._factors = weights.get("rope_freqs.weight") or weights.get(
            "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
        )
        self.chosen: Tensor | None = None
        self._cache: ExpertCache | None = None
        self._temperatures: dict[tuple[float, int], Tensor] = {}

    def _hidden(self, ids: Tensor) -> Tensor:
        """Return the hidden states after the last layer, of tokens with outputs."""
        x = self._begin(ids)
        for layer in self.layers:
            x = self._end(layer, self.config.layers[layer].apply(self, layer, x))
        return x

    def outputs_of(self, layer: int, x: Tensor) -> Tensor:
        """Return the rows of tokens with outputs in the last layer; of all tokens in others."""
        is_last = layer == self.config.n_layer - 1
        return x if self.chosen is None or not is_last else self.ctx.get_rows(x, self.chosen)

    def rows_like(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the rows of `x` that `y` has: those of all tokens, or of tokens with outputs."""
        return x if self.chosen is None or x.ne[1] == y.ne[1] else self.ctx.get_rows(x, self.chosen)

    def earlier(self, name: str) -> Tensor:
        """Return a named node of the embeddings or of an earlier layer.

        Raises:
            ArgumentError: It is not computed: the graph starts from hidden states of another model.
        """
        if name not in self.named:
            raise ArgumentError(
                f"layers of {self.config.name} read {name!r} beside hidden states, and cannot be computed "
                "from these alone; compare the models with max_tokens=0"
            )
        return self.named[name].tensor

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """Return queries or keys, `[n_key, heads, n_tokens]`, rotated by the tokens' positions."""
        return self.ctx.rope_ext(
            x, self.positions, self._factors if rope.has_factors else None,
            rope.n_dims, rope.mode, rope.n_ctx_orig,
            rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor,
            rope.beta_fast, rope.beta_slow,
        )  # fmt: skip

    def temperature(self, factor: float, period: int) -> Tensor:
        """Return the scale of queries, `1 + factor * log(1 + position // period)`, f32 `[1, 1, n_tokens]`."""
        key = factor, period
        if key not in self._temperatures:
            n = self.positions.ne[0]
            self._temperatures[key] = self._input(f"temperature_{period}", DType.F32, 1, 1, n)
        return self._temperatures[key]

    def set_temperatures(self, positions: npt.NDArray[np.int32] | list[int]) -> None:
        """Write the scales of queries at the positions of the graph's tokens."""
        for (factor, period), tensor in self._temperatures.items():
            self.write(tensor, 1 + factor * np.log1p(np.asarray(positions) // period))

    def attend(self, attention: Attention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of each token.

        Args:
            attention: Its sizes.
            layer: The layer.
            query: Rotated, `[n_key, n_head, n_tokens]`.
            key: Rotated, `[n_key, n_head_kv, n_tokens]`.
            value: `[n_value, n_head_kv, n_tokens]`.

        Returns:
            `[n_value, n_head, n_tokens]`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no keys and values")

    def states(self, layer: int, name: str) -> Tensor:
        """Return the table of a recurrent layer's states, a row for each slot."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent states")

    def keep(self, table: Tensor, states: Tensor) -> None:
        """Write states into the slots of their sequences; nothing of the graph reads them afterwards."""
        rows = self.ctx.reshape_2d(states, table.ne[0], self.sizes[1])
        self.graph.build_forward_expand(self.ctx.set_rows(table, rows, self.slots))

    def unpack(self, table: Tensor, packed: Tensor, ne: Sequence[int]) -> Tensor:
        """Return the outputs of a scan, of shape `ne`; the states after them go to their slots of `table`."""
        n, row, element = prod(ne), table.ne[0], packed.nb[0]
        self.keep(table, self.ctx.view_2d(packed, row, self.sizes[1], row * element, n * element))
        return self.ctx.reshape_4d(self.ctx.view_1d(packed, n), *ne)

    def expert_matrices(self, layer: int, chosen: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the chosen experts' indices in the matrices (`KINDS`) of a cache or of all, and these."""
        if self._cache is not None and self._cache.serves(layer, chosen.ne[1]):
            return self._cache.choose(self.ctx, layer, chosen)
        return chosen, [self.weights[f"blk.{layer}.{kind}"] for kind in KINDS]

    def expert_product(self, name: str, weight: Tensor, x: Tensor, slots: Tensor, chosen: Tensor) -> Tensor:
        """Return the product of each token with the matrices of its experts, and with their biases, if any.

        Args:
            name: The weight in the file.
            weight: All experts, or those that are cached.
            x: Tokens.
            slots: Indices of the chosen experts in `weight`.
            chosen: Numbers of the chosen experts.

        Returns:
            `[n, n_used, n_tokens]`.
        """
        ctx = self.ctx
        y = ctx.mul_mat_id(weight, x, slots)
        y = self._adapted(name, y, lambda factor, x: ctx.mul_mat_id(factor, x, chosen), x)
        bias = self.weights.get(name.removesuffix("weight") + "bias")
        y = y if bias is None else ctx.add_id(y, bias, chosen)
        return self.label(name.removesuffix(".weight"), y, y.ne[1], y.ne[0])


class TextGraph(LayersGraph):
    """The graph for `n_tokens` tokens that see `n_kv` cells of the KV cache.

    Positions, cells, masks and slots are inputs: one graph serves every step of its sizes.

    `n_tokens` includes padding; `n_out` tokens have outputs. If layers are recurrent, the tokens are as many
    of each of `n_sequences` sequences, one after the other; whole sequences may be padding.

    Masks of several tokens larger than `MAX_UPLOADED` are computed by the devices of which `computes_masks`
    has the memory. Of the layers in `traced`, the weights of attention are computed, too, which the fused op
    does not store.

    Attributes:
        ids: Input: token numbers, i32 `[n_tokens]`.
        positions: Input: positions in their sequences, i32 `[n_tokens]`.
        cells: Input: the cells of the tokens in the KV cache, i64 `[n_tokens]`.
        slots: Input: the slot of each sequence, i32 `[n_sequences]`.
        masks: Inputs: attention masks, 0 or -inf, f16 `[n_kv, n_tokens]`, by the index of their window in
            `TextConfig.windows`.
        spans: Inputs: the same in short form (`KvCache.spans`), from which a device computes large masks;
            each f16 `[n_kv]`.
        computed: The masks that devices compute, by window and memory.
        chosen: Input: indices of tokens with outputs, i32 `[n_out]`; `None`: all tokens.
        logits: Output: f32 `[n_vocab, n_out]`.
        hidden: Output: normalised hidden states, f32 `[n_embd, n_out]`.
        best: Outputs: the `n_best` most likely tokens, in any order, i32 `[n_best, n_out]`, and their logits,
            f32 `[1, n_best, n_out]`; none if `n_best` is 0.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: SequenceMemory,
        n_tokens: int,
        n_out: int,
        n_kv: int,
        n_sequences: int,
        cache: ExpertCache | None,
        changes: Changes,
        computes_masks: Collection[BufferType] = (),
        traced: Collection[int] = (),
        n_best: int = 0,
    ) -> None:
        super().__init__(config, weights, memory.n_cells > config.n_ctx_orig, changes)
        self._cache = cache
        self._traced = traced
        self._memory = memory
        self._n_kv = n_kv
        self._n_tokens = n_tokens
        self.ids = self._input("ids", DType.I32, n_tokens)
        self.positions = self._input("positions", DType.I32, n_tokens)
        self.cells = self._input("cells", DType.I64, n_tokens)
        self.slots = self._input("slots", DType.I32, n_sequences)
        self.sizes = n_tokens // n_sequences, n_sequences
        self._windows = {window: i for i, window in enumerate(config.windows)}
        self.masks: dict[int, Tensor] = {}
        self.spans: dict[int, tuple[Tensor, Tensor]] = {}
        self._order: Tensor | None = None
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.computed: dict[tuple[int, BufferType], Tensor] = {}
        # The host keeps the mask of a sequence's last token (`KvCache.row`), and uploads it as it is.
        is_large = n_tokens > 1 and 2 * n_kv * n_tokens > MAX_UPLOADED
        self._computes_masks = computes_masks if is_large else ()
        for layer in self.layers:  # before all other nodes: they are kept until the last layer
            if config.attentions[layer]:
                self.graph.build_forward_expand(self._mask(layer))
        self.chosen = self._input("chosen", DType.I32, n_out) if n_out < n_tokens else None
        self.hidden, self.logits = self._head(self._hidden(self.ids))
        self.best: tuple[Tensor, ...] = best_of(self.ctx, self.logits, n_best) if n_best else ()
        for tensor in self.best:
            self.graph.build_forward_expand(self.ctx.set_output(tensor))

    def set_inputs(
        self,
        ids: npt.NDArray[np.int32],
        sequences: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int32],
        chosen: npt.NDArray[np.int32],
    ) -> None:
        """Write ids, sequences, positions, cells, slots and `chosen` tokens; cells are occupied already."""
        self.write_ids(self.ids, ids)
        for tensor, values in ((self.positions, positions), (self.cells, cells), (self.slots, slots)):
            if tensor.buffer is not None:  # unplaced where no node reads it
                self.write(tensor, values)
        self.set_temperatures(positions)
        seen, windows = (sequences, positions, self._n_kv), self.config.windows
        for window, mask in self.masks.items():
            self.write(mask, self._kv.mask(*seen, windows[window]))
        for window, tensors in self.spans.items():
            spans = self._kv.spans(*seen, windows[window])
            for tensor, span in zip(tensors, spans, strict=True):
                self.write(tensor, span)
        if self._order is not None:
            self.write(self._order, np.arange(self._n_tokens, dtype=np.float16))
        if self.chosen is not None:
            self.write(self.chosen, chosen)

    def set_token(
        self, number: int, position: int, cell: int, slot: int, masks: Sequence[memoryview]
    ) -> None:
        """Write the inputs of a one-token graph: token number, position, cell, slot and attention masks."""
        self.write_ids(self.ids, np.array([number], np.int32))
        for tensor, value in ((self.positions, position), (self.cells, cell), (self.slots, slot)):
            if tensor.buffer is not None:  # unplaced where no node reads it
                self.write_one(tensor, value)
        self.set_temperatures([position])
        for window, mask in self.masks.items():
            self.write(mask, masks[window])

    @property
    def _kv(self) -> KvCache:
        """The KV cache, of a model with attention."""
        assert self._memory.cells is not None
        return self._memory.cells

    def states(self, layer: int, name: str) -> Tensor:
        """Return the table of a layer's states, a row for each slot."""
        assert self._memory.slots is not None
        return self._memory.slots.tensors[name][layer]

    def attend(self, attention: Attention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values of the tokens to the KV cache, and return attention over it."""
        ctx, a, source = self.ctx, attention, attention.source_of(layer)
        if source == layer:
            keys = self._kept(self._kv.keys[layer], key)
            values = self._kv.values.get(layer)
            self._seen[layer] = keys, keys if values is None else self._kept(values, value)
        keys, values = self._seen[source]
        query = ctx.permute(query, 0, 2, 1, 3)
        keys = heads_of(ctx, keys, a.n_key, self._n_kv, a.n_head_kv)
        values = heads_of(ctx, values, a.n_value, self._n_kv, a.n_head_kv)
        mask, sinks = self._mask(layer), a.sinks(self.weights, layer)
        if layer in self._traced:
            weights = ctx.permute(attention_weights(ctx, a, query, keys, mask, sinks), 0, 2, 1, 3)
            weights = self.label(f"blk.{layer}.{ATTENTION}", ctx.cont(weights), a.n_head, self._n_kv)
            self.graph.build_forward_expand(weights)
        return attend(ctx, a, query, keys, values, mask, sinks)

    def _kept(self, cached: Tensor, rows: Tensor) -> Tensor:
        """Return cached keys or values, with those of the tokens in their cells."""
        return self.ctx.set_rows(cached, self.ctx.reshape_2d(rows, cached.ne[0], rows.ne[2]), self.cells)

    def _mask(self, layer: int) -> Tensor:
        """Return the attention mask of a layer: an input, or computed where the layer's keys are."""
        attention = self.config.attentions[layer]
        assert attention is not None
        home = self._kv.keys[attention.source_of(layer)].placed("attend").buft
        window = self._windows[attention.window]
        name = f"window_mask_{attention.window}" if window else "mask"
        if home not in self._computes_masks:
            if window not in self.masks:
                self.masks[window] = self._input(name, DType.F16, self._n_kv, self._n_tokens)
            return self.masks[window]
        if (window, home) not in self.computed:
            if self._order is None:
                self._order = self._input("order", DType.F16, 1, self._n_tokens)
            if window not in self.spans:
                centre, half = (self._input(f"{name}_{x}", DType.F16, self._n_kv) for x in ("centre", "half"))
                self.spans[window] = centre, half
            self.computed[window, home] = computed_mask(self.ctx, *self.spans[window], self._order)
        return self.computed[window, home]


def best_of(ctx: Context, logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the `n` tokens of the largest logits of each row, in any order, and these logits."""
    ids = ctx.top_k(logits, n)
    return ids, ctx.get_rows(ctx.reshape_3d(logits, 1, *logits.ne[:2]), ids)


def computed_mask(ctx: Context, centre: Tensor, half: Tensor, order: Tensor) -> Tensor:
    """Return the mask of `KvCache.spans`: 0 where `abs(order - centre) < half`, else -inf.

    The numbers are multiples of 1/2 below 1024, and so exact in f16. The difference is never 0, so that its
    product with a number beyond the range of f16 is infinite. All ops work in place.
    """
    distance = ctx.abs(ctx.sub(ctx.repeat_4d(centre, centre.ne[0], order.ne[1], 1, 1), order))
    return ctx.neg(ctx.relu(ctx.scale(ctx.sub(distance, half), 1e30)))


def heads_of(ctx: Context, cached: Tensor, n: int, n_kv: int, n_heads: int) -> Tensor:
    """View the first `n_kv` cells of cached keys or values as `[n, n_kv, n_heads]`; `n`: head size."""
    row = cached.nb[1]
    return ctx.permute(ctx.view_3d(cached, n, n_heads, n_kv, row // n_heads, row), 0, 2, 1, 3)
