"""Attention: its sizes, its projections, its mask, and the scores of fused and of unfused attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ggmlb import Context, RopeType, Tensor
from ggmlb.models.text.blocks.block import Block, Slices, Weight, split_heads

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph
    from ggmlb.models.text.keys import Keys

FREQ_BASE, MIN_BASE = 10000.0, 1e-3
"""Default and smallest base of the RoPE frequencies."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of RoPE; names as in `Context.rope_ext`.

    Attributes:
        has_factors: Whether the factors of frequencies that the file may have apply.
    """

    n_dims: int
    mode: RopeType
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    has_factors: bool = True

    @classmethod
    def read(cls, keys: Keys, mode: RopeType, n_key: int) -> Rope:
        """Read the parameters from the metadata; `n_key`: elements of a head.

        Raises:
            ModelError: The type of scaling is unknown, or a number is out of range.
        """
        scaling = keys.text("rope.scaling.type", "linear")
        if scaling not in ("none", "linear", "yarn", "longrope"):
            raise keys.error(
                "rope.scaling.type", f"{scaling!r} is not known; known are linear, longrope, none, yarn"
            )
        older = keys.real("rope.scale_linear", 0.0)
        factor = keys.real("rope.scaling.factor", older)
        n_dims = keys.count("rope.dimension_count", n_key, most=n_key)
        if n_dims % 2:
            raise keys.error("rope.dimension_count", f"it is {n_dims}; it must be even")
        n_ctx = keys.count("context_length", most=1 << 30)
        return cls(
            n_dims=n_dims,
            mode=mode,
            n_ctx_orig=keys.count("rope.scaling.original_context_length", n_ctx, most=1 << 30),
            freq_base=keys.real("rope.freq_base", FREQ_BASE, MIN_BASE),
            freq_scale=1.0 if scaling == "none" or not factor else 1.0 / factor,
            ext_factor=1.0 if scaling == "yarn" else 0.0,
            attn_factor=keys.real("rope.scaling.attn_factor", 1.0),
        )


@dataclass(frozen=True)
class Attention(Block):
    """Attention over the earlier tokens of a sequence, with its projections.

    Attributes:
        n_head: Attention heads.
        n_head_kv: KV heads, each shared by `n_head / n_head_kv` attention heads.
        n_key: Elements of a key in a head.
        n_value: Elements of a value in a head.
        scale: Factor of the scores.
        rope: RoPE of queries and keys; `None`: they are not rotated.
        norms: What norms of queries and keys normalise: each head (`"heads"`: each has its own weight), or
            the whole row; `None`: there are none.
        window: Sliding window [tokens], the token itself included; 0: all earlier tokens are seen.
        softcap: Soft cap of the scores; 0: none.
        has_sinks: Whether each head has a sink: a score that only the denominator of the soft max counts.
        is_fused: Whether one weight, `attn_qkv`, holds the projections of queries, keys and values.
        is_gated: Whether the projection of queries holds, after each head's query, a gate whose sigmoid
            multiplies the head's output.
        temperature: Factor and period [tokens] of the scale of queries by position:
            `1 + factor * log(1 + position // period)`; `None`: it is 1.
        has_values: Whether values have a projection of their own; else they are the projected keys.
    """

    output = "attn_out"
    mixes_tokens = True

    n_head: int
    n_head_kv: int
    n_key: int
    n_value: int
    scale: float
    rope: Rope | None = None
    norms: Literal["head", "heads", "row"] | None = None
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    is_fused: bool = False
    is_gated: bool = False
    temperature: tuple[float, int] | None = None
    has_values: bool = True

    @property
    def n_query(self) -> int:
        """Elements that a head has in the projection of queries: those of the query, and of its gate."""
        return self.n_key + self.n_value if self.is_gated else self.n_key

    @property
    def memory(self) -> Mapping[str, int]:
        """Elements that each token has in the KV cache, by the name of the cache's tensor."""
        return {"cache_k": self.n_key * self.n_head_kv, "cache_v": self.n_value * self.n_head_kv}

    def source_of(self, layer: int) -> int:
        """Return the layer whose keys and values this layer attends to: itself."""
        return layer

    def slices(self, axis: int, *sizes: int) -> Slices | None:
        """Return how devices split a tensor, given its elements of each KV head; `None`: not at all."""
        return None if self.norms == "row" else Slices(axis, sizes, self.n_head_kv, "heads")

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of projections, norms and sinks."""
        n_q = self.n_head // self.n_head_kv
        sizes = n_q * self.n_query, self.n_key, self.n_value
        if self.is_fused:
            parts: dict[str, tuple[int, ...]] = {"attn_qkv": sizes}
        else:
            names = "qkv" if self.has_values else "qk"
            parts = {f"attn_{part}": (size,) for part, size in zip(names, sizes, strict=False)}
        mixed = n_q * self.n_value
        found = [
            Weight("attn_output.weight", (n_embd, mixed * self.n_head_kv), "product", self.slices(0, mixed)),
            Weight("attn_output.bias", (n_embd,), is_optional=True),
        ]
        for name, parts_of in parts.items():
            n = sum(parts_of) * self.n_head_kv
            rows, elements = self.slices(1, *parts_of), self.slices(0, *parts_of)
            found += [
                Weight(f"{name}.weight", (n, n_embd), "product", rows),
                Weight(f"{name}.bias", (n,), is_optional=True, slices=elements),
            ]
        for part, n, n_of in (("q", self.n_head, n_q), ("k", self.n_head_kv, 1)) if self.norms else ():
            shape = {"heads": (n, self.n_key), "row": (n * self.n_key,)}.get(self.norms or "", (self.n_key,))
            slices = self.slices(1, n_of) if self.norms == "heads" else None
            found.append(Weight(f"attn_{part}_norm.weight", shape, slices=slices))
        if self.has_sinks:
            found.append(Weight("attn_sinks.weight", (self.n_head,), slices=self.slices(0, n_q)))
        return found

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of projections, of attention and of its output product to a graph."""
        at = f"blk.{layer}."
        query, key, value = self._projections(graph, at, x)
        gate: Tensor | None = None
        if self.is_gated:
            query, gate = query[..., : self.n_key], query[..., self.n_key :]
        if self.norms in ("head", "heads"):
            query = graph.norm(at + "attn_q_norm", query, self.n_head, self.n_key)
            key = graph.norm(at + "attn_k_norm", key, self.n_head_kv, self.n_key)
        if self.rope:
            query, key = graph.rotate(query, self.rope), graph.rotate(key, self.rope)
        if self.temperature:
            query = graph.ctx.mul(query, graph.temperature(*self.temperature))
        graph.label(at + "attn_q_rope", query, self.n_head, self.n_key)
        graph.label(at + "attn_k_rope", key, self.n_head_kv, self.n_key)
        return self._mixed(graph, layer, query, key, value, gate)

    def _mixed(
        self,
        graph: LayersGraph,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Return the output product of the heads' outputs, gated if there is a gate."""
        at = f"blk.{layer}."
        mixed = graph.attend(self, layer, query, key, value)
        graph.label(at + "attn_heads", mixed, self.n_head, self.n_value)
        if gate is not None:
            mixed = graph.ctx.mul(mixed, graph.ctx.sigmoid(graph.ctx.cont(gate)))
        seen = graph.ctx.reshape_2d(mixed, self.n_value * self.n_head, query.ne[2])
        return graph.product(at + "attn_output", graph.outputs_of(layer, seen))

    def sinks(self, weights: Mapping[str, Tensor], layer: int) -> Tensor | None:
        """Return the sinks of a layer's heads; `None` if there are none."""
        return weights[f"blk.{layer}.attn_sinks.weight"] if self.has_sinks else None

    def _projections(self, graph: LayersGraph, at: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as `[n_key or n_value, heads, n_tokens]`."""
        ctx, n = graph.ctx, x.ne[1]
        sizes = ((self.n_query, self.n_head), (self.n_key, self.n_head_kv), (self.n_value, self.n_head_kv))
        if not self.is_fused:
            rows = [graph.product(f"{at}attn_{part}", x) for part in ("qkv" if self.has_values else "qk")]
            rows.append(rows[-1])
            if self.norms == "row":
                rows[:2] = (graph.norm(f"{at}attn_{p}_norm", y) for p, y in zip("qk", rows, strict=False))
            q, k, v = (ctx.reshape_3d(y, *size, n) for y, size in zip(rows, sizes, strict=False))
            return q, k, v
        fused = graph.product(at + "attn_qkv", x)
        q, k, v = split_heads(ctx, fused, sizes)
        return (q, k, ctx.cont(v)) if self.rope else (ctx.cont(q), ctx.cont(k), ctx.cont(v))


# The scores of a query are the same in the fused op, in ops with gradients, and where weights are traced.


def attend(
    ctx: Context,
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    has_gradient: bool = False,
) -> Tensor:
    """Return the output of each head: the weighted sum of the values of the visible tokens.

    Args:
        ctx: Where nodes are made.
        attention: Scale, soft cap.
        query: Rotated, `[n_key, n_tokens, n_head, n_sequences]`.
        key: Rotated, `[n_key, n_kv, n_head_kv, n_sequences]`.
        value: `[n_value, n_kv, n_head_kv, n_sequences]`.
        mask: 0, or -inf for hidden tokens, f16 `[n_kv, n_tokens]`.
        sinks: The sinks of the heads, if there are any.
        has_gradient: Whether the nodes have gradients: fused attention has none.

    Returns:
        `[n_value, n_head, n_tokens, n_sequences]`.
    """
    if has_gradient:
        weights = attention_weights(ctx, attention, query, key, mask, sinks)
        mixed = ctx.mul_mat(ctx.cont(ctx.transpose(value)), weights)
        return ctx.cont(ctx.permute(mixed, 0, 2, 1, 3))
    mixed = ctx.flash_attn_ext(query, key, value, mask, attention.scale, 0.0, attention.softcap)
    return ctx.flash_attn_ext_add_sinks(mixed, sinks) if sinks is not None else mixed


def attention_weights(
    ctx: Context, attention: Attention, query: Tensor, key: Tensor, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """Return the weights of attention, `[n_kv, n_tokens, n_head, n_sequences]`; arguments as of `attend`."""
    scores, scale, cap = ctx.mul_mat(key, query), attention.scale, attention.softcap
    if cap:
        scores, scale = ctx.scale(ctx.tanh(ctx.scale(scores, scale / cap)), cap), 1.0
    weights = ctx.soft_max_ext(scores, mask, scale)
    return ctx.soft_max_add_sinks(weights, sinks) if sinks is not None else weights


def hidden_tokens(
    sequences: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    of_keys: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
    window: int = 0,
) -> npt.NDArray[np.bool_]:
    """Return the keys that each token does not see: of other sequences, of later tokens, outside its window.

    Args:
        sequences: The sequence of each token.
        positions: Its position in the sequence.
        of_keys: Sequences and positions of the keys.
        window: Sliding window [tokens], the token itself included; 0: all earlier tokens.

    Returns:
        Shape `(n_tokens, n_keys)`.
    """
    others, at = of_keys
    hidden: npt.NDArray[np.bool_] = (others != sequences[:, None]) | (at > positions[:, None])
    if window:
        hidden |= at <= positions[:, None] - window
    return hidden


# -- metadata ----------------------------------------------------------------------------------


def attentions(
    keys: Keys, mode: RopeType, n_head_kv: Sequence[int] | None = None, **options: Any
) -> list[Attention]:
    """Read the attention of each layer, with RoPE and without a window.

    Args:
        keys: The metadata.
        mode: Of RoPE.
        n_head_kv: KV heads of each layer; `None`: those of the file.
        options: Fields of `Attention`.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    n_embd = keys.n_embd
    n_head = keys.counts("attention.head_count", most=n_embd)
    if n_head_kv is None:
        n_head_kv = keys.counts("attention.head_count_kv", n_head, most=n_head)
    for n, n_kv in zip(n_head, n_head_kv, strict=True):
        if n % n_kv:
            raise keys.error("attention.head_count_kv", f"it is {n_kv}; it must divide the {n} heads")
    n_key = keys.count("attention.key_length", max(1, n_embd // n_head[0]))
    n_value = keys.count("attention.value_length", n_key)
    options = {"scale": n_key**-0.5, "rope": Rope.read(keys, mode, n_key), **options}
    return [
        Attention(n, n_kv, n_key, n_value, is_fused=f"blk.{i}.attn_qkv.weight" in keys.file, **options)
        for i, (n, n_kv) in enumerate(zip(n_head, n_head_kv, strict=True))
    ]


def attention_or(keys: Keys, mode: RopeType, other: Block, **options: Any) -> list[Block]:
    """Read the attention of the layers that have KV heads; the other layers have the block `other`.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    n_head_kv = keys.counts("attention.head_count_kv", least=0)
    found = attentions(keys, mode, [n or 1 for n in n_head_kv], **options)
    return [attention if n else other for attention, n in zip(found, n_head_kv, strict=True)]


def windowed(
    keys: Keys,
    layers: Sequence[Attention],
    period: int,
    default: int | None = 0,
    only_local_rope: bool = False,
    **rope: Any,
) -> list[Attention]:
    """Return layers with their sliding windows; where there is one, RoPE has the other parameters `rope`.

    Args:
        keys: The metadata.
        layers: The attention of each layer.
        period: Every layer of this many but the last has a window, if the file does not say which.
        default: The window, if the file has none; `None`: it must have one.
        only_local_rope: Whether layers without a window have no RoPE.
        rope: Fields of `Rope`.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    window = keys.count("attention.sliding_window", default, 0, 1 << 30)
    is_local = keys.by_layer("attention.sliding_window_pattern") if window else (False,) * len(layers)
    if is_local is None:
        period = keys.count("attention.sliding_window_pattern", period, 0, 1 << 30)
        is_local = tuple(period == 0 or i % period < period - 1 for i in range(len(layers)))
    return [
        replace(a, window=window, rope=a.rope and replace(a.rope, **rope))
        if local
        else replace(a, rope=None if only_local_rope else a.rope)
        for a, local in zip(layers, is_local, strict=True)
    ]


def base_in_windows(keys: Keys, default: float | None = None) -> float:
    """Read the base of RoPE's frequencies in layers with a window; `default`: that of all, if `None`."""
    if default is None:
        default = keys.real("rope.freq_base", FREQ_BASE, MIN_BASE)
    return keys.real("rope.freq_base_swa", default, MIN_BASE)
