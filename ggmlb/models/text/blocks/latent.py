"""LatentAttention: attention over latent vectors of the earlier tokens (multi-head latent attention, MLA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb import Tensor
from ggmlb.models.text.blocks.attention import Attention
from ggmlb.models.text.blocks.block import Slices, Weight

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Attention whose keys and values are products of one latent vector per token, and of a rotated key.

    Only these are cached. The queries are multiplied by the projection of keys instead, and the outputs of
    the heads by that of values, so that the latent vectors serve as the keys and values of a single KV head:
    `n_key` is `n_value` (the latent vector) and the rotated elements together.

    Attributes:
        n_plain: Elements of a head's query that are not rotated.
        n_out: Elements of a value in a head.
        n_latent_query: Elements of the latent vector of queries; 0: queries have none.
    """

    n_plain: int = 0
    n_out: int = 0
    n_latent_query: int = 0

    @property
    def memory(self) -> Mapping[str, int]:
        """Elements that each token has in the KV cache: the values are the beginnings of the keys."""
        return {"cache_k": self.n_key}

    def slices(self, axis: int, *sizes: int) -> Slices | None:
        """Return `None`: each device has all of the latent vectors."""
        return None

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of projections and norms."""
        n = self.n_head * (self.n_plain + self.n_key - self.n_value)
        found = [Weight("attn_q.weight", (n, n_embd), "product")]
        if self.n_latent_query:
            found = [
                Weight("attn_q_a.weight", (self.n_latent_query, n_embd), "product"),
                Weight("attn_q_a_norm.weight", (self.n_latent_query,)),
                Weight("attn_q_b.weight", (n, self.n_latent_query), "product"),
            ]
        return [
            *found,
            Weight("attn_kv_a_mqa.weight", (self.n_key, n_embd), "product"),
            Weight("attn_kv_a_norm.weight", (self.n_value,)),
            Weight("attn_k_b.weight", (self.n_head, self.n_value, self.n_plain), "product"),
            Weight("attn_v_b.weight", (self.n_head, self.n_out, self.n_value), "product"),
            Weight("attn_output.weight", (n_embd, self.n_head * self.n_out), "product"),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of projections, of attention and of its output product to a graph."""
        ctx, at, n = graph.ctx, f"blk.{layer}.", x.ne[1]
        assert self.rope is not None
        n_rotated = self.n_key - self.n_value
        if self.n_latent_query:
            query = graph.norm(at + "attn_q_a_norm", graph.product(at + "attn_q_a", x))
            query = graph.product(at + "attn_q_b", query)
        else:
            query = graph.product(at + "attn_q", x)
        query = ctx.reshape_3d(query, self.n_plain + n_rotated, self.n_head, n)
        plain, rotated = query[..., : self.n_plain], query[..., self.n_plain :]
        absorbed = self._by_head(graph, at + "attn_k_b", plain)
        query = ctx.concat(absorbed, graph.rotate(rotated, self.rope), 0)
        if self.temperature:
            query = ctx.mul(query, graph.temperature(*self.temperature))
        both = graph.product(at + "attn_kv_a_mqa", x)
        latent = graph.norm(at + "attn_kv_a_norm", both[..., : self.n_value])
        latent = ctx.reshape_3d(latent, self.n_value, 1, n)
        end = self.n_value * both.nb[0]
        rotated = graph.rotate(ctx.view_3d(both, n_rotated, 1, n, both.nb[1], both.nb[1], end), self.rope)
        key = ctx.concat(latent, rotated, 0)
        graph.label(at + "attn_q_rope", query, self.n_head, self.n_key)
        graph.label(at + "attn_k_rope", key, 1, self.n_key)
        mixed = graph.attend(self, layer, query, key, latent)
        graph.label(at + "attn_heads", mixed, self.n_head, self.n_value)
        seen = ctx.reshape_2d(self._by_head(graph, at + "attn_v_b", mixed), self.n_out * self.n_head, n)
        return graph.product(at + "attn_output", graph.outputs_of(layer, seen))

    def _by_head(self, graph: LayersGraph, name: str, x: Tensor) -> Tensor:
        """Return the product of each head, `[n, n_head, n_tokens]`, with its own matrix."""
        ctx = graph.ctx
        y = ctx.cont(ctx.permute(graph.product(name, ctx.cont(ctx.permute(x, 0, 2, 1, 3))), 0, 2, 1, 3))
        return graph.label(name, y, self.n_head, y.ne[0])
