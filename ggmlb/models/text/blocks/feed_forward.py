"""FeedForward and Experts: the gated feed-forward part of a layer, and a mixture of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ggmlb import Context, Tensor
from ggmlb.models.text.blocks.block import Block, Parallel, Slices, Weight
from ggmlb.models.text.experts import KINDS

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph
    from ggmlb.models.text.keys import Keys

Activation = Literal["swiglu", "geglu", "swiglu_oai", "relu_sqr"]

MIN_EXPERT_SUM = 2.0**-14
"""Smallest sum of the weights of chosen experts: the smallest normal f16, as in llama.cpp."""

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
"""Slope and limit of the activation of gpt-oss."""


def activate(ctx: Context, activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """Return the activation; without `up`, of a product that holds gate and up, or needs no gate."""
    if activation == "relu_sqr":
        return ctx.sqr(ctx.relu(gate))
    is_geglu = activation == "geglu"
    if activation == "swiglu_oai" and up is not None:
        return ctx.swiglu_oai(gate, up, OAI_ALPHA, OAI_LIMIT)
    if up is None:
        return ctx.geglu(gate) if is_geglu else ctx.swiglu(gate)
    return ctx.geglu_split(gate, up) if is_geglu else ctx.swiglu_split(gate, up)


@dataclass(frozen=True)
class FeedForward(Block):
    """A feed-forward part.

    Attributes:
        n_ff: Hidden size.
        activation: The activation; it has a gate, except `relu_sqr`, the square of ReLU.
        is_fused: Whether one weight, `ffn_up`, holds gate and up.
        suffix: End of the names of its weights: `_shexp` of an expert that all tokens use.
        is_scaled: Whether the sigmoid of a product with `ffn_gate_inp` scales the output.
    """

    output = "ffn_out"

    n_ff: int
    activation: Activation = "swiglu"
    is_fused: bool = False
    suffix: str = ""
    is_scaled: bool = False

    @property
    def has_gate(self) -> bool:
        """Whether the activation is of two products."""
        return self.activation != "relu_sqr"

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of gate, up and down."""
        end = self.suffix
        columns = Slices(0, (1,), self.n_ff, f"ff{end}")
        found = [Weight(f"ffn_gate_inp{end}.weight", (1, n_embd), "product")] if self.is_scaled else []
        gates = ("ffn_gate",) if self.has_gate else ()
        for part, n in (("ffn_up", 2),) if self.is_fused else ((name, 1) for name in (*gates, "ffn_up")):
            name = part + end
            rows, elements = (Slices(axis, (1,) * n, self.n_ff, f"ff{end}") for axis in (1, 0))
            found += [
                Weight(f"{name}.weight", (n * self.n_ff, n_embd), "product", rows),
                Weight(f"{name}.bias", (n * self.n_ff,), is_optional=True, slices=elements),
            ]
        return [
            *found,
            Weight(f"ffn_down{end}.weight", (n_embd, self.n_ff), "product", columns),
            Weight(f"ffn_down{end}.bias", (n_embd,), is_optional=True),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the products and the activation to a graph."""
        at, end = f"blk.{layer}.", self.suffix
        gate = graph.product(f"{at}ffn_gate{end}", x) if self.has_gate and not self.is_fused else None
        up = graph.product(f"{at}ffn_up{end}", x)
        y = activate(graph.ctx, self.activation, *((up, None) if gate is None else (gate, up)))
        y = graph.product(f"{at}ffn_down{end}", graph.label(f"{at}ffn_act{end}", y))
        if not self.is_scaled:
            return y
        return graph.ctx.mul(y, graph.ctx.sigmoid(graph.product(f"{at}ffn_gate_inp{end}", x)))


@dataclass(frozen=True)
class Experts(Block):
    """A mixture of experts, of which a router chooses some for each token.

    Attributes:
        n: Experts in a layer.
        n_used: Experts that each token uses.
        n_ff: Hidden size of an expert.
        activation: The activation.
        weighting: How the router's scores become weights of the chosen experts: their share of the soft max
            of all scores, the same divided by their sum, or the soft max of the chosen scores.
        has_biases: Whether the products have biases.
        is_sigmoid: Whether shares are sigmoids of the scores instead of their soft max.
        has_choice_bias: Whether a bias is added to the shares by which experts are chosen.
        scale: Factor of the weights of the chosen experts.
        n_group: Groups of experts, of which the best are chosen first, by their two best experts; 1: none.
        n_group_used: Groups from which experts are chosen.
    """

    output = "ffn_out"

    n: int
    n_used: int
    n_ff: int
    activation: Activation = "swiglu"
    weighting: Literal["share", "normalised share", "chosen"] = "normalised share"
    has_biases: bool = False
    is_sigmoid: bool = False
    has_choice_bias: bool = False
    scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the router and of all experts."""
        shapes = (self.n, self.n_ff, n_embd), (self.n, self.n_ff, n_embd), (self.n, n_embd, self.n_ff)
        found = [Weight("ffn_gate_inp.weight", (self.n, n_embd), "product")]
        for name, shape, axis in zip(KINDS, shapes, (1, 1, 0), strict=True):
            found.append(Weight(name, shape, "product", Slices(axis, (1,), self.n_ff, "ff")))
            if self.has_biases:
                slices = Slices(0, (1,), self.n_ff, "ff") if axis else None
                found.append(Weight(name.removesuffix("weight") + "bias", shape[:2], slices=slices))
        if self.has_choice_bias:
            found.append(Weight("exp_probs_b.bias", (self.n,)))
        return [*found, Weight("ffn_gate_inp.bias", (self.n,))] if self.has_biases else found

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of the router and of the chosen experts to a graph; return their weighted sum."""
        ctx, at = graph.ctx, f"blk.{layer}."
        n_embd, n = x.ne[0], x.ne[1]
        shares = graph.product(at + "ffn_gate_inp", x)
        if self.weighting != "chosen":
            shares = ctx.sigmoid(shares) if self.is_sigmoid else ctx.soft_max(shares)
            shares = graph.label(at + "ffn_shares", shares)
        chosen = graph.label(at + "ffn_chosen", self._chosen(graph, at, shares))
        weights = ctx.get_rows(ctx.reshape_3d(shares, 1, self.n, n), chosen)
        if self.weighting != "share":
            weights = ctx.reshape_2d(weights, self.n_used, n)
            if self.weighting == "chosen":
                weights = ctx.soft_max(weights)
            else:
                weights = ctx.div(weights, ctx.clamp(ctx.sum_rows(weights), MIN_EXPERT_SUM, math.inf))
            weights = ctx.reshape_3d(weights, 1, self.n_used, n)
        if self.scale != 1:
            weights = ctx.scale(weights, self.scale)
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

    def _chosen(self, graph: LayersGraph, at: str, shares: Tensor) -> Tensor:
        """Return the indices of the chosen experts, `[n_used, n_tokens]`."""
        ctx, n = graph.ctx, shares.ne[1]
        if self.has_choice_bias:
            shares = ctx.add(shares, graph.weights[at + "exp_probs_b.bias"])
        if self.n_group > 1:
            size = self.n // self.n_group
            groups = ctx.reshape_3d(shares, size, self.n_group, n)
            best = ctx.top_k(groups, 2)
            best = ctx.get_rows(ctx.reshape_4d(groups, 1, size, self.n_group, n), best)
            sums = ctx.reshape_2d(ctx.sum_rows(ctx.reshape_3d(best, 2, self.n_group, n)), self.n_group, n)
            used = ctx.top_k(sums, self.n_group_used)
            kept = ctx.get_rows(groups, used)
            shares = ctx.set_rows(ctx.fill(groups, -math.inf), kept, used)
            shares = ctx.reshape_2d(shares, self.n, n)
        return ctx.top_k(shares, self.n_used)


def feed_forwards(keys: Keys, activation: Activation = "swiglu") -> list[FeedForward]:
    """Read the feed-forward part of each layer.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    return [
        FeedForward(n_ff, activation, f"blk.{i}.ffn_gate.weight" not in keys.file)
        for i, n_ff in enumerate(keys.counts("feed_forward_length"))
    ]


def dense_or_experts(keys: Keys) -> Sequence[Block]:
    """Read the feed-forward part of each layer: experts if the file has any, of the size of a dense part."""
    has_experts = keys.count("expert_count", 0, 0) > 0
    return experts(keys, has_own_size=False) if has_experts else feed_forwards(keys)


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


def routing(keys: Keys, is_sigmoid: bool | None = None) -> dict[str, Any]:
    """Read how a router chooses and weighs experts: fields of `Experts`.

    Args:
        keys: The metadata.
        is_sigmoid: What the shares are if the file does not say; `None`: it must.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    default = None if is_sigmoid is None else 1 + is_sigmoid
    gating = keys.count("expert_gating_func", default, 0, 4) or default
    if gating not in (1, 2):
        raise keys.error("expert_gating_func", f"it is {gating}; supported: 1 (soft max) and 2 (sigmoid)")
    n, n_group = keys.count("expert_count", 1), keys.count("expert_group_count", 0, 0) or 1
    if n % n_group or (n_group > 1 and n // n_group < 2):
        raise keys.error("expert_group_count", f"it is {n_group}; {n} experts cannot have so many groups")
    used = keys.count("expert_group_used_count", 0, 0)
    if n_group > 1 and not 1 <= used < n_group:
        raise keys.error("expert_group_used_count", f"it is {used}; it must be 1 to {n_group - 1}")
    return {
        "is_sigmoid": gating == 2,
        "weighting": "normalised share" if keys.flag("expert_weights_norm", False) else "share",
        "scale": keys.real("expert_weights_scale", 0.0) or 1.0,
        "n_group": n_group,
        "n_group_used": used if n_group > 1 else 1,
    }


def leading_dense(keys: Keys, mixtures: Iterable[Block]) -> list[Block]:
    """Return dense feed-forward parts of the first `leading_dense_block_count` layers, then `mixtures`.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    n = keys.count("leading_dense_block_count", 0, 0)
    return [*feed_forwards(keys)[:n], *list(mixtures)[n:]]


def shared_mixtures(keys: Keys, is_sigmoid: bool, has_choice_bias: bool | None = None) -> list[Block]:
    """Read mixtures with experts that all tokens use (`expert_shared_count`), after leading dense layers.

    Args:
        keys: The metadata.
        is_sigmoid: Whether the router's shares are sigmoids, if the file does not say.
        has_choice_bias: Whether the router has a bias for the choice; `None`: if the file has it.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    if has_choice_bias is None:
        has_choice_bias = any(f"blk.{i}.exp_probs_b.bias" in keys.file for i in range(keys.n_layer))
    n_shared = keys.count("expert_shared_count", 0, 0)
    mixtures: list[Block] = []
    for part in experts(keys, **routing(keys, is_sigmoid), has_choice_bias=has_choice_bias):
        shared = FeedForward(part.n_ff * n_shared, suffix="_shexp")
        mixtures.append(Parallel((part, shared)) if n_shared else part)
    return leading_dense(keys, mixtures)


def scaled_shared(keys: Keys, parts: Iterable[Block]) -> list[Block]:
    """Return mixtures, each with an expert that all tokens use, and whose output is scaled.

    Raises:
        ModelError: Metadata is missing or wrong.
    """
    size = keys.count("feed_forward_length", 0, 0)
    size = keys.count("expert_shared_feed_forward_length", 0, 0) or size
    if not size:
        raise keys.error("expert_shared_feed_forward_length", f"it is {size}; it must be 1 or more")
    shared = FeedForward(size, suffix="_shexp", is_scaled=True)
    return [Parallel((part, shared)) for part in parts]
