"""TimeMix and ChannelMix: the two parts of a layer of RWKV-7, which both see the token before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb import Tensor
from ggmlb.models.text.blocks.block import Recurrent, Weight, norm_weights
from ggmlb.models.text.blocks.convolution import after_state

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph
    from ggmlb.models.text.keys import Keys

MOST_DECAY = 0.606531
"""exp(-1/2): the most that the logarithm of a state's channel decreases by in a step."""

HEAD_EPS, KEY_EPS = 64e-5, 1e-12
"""Added to the variance of a head's outputs; least length of a key."""


def difference(graph: LayersGraph, layer: int, state: str, x: Tensor) -> Tensor:
    """Return the input of the token before each one, less its own; a state keeps the last input.

    Args:
        graph: The graph.
        layer: The layer.
        state: Name of the state.
        x: Inputs, `[n, n_tokens * n_sequences]`.

    Returns:
        Of the shape of `x`.
    """
    ctx = graph.ctx
    own = ctx.reshape_3d(x, x.ne[0], *graph.sizes)
    seen = after_state(graph, layer, state, own, 1)
    before = ctx.view_3d(seen, *own.ne[:3], seen.nb[1], seen.nb[2], 0)
    return ctx.reshape_2d(ctx.sub(before, own), *x.ne[:2])


