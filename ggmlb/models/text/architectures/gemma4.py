"""Gemma 4, dense, with embeddings of tokens for each layer, and layers that share keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ggmlb import RopeType, Tensor
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.architectures.gemma2 import gemma
from ggmlb.models.text.blocks import Attention, Block, Residual, Weight, attentions, base_in_windows, windowed
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph

PATTERN, DIMENSIONS = "attention.sliding_window_pattern", "rope.dimension_count_swa"


@dataclass(frozen=True)
class NormedValues(Attention):
    """Attention whose values are normalised, without a weight."""

    def _projections(self, graph: LayersGraph, at: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super()._projections(graph, at, x)
        value = graph.ctx.rms_norm(value, graph.config.eps)
        return query, key, graph.label(at + "attn_v_norm", value, self.n_head_kv, self.n_value)


@dataclass(frozen=True)
class SharedValues(Attention):
    """Attention to the keys and values of an earlier layer.

    Attributes:
        source: The earlier layer.
    """

    source: int = 0

    @property
    def memory(self) -> Mapping[str, int]:
        """Nothing: the KV cache has the earlier layer's keys and values."""
        return {}

    def source_of(self, layer: int) -> int:
        """Return the earlier layer."""
        return self.source

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of queries and output; those of keys and values may be there, unread."""
        unread = "attn_k", "attn_v"
        found = super().weights(n_embd)
        return [w._replace(is_optional=w.is_optional or w.name.startswith(unread)) for w in found]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of queries, of attention and of its output product to a graph."""
        at, sizes = f"blk.{layer}.", (self.n_head, self.n_key)
        assert self.rope is not None
        query = graph.ctx.reshape_3d(graph.product(at + "attn_q", x), *sizes[::-1], x.ne[1])
        query = graph.rotate(graph.norm(at + "attn_q_norm", query, *sizes), self.rope)
        graph.label(at + "attn_q_rope", query, *sizes)
        key, value = (graph.earlier(f"blk.{self.source}.attn_{name}") for name in ("k_rope", "v_norm"))
        return self._mixed(graph, layer, query, key, value)


@dataclass(frozen=True)
class LayerInput(Block):
    """The layer's own embeddings of the tokens, times a gate of the hidden states.

    Attributes:
        n: Elements of such an embedding.
    """

    output = "per_layer_out"

    n: int

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the gate and of the product."""
        shapes = {"inp_gate": (self.n, n_embd), "proj": (n_embd, self.n)}
        return [Weight(f"{name}.weight", shape, "product") for name, shape in shapes.items()]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the products and the gate to a graph."""
        ctx, at, inputs = graph.ctx, f"blk.{layer}.", graph.earlier("per_layer_inputs")
        own = ctx.view_2d(inputs, self.n, inputs.ne[2], inputs.nb[2], layer * inputs.nb[1])
        gate = graph.product(at + "inp_gate", x)
        return graph.product(at + "proj", ctx.geglu_split(gate, graph.rows_like(x, own)))


@register_architecture("gemma4")
def gemma4(keys: Keys) -> TextConfig:
    """Read a model: layers with and without windows have heads of different sizes."""
    if keys.by_layer(PATTERN) is None:
        raise keys.error(PATTERN, "it must be an array, a boolean for each layer")
    n_local = keys.count("attention.key_length_swa")
    if keys.count("attention.value_length_swa") != n_local:
        raise keys.error("attention.value_length_swa", f"it must be {n_local}, as that of keys")
    n_dims = keys.count(DIMENSIONS, n_local, 2, n_local)
    if n_dims % 2:
        raise keys.error(DIMENSIONS, f"it is {n_dims}; it must be even")
    rope: dict[str, Any] = {"freq_base": base_in_windows(keys), "n_dims": n_dims, "has_factors": False}
    found = windowed(keys, attentions(keys, RopeType.NEOX, norms="head", scale=1.0), 1, None, **rope)
    found = [replace(a, n_key=n_local, n_value=n_local) if a.window else a for a in found]
    n_own = keys.n_layer - keys.count("attention.shared_kv_layers", 0, 0, keys.n_layer - 1)
    n_input = keys.count("embedding_length_per_layer_input", None, 0)
    own = [Residual("", LayerInput(n_input), "post_norm")] if n_input else []
    config = gemma(keys, _shared(keys, found, n_own), 0.0)
    layers = (replace(layer, steps=(*layer.steps, *own), has_scale=True) for layer in config.layers)
    return replace(config, layers=tuple(layers), n_layer_input=n_input)


def _shared(keys: Keys, layers: Sequence[Attention], n_own: int) -> list[Attention]:
    """Return the attention of layers of which only the first `n_own` have keys and values."""
    found: list[Attention] = []
    sources = {a.window: i for i, a in enumerate(layers[:n_own])}  # the last of each kind
    for i, a in enumerate(layers):
        has_values = f"blk.{i}.attn_v.weight" in keys.file
        if i < n_own:
            found.append(NormedValues(**vars(a) | {"has_values": has_values}))
        elif a.window not in sources or layers[sources[a.window]].memory != a.memory:
            raise keys.error("attention.shared_kv_layers", f"no earlier layer has keys for layer {i}")
        else:
            found.append(SharedValues(**vars(a), source=sources[a.window]))
    return found
