"""FeedForward and Experts: the gated feed-forward part of a layer, and a mixture of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ggmlb import Context, Tensor
from ggmlb.models.text.blocks.block import Block, Slices, Weight
from ggmlb.models.text.experts import KINDS

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph
    from ggmlb.models.text.keys import Keys

Activation = Literal["swiglu", "geglu"]

MIN_EXPERT_SUM = 2.0**-14
"""Smallest sum of the weights of chosen experts: the smallest normal f16, as in llama.cpp."""


def activate(ctx: Context, activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """Return the gated activation; without `up`, of a product that holds gate and up."""
    is_geglu = activation == "geglu"
    if up is None:
        return ctx.geglu(gate) if is_geglu else ctx.swiglu(gate)
    return ctx.geglu_split(gate, up) if is_geglu else ctx.swiglu_split(gate, up)


@dataclass(frozen=True)
class FeedForward(Block):
    """A gated feed-forward part.

    Attributes:
        n_ff: Hidden size.
        activation: The activation.
        is_fused: Whether one weight, `ffn_up`, holds gate and up.
    """

    output = "ffn_out"

    n_ff: int
    activation: Activation = "swiglu"
    is_fused: bool = False

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of gate, up and down."""
        found = []
        for name, n in (("ffn_up", 2),) if self.is_fused else (("ffn_gate", 1), ("ffn_up", 1)):
            rows, elements = (Slices(axis, (1,) * n, self.n_ff, "ff") for axis in (1, 0))
            found += [
                Weight(f"{name}.weight", (n * self.n_ff, n_embd), "product", rows),
                Weight(f"{name}.bias", (n * self.n_ff,), is_optional=True, slices=elements),
            ]
        return [
            *found,
            Weight("ffn_down.weight", (n_embd, self.n_ff), "product", Slices(0, (1,), self.n_ff, "ff")),
            Weight("ffn_down.bias", (n_embd,), is_optional=True),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the products and the activation to a graph."""
        at = f"blk.{layer}."
        gate = None if self.is_fused else graph.product(at + "ffn_gate", x)
        up = graph.product(at + "ffn_up", x)
        y = activate(graph.ctx, self.activation, *((up, None) if gate is None else (gate, up)))
        return graph.product(at + "ffn_down", graph.label(at + "ffn_act", y))


@dataclass(frozen=True)
class Experts(Block):
    """A mixture of experts, of which a router chooses some for each token.

    Attributes:
        n: Experts in a layer.
        n_used: Experts that each token uses.
        n_ff: Hidden size of an expert.
        activation: The activation.
    """

    output = "ffn_out"

    n: int
    n_used: int
    n_ff: int
    activation: Activation = "swiglu"

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the router and of all experts."""
        shapes = (self.n, self.n_ff, n_embd), (self.n, self.n_ff, n_embd), (self.n, n_embd, self.n_ff)
        return [
            Weight("ffn_gate_inp.weight", (self.n, n_embd), "product"),
            *(
                Weight(name, shape, "product", Slices(axis, (1,), self.n_ff, "ff"))
                for name, shape, axis in zip(KINDS, shapes, (1, 1, 0), strict=True)
            ),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of the router and of the chosen experts to a graph; return their weighted sum."""
        ctx, at = graph.ctx, f"blk.{layer}."
        n_embd, n = x.ne[0], x.ne[1]
        shares = graph.label(at + "ffn_shares", ctx.soft_max(graph.product(at + "ffn_gate_inp", x)))
        chosen = graph.label(at + "ffn_chosen", ctx.top_k(shares, self.n_used))
        weights = ctx.get_rows(ctx.reshape_3d(shares, 1, self.n, n), chosen)
        weights = ctx.reshape_2d(weights, self.n_used, n)
        total = ctx.clamp(ctx.sum_rows(weights), MIN_EXPERT_SUM, math.inf)
        weights = ctx.reshape_3d(ctx.div(weights, total), 1, self.n_used, n)
        rows = ctx.reshape_3d(x, n_embd, 1, n)
        slots, matrices = graph.expert_matrices(layer, chosen)
        gate, up = (graph.expert_product(at + KINDS[i], matrices[i], rows, slots, chosen) for i in range(2))
        y = activate(ctx, self.activation, gate, up)
        y = graph.label(at + "ffn_act", y, y.ne[1], y.ne[0])
        down = graph.expert_product(at + KINDS[2], matrices[2], y, slots, chosen)
        weighted = ctx.mul(down, weights)
        parts = [
            ctx.view_2d(weighted, n_embd, n, weighted.nb[2], i * weighted.nb[1]) for i in range(self.n_used)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = ctx.add(total, part)
        return total if self.n_used > 1 else ctx.cont(total)


def feed_forwards(keys: Keys, activation: Activation = "swiglu") -> list[FeedForward]:
    """Read the feed-forward part of each layer.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    return [
        FeedForward(n_ff, activation, f"blk.{i}.ffn_gate.weight" not in keys.file)
        for i, n_ff in enumerate(keys.counts("feed_forward_length"))
    ]


def experts(keys: Keys, has_own_size: bool = True, **options: Any) -> list[Experts]:
    """Read the experts of each layer.

    Args:
        keys: The metadata.
        has_own_size: Whether `expert_feed_forward_length` is the size of an expert, by default that of the
            feed-forward part over the experts that a token uses; else `feed_forward_length` is.
        options: Fields of `Experts`.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    n = keys.count("expert_count", most=1 << 12)
    used = keys.counts("expert_used_count", most=n)
    none = (0,) * keys.n_layer
    given = keys.counts("expert_feed_forward_length", none, 0) if has_own_size else none
    whole = keys.counts("feed_forward_length", none, 0)
    found = []
    for n_used, own, n_ff in zip(used, given, whole, strict=True):
        size = own or (n_ff // n_used if has_own_size else n_ff)
        if not size:
            raise keys.error("feed_forward_length", f"it is {n_ff}; it must be 1 or more")
        found.append(Experts(n, n_used, size, **options))
    return found
