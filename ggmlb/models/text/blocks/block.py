"""Block: the base class of the parts of a layer, with the weights that they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from ggmlb import Context, Tensor
    from ggmlb.models.text.graph import LayersGraph


class Slices(NamedTuple):
    """How devices that share a layer split a tensor: each takes some of `n` equal parts.

    Attributes:
        axis: The axis of `ne` that is split.
        sizes: Elements of a part, in each segment of the axis: a fused product has several.
        n: Number of parts: KV heads, or elements of the feed-forward part.
        group: Weights of a layer with the same group are split alike.
    """

    axis: int
    sizes: tuple[int, ...]
    n: int
    group: str


class Weight(NamedTuple):
    """A tensor that a block reads.

    Attributes:
        name: Its name after `blk.N.`.
        shape: Its shape, NumPy order.
        kind: `"product"`: only matrix products read it; `"matrix"`: it may have another type than float32;
            `"vector"`: it is float32.
        slices: How devices split it; `None`: each has all of it.
        is_optional: Whether a file may lack it.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["product", "matrix", "vector"] = "vector"
    slices: Slices | None = None
    is_optional: bool = False


def split_heads(ctx: Context, x: Tensor, sizes: Iterable[tuple[int, int]]) -> list[Tensor]:
    """Return views of consecutive parts of rows: for each `(n, n_head)`, `[n, n_head, *x.ne[1:3]]`."""
    found, start = [], 0
    for n, n_head in sizes:
        found.append(ctx.view_4d(x, n, n_head, *x.ne[1:3], n * x.nb[0], *x.nb[1:3], start * x.nb[0]))
        start += n * n_head
    return found


def norm_weights(name: str, n: int) -> list[Weight]:
    """Return the weight of a norm of `n` elements, and its bias, which a file may lack."""
    return [Weight(f"{name}.weight", (n,)), Weight(f"{name}.bias", (n,), is_optional=True)]


class Block(ABC):
    """A part of a layer: its sizes, its weights, and its nodes in a graph.

    Attributes:
        mixes_tokens: Whether its output depends on other tokens of the sequence.
    """

    mixes_tokens: ClassVar[bool] = False

    @property
    def output(self) -> str:
        """Name of its output in a layer (`attn_out`); "": it has none."""
        return ""

    @abstractmethod
    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights for hidden states of `n_embd` elements."""

    @abstractmethod
    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the block's nodes to a graph; return its output.

        A block that mixes tokens returns `graph.outputs_of(layer, y)`: in the last layer, only tokens with
        outputs are left.

        Args:
            graph: With the weights by name, and with `product`, `norm` and `label` to make named nodes.
            layer: The layer's number.
            x: Hidden states, `[n_embd, n_tokens]`.

        Returns:
            Of the shape of `x`.
        """

    def leaves(self) -> Iterator[Block]:
        """Yield the blocks of which it consists, or the block itself."""
        yield self


class Recurrent(Block):
    """Base class of blocks that mix the tokens of a sequence by way of states."""

    mixes_tokens = True

    @property
    @abstractmethod
    def states(self) -> Mapping[str, int]:
        """Elements of each state of a sequence, float32, by a name of `STATE_NAMES`."""


@dataclass(frozen=True)
class Parallel(Block):
    """The sum of blocks with the same input."""

    blocks: tuple[Block, ...]

    @property
    def output(self) -> str:
        """The name that the blocks' outputs share; "": they have different ones."""
        names = {block.output for block in self.blocks}
        return names.pop() if len(names) == 1 else ""

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of all blocks."""
        return [weight for block in self.blocks for weight in block.weights(n_embd)]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of all blocks, first of those that mix tokens; return the sum of their outputs."""
        total: Tensor | None = None
        for block in sorted(self.blocks, key=lambda block: not block.mixes_tokens):
            rows = x if total is None or block.mixes_tokens else graph.rows_like(total, x)
            y = block.apply(graph, layer, rows)
            if block.output != self.output:
                graph.label(f"blk.{layer}.{block.output}", y)
            total = y if total is None else graph.ctx.add(total, y)
        assert total is not None
        return total

    def leaves(self) -> Iterator[Block]:
        """Yield the blocks."""
        for block in self.blocks:
            yield from block.leaves()