@dataclass(frozen=True)
class TimeMix(Recurrent):
    """A recurrent block: heads whose states decay by channel, and are corrected by the delta rule.

    Attributes:
        n_embd: Elements of a hidden state, and of all heads' keys.
        n_key: Elements of a key and of a value in a head.
        ranks: Ranks of the matrices that decays (`w`), rates (`a`), shares of the first layer's values (`v`)
            and gates (`g`) are computed by.
        is_first: Whether it is the first layer's, whose values the others mix with theirs.
    """

    output = "time_out"

    n_embd: int
    n_key: int
    ranks: tuple[int, int, int, int]
    is_first: bool

    @classmethod
    def read(cls, keys: Keys) -> list[TimeMix]:
        """Read the sizes of each layer's; raise a ModelError if metadata is missing or wrong."""
        n_key = keys.count("wkv.head_size")
        if keys.n_embd % n_key:
            raise keys.error("wkv.head_size", f"it is {n_key}; it must divide {keys.n_embd}")
        w, a, v, g = (
            keys.count(f"attention.{name}_lora_rank")
            for name in ("decay", "iclr", "value_residual_mix", "gate")
        )
        return [cls(keys.n_embd, n_key, (w, a, v, g), is_first=not i) for i in range(keys.n_layer)]

    @property
    def states(self) -> Mapping[str, int]:
        """Elements of the last input, and of the heads' states."""
        return {"state_time": self.n_embd, "state_scan": self.n_key * self.n_embd}

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the mixed inputs, of the products, and of the norm of heads."""
        found = [Weight("time_mix_lerp_fused.weight", (6, 1, 1, n_embd))]
        for name, rank in zip("wavg", self.ranks, strict=True):
            if name == "v" and self.is_first:
                continue
            found += [
                Weight(f"time_mix_{name}1.weight", (rank, n_embd), "product"),
                Weight(f"time_mix_{name}2.weight", (n_embd, rank), "product"),
            ]
            if name != "g":
                found.append(Weight(f"time_mix_{name}0.weight", (n_embd,)))
        for name in ("receptance", "key", "value", "output"):
            found.append(Weight(f"time_mix_{name}.weight", (n_embd, n_embd), "product"))
        found += [Weight(f"time_mix_{name}.weight", (n_embd,)) for name in ("k_k", "k_a", "r_k")]
        return [*found, *norm_weights("time_mix_ln", n_embd)]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of a layer to a graph: each token is mixed with the earlier ones of its sequence.

        Returns:
            Of all tokens, also in the last layer: there the next block needs them.
        """
        ctx, w, at, (n, n_tokens) = graph.ctx, graph.weights, f"blk.{layer}.time_mix_", x.ne[:2]
        heads = self.n_key, n // self.n_key, n_tokens
        apart = ctx.repeat_4d(difference(graph, layer, "state_time", x), n, n_tokens, 1, 6)
        mixed = ctx.add(ctx.mul(apart, w[at + "lerp_fused.weight"]), x)
        of_r, of_w, of_k, of_v, of_a, of_g = (
            ctx.view_2d(mixed, n, n_tokens, mixed.nb[1], i * mixed.nb[3]) for i in range(6)
        )
        receptance, key = graph.product(at + "receptance", of_r), graph.product(at + "key", of_k)
        decay = graph.product(at + "w2", ctx.tanh(graph.product(at + "w1", of_w)))
        decay = ctx.sigmoid(ctx.add(decay, w[at + "w0.weight"]))
        decay = graph.label(at + "decay", ctx.exp(ctx.scale(decay, -MOST_DECAY)))
        value = graph.product(at + "value", of_v)
        if not self.is_first:
            value = self._mixed_value(graph, at, value, of_v)
        gate = graph.product(at + "g2", ctx.sigmoid(graph.product(at + "g1", of_g)))
        rate = graph.product(at + "a2", graph.product(at + "a1", of_a))
        rate = ctx.sigmoid(ctx.add(rate, w[at + "a0.weight"]))
        unit = ctx.l2_norm(ctx.reshape_3d(ctx.mul(key, w[at + "k_k.weight"]), *heads), KEY_EPS)
        scaled = ctx.mul(key, w[at + "k_a.weight"])
        key = ctx.add(key, ctx.sub(ctx.mul(rate, scaled), scaled))
        receptance, decay, key, value, rate = (
            ctx.reshape_3d(part, *heads) for part in (receptance, decay, key, value, rate)
        )
        table = graph.states(layer, "state_scan")
        states = ctx.get_rows(table, graph.slots)
        removed, added = ctx.neg(unit), ctx.mul(unit, rate)
        packed = ctx.rwkv_wkv7(receptance, decay, key, value, removed, added, states)
        y = ctx.norm(graph.unpack(table, packed, value.ne), HEAD_EPS)
        y = ctx.mul(ctx.reshape_2d(y, n, n_tokens), w[at + "ln.weight"])
        if at + "ln.bias" in w:
            y = ctx.add(y, w[at + "ln.bias"])
        y = graph.label(at + "scan", y)
        bonus = ctx.reshape_2d(w[at + "r_k.weight"], *heads[:2])
        bonus = ctx.sum_rows(ctx.mul(ctx.mul(key, receptance), bonus))
        y = ctx.add(y, ctx.reshape_2d(ctx.mul(value, bonus), n, n_tokens))
        return graph.product(at + "output", ctx.mul(y, gate))

    def _mixed_value(self, graph: LayersGraph, at: str, value: Tensor, x: Tensor) -> Tensor:
        """Return values, mixed with those of the first layer."""
        ctx = graph.ctx
        first = graph.earlier("blk.0.time_mix_value")
        share = graph.product(at + "v2", graph.product(at + "v1", x))
        share = ctx.sigmoid(ctx.add(share, graph.weights[at + "v0.weight"]))
        return ctx.add(value, ctx.mul(ctx.sub(first, value), share))


@dataclass(frozen=True)
class ChannelMix(Recurrent):
    """A feed-forward part with squares as activation, whose input is mixed with that of the token before.

    Attributes:
        n_embd: Elements of a hidden state.
        n_ff: Hidden size.
    """

    output = "ffn_out"

    n_embd: int
    n_ff: int

    @property
    def states(self) -> Mapping[str, int]:
        """Elements of the last input."""
        return {"state_channel": self.n_embd}

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the mixed input and of both products."""
        return [
            Weight("channel_mix_lerp_k.weight", (1, 1, n_embd)),
            Weight("channel_mix_key.weight", (self.n_ff, n_embd), "product"),
            Weight("channel_mix_value.weight", (n_embd, self.n_ff), "product"),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the products and the activation to a graph."""
        ctx, at = graph.ctx, f"blk.{layer}.channel_mix_"
        apart = difference(graph, layer, "state_channel", x)
        mixed = ctx.add(ctx.mul(apart, graph.weights[at + "lerp_k.weight"]), x)
        y = ctx.sqr(ctx.relu(graph.product(at + "key", graph.outputs_of(layer, mixed))))
        return graph.product(at + "value", graph.label(at + "act", y))
