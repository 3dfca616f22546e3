"""GatedDelta: the gated delta rule over the tokens of a sequence (linear attention)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb import Tensor
from ggmlb.models.text.blocks.block import Recurrent, Weight, split_heads
from ggmlb.models.text.blocks.convolution import convolve

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph
    from ggmlb.models.text.keys import Keys


NAMES = ("ssm_beta", "ssm_alpha")
"""Weights of the products of strengths and decays."""


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """A recurrent block: a convolution of queries, keys and values, and the gated delta rule of heads.

    Attributes:
        n_conv: Width of the convolution [tokens].
        n_state: Elements of a query, a key and a value in a head.
        n_head: Heads of values.
        n_head_k: Heads of queries and keys.
        is_grouped: Whether consecutive heads of values share a key, and one weight, `ssm_ba`, holds the
            products of strengths and decays; else every `n_head_k`-th head of values does.
    """

    output = "delta_out"

    n_conv: int
    n_state: int
    n_head: int
    n_head_k: int
    is_grouped: bool

    @classmethod
    def read(cls, keys: Keys, is_grouped: bool) -> GatedDelta:
        """Read the sizes of all layers; raise a ModelError if metadata is missing or wrong."""
        n_state, n_head = keys.count("ssm.state_size"), keys.count("ssm.time_step_rank")
        n_head_k = keys.count("ssm.group_count")
        if n_head % n_head_k:
            raise keys.error("ssm.group_count", f"it is {n_head_k}; it must divide the {n_head} heads")
        if (n := keys.count("ssm.inner_size")) != n_state * n_head:
            raise keys.error("ssm.inner_size", f"it is {n}; it must be {n_state * n_head}")
        return cls(keys.count("ssm.conv_kernel", least=2), n_state, n_head, n_head_k, is_grouped)

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return self.n_state * (2 * self.n_head_k + self.n_head)

    @property
    def states(self) -> Mapping[str, int]:
        """Elements of the convolution's last inputs, and of the heads' states."""
        return {
            "state_conv": (self.n_conv - 1) * self.n_channels,
            "state_scan": self.n_state * self.n_state * self.n_head,
        }

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the products, the convolution, the decays and the norm."""
        n_inner = self.n_state * self.n_head
        names = {"ssm_ba": 2 * self.n_head} if self.is_grouped else dict.fromkeys(NAMES, self.n_head)
        return [
            Weight("attn_qkv.weight", (self.n_channels, n_embd), "product"),
            Weight("attn_gate.weight", (n_inner, n_embd), "product"),
            *(Weight(f"{name}.weight", (n, n_embd), "product") for name, n in names.items()),
            Weight("ssm_conv1d.weight", (self.n_channels, self.n_conv)),
            Weight("ssm_dt.bias", (self.n_head,)),
            Weight("ssm_a", (self.n_head,)),
            Weight("ssm_norm.weight", (self.n_state,)),
            Weight("ssm_out.weight", (n_embd, n_inner), "product"),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of a layer to a graph: each token is mixed with the earlier ones of its sequence."""
        ctx, w, at, sizes = graph.ctx, graph.weights, f"blk.{layer}.", graph.sizes
        strength, decay = self._strength_and_decay(graph, at, x)
        decay = ctx.mul(ctx.softplus(ctx.add(decay, w[at + "ssm_dt.bias"])), w[at + "ssm_a"])
        strength = ctx.sigmoid(strength)
        found = ctx.reshape_3d(graph.product(at + "attn_qkv", x), self.n_channels, *sizes)
        seen = ctx.silu(convolve(graph, layer, found, "ssm_conv1d"))
        seen = graph.label(at + "ssm_conv", seen)
        heads = ((self.n_state, n) for n in (self.n_head_k, self.n_head_k, self.n_head))
        query, key, value = split_heads(ctx, seen, heads)
        query, key = self._unit(graph, query), self._unit(graph, key)
        y = self._rule(graph, layer, query, key, value, decay, strength)
        y = graph.norm(at + "ssm_norm", y, self.n_head, self.n_state)
        gate = ctx.reshape_4d(graph.product(at + "attn_gate", x), *y.ne)
        y = ctx.reshape_2d(ctx.mul(y, ctx.silu(gate)), self.n_state * self.n_head, x.ne[1])
        return graph.outputs_of(layer, graph.product(at + "ssm_out", graph.label(at + "ssm_act", y)))

    def _strength_and_decay(self, graph: LayersGraph, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """The products of the strengths and of the decays: `[n_head, n_tokens, n_sequences]`."""
        ctx, sizes = graph.ctx, graph.sizes
        if not self.is_grouped:
            b, a = (ctx.reshape_3d(graph.product(at + name, x), self.n_head, *sizes) for name in NAMES)
            return b, a
        n = self.n_head // self.n_head_k
        both = ctx.reshape_3d(graph.product(at + "ssm_ba", x), 2 * n, self.n_head_k, x.ne[1])
        b, a = (ctx.reshape_3d(ctx.cont(x), self.n_head, *sizes) for x in (both[..., :n], both[..., n:]))
        return b, a

    def _unit(self, graph: LayersGraph, x: Tensor) -> Tensor:
        """Queries or keys of length 1, for each head of values if consecutive ones share them."""
        ctx, n = graph.ctx, self.n_state
        x = ctx.scale(ctx.rms_norm(x, graph.config.eps / n), n**-0.5)
        if not self.is_grouped or self.n_head == self.n_head_k:
            return x
        n_tokens = x.ne[2] * x.ne[3]
        wide = ctx.reshape_4d(x, n, 1, self.n_head_k, n_tokens)
        wide = ctx.repeat_4d(wide, n, self.n_head // self.n_head_k, self.n_head_k, n_tokens)
        return ctx.reshape_4d(wide, n, self.n_head, x.ne[2], x.ne[3])

    def _rule(
        self,
        graph: LayersGraph,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        strength: Tensor,
    ) -> Tensor:
        """The gated delta rule: `[n_state, n_head, n_tokens, n_sequences]`."""
        ctx, sizes, n = graph.ctx, graph.sizes, self.n_state
        decay, strength = (ctx.reshape_4d(x, 1, self.n_head, *sizes) for x in (decay, strength))
        table = graph.states(layer, "state_scan")
        states = ctx.reshape_4d(ctx.get_rows(table, graph.slots), n, n, self.n_head, sizes[1])
        packed = ctx.gated_delta_net(query, key, value, decay, strength, states)
        y = graph.unpack(table, packed, value.ne)
        return graph.label(f"blk.{layer}.ssm_scan", y, self.n_head, n)
