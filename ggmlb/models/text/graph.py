"""TextGraph: the graph of a step of generation, from tokens to logits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggmlb import Context, DType, Tensor
from ggmlb.models.text.experts import KINDS
from ggmlb.models.text.step import StepGraph

if TYPE_CHECKING:
    from ggmlb.models.text.changes import Changes
    from ggmlb.models.text.config import Rope, TextConfig
    from ggmlb.models.text.experts import ExpertCache
    from ggmlb.models.text.kv_cache import KvCache

MIN_EXPERT_SUM = 2.0**-14
"""Smallest sum of the weights of chosen experts: the smallest normal f16, as in llama.cpp."""


class LayersGraph(StepGraph):
    """Base class of graphs from tokens to logits through layers of attention and feed-forward parts.

    Attributes:
        chosen: Input: indices of tokens with outputs, i32; `None`: all tokens.
    """

    positions: Tensor
    """Positions of tokens in their sequences, i32 `[n_tokens]`."""

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        n_tokens: int,
        is_long: bool,
        changes: Changes,
    ) -> None:
        super().__init__(config, weights, changes)
        self._n_tokens = n_tokens
        self._factors = weights.get("rope_freqs.weight") or weights.get(
            "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
        )
        self.chosen: Tensor | None = None
        self._cache: ExpertCache | None = None

    @abstractmethod
    def _mix(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of each token.

        Args:
            layer: The layer.
            query: Rotated, `[n_key, n_head, n_tokens]`.
            key: Rotated, `[n_key, n_head_kv, n_tokens]`.
            value: `[n_value, n_head_kv, n_tokens]`.

        Returns:
            `[n_value, n_head, n_tokens]`.
        """

    # Hidden states after the attention of the last layer are `[n_embd, n_out]`.

    def _norm_if(self, name: str, x: Tensor, *row: int) -> Tensor:
        return self._norm(name, x, *row) if name + ".weight" in self._weights else x

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        ctx, at = self._ctx, f"blk.{layer}."
        seen = self._attend(layer, self._norm(at + "attn_norm", x))
        if layer == self._config.n_layer - 1 and self.chosen is not None:
            # All later nodes are for the chosen tokens alone.
            seen, x = ctx.get_rows(seen, self.chosen), ctx.get_rows(x, self.chosen)
        mixed = self._norm_if(at + "post_attention_norm", self._product(at + "attn_output", seen))
        x = self._name(at + "ffn_inp", ctx.add(self._name(at + "attn_out", mixed), x))
        y = self._norm(at + "ffn_norm", x)
        y = self._feed_forward(at, y) if self._config.experts is None else self._experts(layer, y)
        y = self._name(at + "ffn_out", self._norm_if(at + "post_ffw_norm", y))
        return self._end(layer, ctx.add(y, x))

    def _attend(self, layer: int, x: Tensor) -> Tensor:
        """Return attention, before its output product."""
        c, at = self._config, f"blk.{layer}."
        rope = c.rope_window if c.sees_window(layer) else c.rope
        query, key, value = self._projections(at, x)
        query = self._norm_if(at + "attn_q_norm", query, c.n_head, c.n_key)
        key = self._norm_if(at + "attn_k_norm", key, c.n_head_kv, c.n_key)
        query = self._name(at + "attn_q_rope", self._rotate(query, rope), c.n_head, c.n_key)
        key = self._name(at + "attn_k_rope", self._rotate(key, rope), c.n_head_kv, c.n_key)
        mixed = self._name(at + "attn_heads", self._mix(layer, query, key, value), c.n_head, c.n_value)
        return self._ctx.reshape_2d(mixed, c.n_value * c.n_head, self._n_tokens)

    def _projections(self, at: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as `[n_key or n_value, heads, n_tokens]`."""
        ctx, c, n = self._ctx, self._config, self._n_tokens
        sizes = ((c.n_key, c.n_head), (c.n_key, c.n_head_kv), (c.n_value, c.n_head_kv))
        if at + "attn_qkv.weight" not in self._weights:
            q, k, v = (
                ctx.reshape_3d(self._product(f"{at}attn_{part}", x), *size, n)
                for part, size in zip("qkv", sizes, strict=True)
            )
            return q, k, v
        fused = self._product(at + "attn_qkv", x)
        row, element = fused.nb[1], fused.nb[0]
        starts = (0, c.n_key * c.n_head, c.n_key * (c.n_head + c.n_head_kv))
        q, k, v = (
            ctx.view_3d(fused, *size, n, size[0] * element, row, start * element)
            for size, start in zip(sizes, starts, strict=True)
        )
        return q, k, ctx.cont(v)

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        return self._ctx.rope_ext(
            x, self.positions, self._factors, rope.n_dims, rope.mode, rope.n_ctx_orig,
            rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor, 32.0, 1.0,
        )  # fmt: skip

    def _activate(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Return the gated activation; without `up`, of a product that holds gate and up."""
        ctx, is_geglu = self._ctx, self._config.arch.activation == "geglu"
        if up is None:
            return ctx.geglu(gate) if is_geglu else ctx.swiglu(gate)
        return ctx.geglu_split(gate, up) if is_geglu else ctx.swiglu_split(gate, up)

    def _feed_forward(self, at: str, x: Tensor) -> Tensor:
        if at + "ffn_gate.weight" in self._weights:
            y = self._activate(self._product(at + "ffn_gate", x), self._product(at + "ffn_up", x))
        else:
            y = self._activate(self._product(at + "ffn_up", x), None)
        return self._product(at + "ffn_down", self._name(at + "ffn_act", y))

    def _experts(self, layer: int, x: Tensor) -> Tensor:
        """Return the outputs of each token's `n_used` best experts, by weights that sum to 1."""
        ctx, experts, at = self._ctx, self._config.experts, f"blk.{layer}."
        assert experts is not None
        n_embd, n = x.ne[0], x.ne[1]
        shares = self._name(at + "ffn_shares", ctx.soft_max(self._product(at + "ffn_gate_inp", x)))
        chosen = self._name(at + "ffn_chosen", ctx.top_k(shares, experts.n_used))
        weights = ctx.get_rows(ctx.reshape_3d(shares, 1, experts.n, n), chosen)
        weights = ctx.reshape_2d(weights, experts.n_used, n)
        total = ctx.clamp(ctx.sum_rows(weights), MIN_EXPERT_SUM, math.inf)
        weights = ctx.reshape_3d(ctx.div(weights, total), 1, experts.n_used, n)
        rows = ctx.reshape_3d(x, n_embd, 1, n)
        matrices: Sequence[Tensor] = [self._weights[at + kind] for kind in KINDS]
        slots = chosen
        if self._cache is not None and self._cache.serves(layer, self._n_tokens):
            slots, matrices = self._cache.choose(ctx, layer, chosen)
        gate, up = (self._expert_product(at + KINDS[i], matrices[i], rows, slots, chosen) for i in range(2))
        y = self._activate(gate, up)
        y = self._name(at + "ffn_act", y, y.ne[1], y.ne[0])
        down = self._expert_product(at + KINDS[2], matrices[2], y, slots, chosen)
        weighted = ctx.mul(down, weights)
        parts = [
            ctx.view_2d(weighted, n_embd, n, weighted.nb[2], i * weighted.nb[1])
            for i in range(experts.n_used)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = ctx.add(total, part)
        return total if experts.n_used > 1 else ctx.cont(total)

    def _expert_product(self, name: str, weight: Tensor, x: Tensor, slots: Tensor, chosen: Tensor) -> Tensor:
        """Return the product of each token with the matrices of its experts, `[n, n_used, n_tokens]`.

        Args:
            name: The weight in the file.
            weight: All experts, or those that are cached.
            x: Tokens.
            slots: Indices of the chosen experts in `weight`.
            chosen: Numbers of the chosen experts.
        """
        ctx = self._ctx
        y = ctx.mul_mat_id(weight, x, slots)
        y = self._adapted(name, y, lambda factor, x: ctx.mul_mat_id(factor, x, chosen), x)
        return self._name(name.removesuffix(".weight"), y, y.ne[1], y.ne[0])


class TextGraph(LayersGraph):
    """The graph for `n_tokens` tokens that see `n_kv` cells of the KV cache.

    Positions, cells and masks are inputs: one graph serves every step of its sizes.

    `n_tokens` includes padding; `n_out` tokens have outputs.

    Attributes:
        ids: Input: token numbers, i32 `[n_tokens]`.
        positions: Input: positions in their sequences, i32 `[n_tokens]`.
        cells: Input: the cells of the tokens in the KV cache, i64 `[n_tokens]`.
        masks: Inputs: attention masks, 0 or -inf, f16 `[n_kv, n_tokens]`: `False` for layers without a
            sliding window, `True` for those with one.
        chosen: Input: indices of tokens with outputs, i32 `[n_out]`; `None`: all tokens.
        logits: Output: f32 `[n_vocab, n_out]`.
        hidden: Output: normalised hidden states, f32 `[n_embd, n_out]`.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: KvCache,
        n_tokens: int,
        n_out: int,
        n_kv: int,
        cache: ExpertCache | None,
        changes: Changes,
    ) -> None:
        super().__init__(config, weights, n_tokens, memory.n_cells > config.rope.n_ctx_orig, changes)
        self._cache = cache
        self._memory = memory
        self._n_kv = n_kv
        self.ids = self._input("ids", DType.I32, n_tokens)
        self.positions = self._input("positions", DType.I32, n_tokens)
        self.cells = self._input("cells", DType.I64, n_tokens)
        self.masks = {
            is_local: self._input("window_mask" if is_local else "mask", DType.F16, n_kv, n_tokens)
            for is_local in sorted({config.windowed[layer] for layer in self.layers})
        }
        self.chosen = self._input("chosen", DType.I32, n_out) if n_out < n_tokens else None
        x = self._begin(self.ids)
        for layer in self.layers:
            x = self._layer(layer, x)
        self.hidden, self.logits = self._head(x)

    def set_inputs(
        self,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int64],
        masks: Sequence[npt.NDArray[np.float16]],
        chosen: npt.NDArray[np.int32],
    ) -> None:
        """Write token ids, positions, KV cells, `masks` (full, then sliding window) and `chosen` tokens."""
        if self.layers.start == 0:
            self.write(self.ids, ids)
        self.write(self.positions, positions)
        self.write(self.cells, cells)
        for is_local, mask in self.masks.items():
            self.write(mask, masks[is_local])
        if self.chosen is not None:
            self.write(self.chosen, chosen)

    def set_token(self, number: int, position: int, cell: int, masks: Sequence[memoryview]) -> None:
        """Write the inputs of a one-token graph: token number, position, KV cell and attention masks."""
        if self.layers.start == 0:
            self.write_one(self.ids, number)
        self.write_one(self.positions, position)
        self.write_one(self.cells, cell)
        for is_local, mask in self.masks.items():
            self.write(mask, masks[is_local])

    def _mix(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values of the tokens to the KV cache, and return attention over it."""
        ctx, c = self._ctx, self._config
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        cached_keys = ctx.set_rows(keys, ctx.reshape_2d(key, keys.ne[0], self._n_tokens), self.cells)
        cached_values = ctx.set_rows(values, ctx.reshape_2d(value, values.ne[0], self._n_tokens), self.cells)
        return ctx.flash_attn_ext(
            ctx.permute(query, 0, 2, 1, 3),
            heads_of(ctx, cached_keys, c.n_key, self._n_kv, c.n_head_kv),
            heads_of(ctx, cached_values, c.n_value, self._n_kv, c.n_head_kv),
            self.masks[c.sees_window(layer)],
            c.attn_scale,
            0.0,
            c.attn_softcap,
        )


def heads_of(ctx: Context, cached: Tensor, n: int, n_kv: int, n_heads: int) -> Tensor:
    """View the first `n_kv` cells of cached keys or values as `[n, n_kv, n_heads]`; `n`: head size."""
    row = cached.nb[1]
    return ctx.permute(ctx.view_3d(cached, n, n_heads, n_kv, row // n_heads, row), 0, 2, 1, 3)
