"""Layer: residual steps of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ggmlb.models.text.blocks.block import Block, Weight, norm_weights

if TYPE_CHECKING:
    from ggmlb import Tensor
    from ggmlb.models.text.graph import LayersGraph

B = TypeVar("B", bound=Block)

SCALE = "layer_output_scale.weight"
"""The factor of a layer's output."""


@dataclass(frozen=True)
class Residual:
    """`x + scale * after(block(before(x)))`.

    Attributes:
        before: Name of the norm of the block's input; "": it has none.
        block: The block.
        after: Name of the norm of the block's output; "": it has none.
        scale: Factor of the block's output.
    """

    before: str
    block: Block
    after: str = ""
    scale: float = 1.0

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the norms and of the block."""
        norms = [each for name in (self.before, self.after) if name for each in norm_weights(name, n_embd)]
        return [*norms, *self.block.weights(n_embd)]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes to a graph; return the sum: in the last layer that of the tokens with outputs."""
        at = f"blk.{layer}."
        y = self.block.apply(graph, layer, graph.norm(at + self.before, x) if self.before else x)
        if self.after:
            y = graph.norm(at + self.after, y)
        if self.scale != 1:
            y = graph.ctx.scale(y, self.scale)
        if self.block.output:
            graph.label(at + self.block.output, y)
        return graph.ctx.add(y, graph.rows_like(y, x))


@dataclass(frozen=True)
class Layer:
    """A layer: residual steps, one after the other.

    Attributes:
        steps: The steps.
        has_scale: Whether the file may have a factor of the layer's output.
    """

    steps: tuple[Residual, ...]
    has_scale: bool = False

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the norms and blocks of the layer, and its factor."""
        scale = [Weight(SCALE, (1,), is_optional=True)] if self.has_scale else []
        return [*(weight for step in self.steps for weight in step.weights(n_embd)), *scale]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of the layer to a graph; return the hidden states after it."""
        if not any(block.mixes_tokens for block in self.blocks()):
            x = graph.outputs_of(layer, x)  # as those that mix tokens do
        for i, step in enumerate(self.steps):
            x = step.apply(graph, layer, x)
            if not i and len(self.steps) > 1:
                graph.label(f"blk.{layer}.ffn_inp", x)
        scale = graph.weights.get(f"blk.{layer}.{SCALE}")
        return x if scale is None else graph.ctx.mul(x, scale)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks."""
        for step in self.steps:
            yield from step.block.leaves()

    def find(self, kind: type[B]) -> B | None:
        """Return the first block of a class; `None` if there is none."""
        return next((block for block in self.blocks() if isinstance(block, kind)), None)


PRE, POST, NONE = ("attn_norm", "ffn_norm"), ("post_attention_norm", "post_ffw_norm"), ("", "")
"""Names of the norms before, or after, attention and the feed-forward part."""


def decoder_layers(
    attention: Iterable[Block],
    feed_forward: Iterable[Block],
    before: tuple[str, str] = PRE,
    after: tuple[str, str] = NONE,
    scale: float = 1.0,
) -> list[Layer]:
    """Return layers of attention and feed-forward part.

    Args:
        attention: The attention of each layer.
        feed_forward: The feed-forward part of each layer.
        before: Norms of the inputs of both.
        after: Norms of their outputs.
        scale: Factor of their outputs.
    """
    return [
        Layer((Residual(before[0], first, after[0], scale), Residual(before[1], second, after[1], scale)))
        for first, second in zip(attention, feed_forward, strict=True)
    ]
