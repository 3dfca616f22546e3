"""Convolutions over the last tokens of a sequence, and the block of LFM2 that consists of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb import Tensor
from ggmlb.models.text.blocks.block import Recurrent, Weight

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph


def after_state(graph: LayersGraph, layer: int, state: str, x: Tensor, axis: int) -> Tensor:
    """Return 3-D inputs after those in a state, along `axis` (0 or 1); the state gets the last ones."""
    ctx, table, ne = graph.ctx, graph.states(layer, state), [*x.ne[:3]]
    ne[axis] = table.ne[0] // ne[1 - axis]
    kept = ctx.reshape_3d(ctx.get_rows(table, graph.slots), *ne)
    seen = ctx.concat(kept, x, axis)
    last = ctx.view_3d(seen, *kept.ne[:3], seen.nb[1], seen.nb[2], x.ne[axis] * seen.nb[axis])
    graph.keep(table, ctx.cont(last))
    return seen


def convolve(graph: LayersGraph, layer: int, x: Tensor, name: str) -> Tensor:
    """Return the convolution of each channel with its last inputs, which the state `state_conv` keeps.

    Its bias, if there is one, is added.

    Args:
        graph: The graph.
        layer: The layer.
        x: Inputs, `[n_channels, n_tokens, n_sequences]`.
        name: Name in the layer of kernel, `[n_conv, n_channels]`, and bias.

    Returns:
        `[n_channels, n_tokens, n_sequences]`.
    """
    ctx, at = graph.ctx, f"blk.{layer}.{name}"
    kernel, bias = graph.weights[f"{at}.weight"], graph.weights.get(f"{at}.bias")
    y = ctx.ssm_conv(after_state(graph, layer, "state_conv", ctx.cont(ctx.transpose(x)), 0), kernel)
    return y if bias is None else ctx.add(y, bias)


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """A convolution over few tokens, between two gates.

    Attributes:
        n_conv: Width of the convolution [tokens].
        n_channels: Channels: elements of a hidden state.
    """

    output = "conv_out"

    n_conv: int
    n_channels: int

    @property
    def states(self) -> Mapping[str, int]:
        """Elements of the convolution's last inputs."""
        return {"state_conv": (self.n_conv - 1) * self.n_channels}

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the products and the convolution."""
        return [
            Weight("shortconv.in_proj.weight", (3 * self.n_channels, n_embd), "product"),
            Weight("shortconv.conv.weight", (self.n_channels, self.n_conv)),
            Weight("shortconv.out_proj.weight", (n_embd, self.n_channels), "product"),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of a layer to a graph: each token is mixed with the last ones of its sequence."""
        ctx, at, n = graph.ctx, f"blk.{layer}.", self.n_channels
        found = graph.product(at + "shortconv.in_proj", x)
        before, after, x = (found[..., i * n : (i + 1) * n] for i in range(3))
        y = convolve(graph, layer, ctx.reshape_3d(ctx.mul(before, x), n, *graph.sizes), "shortconv.conv")
        y = graph.label(at + "shortconv", ctx.mul(after, ctx.reshape_2d(y, n, found.ne[1])))
        return graph.outputs_of(layer, graph.product(at + "shortconv.out_proj", y))
