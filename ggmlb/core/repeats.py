"""Repeats: the equal parts of a graph, as the layers of a model, of which a few stand for all.

A graph of many layers is split, ordered, planned and lowered by a shorter one, which has the first two and
the last of its equal parts. Parts are equal in all that decisions depend on, read only themselves, the part
before and what all read alike, and share no memory but that of results. So what was found alike for the first
two parts holds for those that were left out. Where it was not alike, the whole graph is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.interface import Buffer

    Numbers = npt.NDArray[np.int64]

KEPT: Final = 3
"""Parts of the shorter graph."""


@dataclass(frozen=True)
class Repeats:
    """Parts of a graph that follow each other, and are equal but for their numbers.

    The first part's nodes and leafs have the numbers from `node` and `leaf` on; the next part's are larger by
    `n_nodes` and `n_leafs`. Other leafs and earlier nodes that parts read are common to them.

    Attributes:
        node, leaf: The first part's first numbers.
        n_nodes, n_leafs: Nodes and leafs of a part.
        n_parts: Number of parts.
        n_before: Number of the graph's leafs.
        n_tensors: Number of its tensors.
        are_pairs: Whether each part is two equal ones.
    """

    node: int
    leaf: int
    n_nodes: int
    n_leafs: int
    n_parts: int
    n_before: int
    n_tensors: int
    are_pairs: bool = False

    @property
    def n_left_out(self) -> int:
        """Parts that the shorter graph lacks: all between the second and the last."""
        return self.n_parts - KEPT

    @property
    def third(self) -> tuple[int, int]:
        """The numbers of the first node of the third part, and of the last part."""
        return self.node + 2 * self.n_nodes, self.node + (self.n_parts - 1) * self.n_nodes

    @cached_property
    def kept(self) -> list[int]:
        """Numbers of the shorter graph's tensors."""
        leaf, (third, last) = self.leaf + 2 * self.n_leafs, self.third
        others = range(leaf + self.n_left_out * self.n_leafs, third)
        return [*range(leaf), *others, *range(last, self.n_tensors)]

    @cached_property
    def short_node(self) -> int:
        """The number of the first part's first node in the shorter graph."""
        return self.node - self.n_left_out * self.n_leafs

    @cached_property
    def origins(self) -> list[int]:
        """For each tensor, the number in the shorter graph of what stands for it; -1 for the last, `None`."""
        origins = np.empty(self.n_tensors + 1, np.int64)
        origins[self.kept] = np.arange(len(self.kept))
        for first, n in ((self.leaf, self.n_leafs), (self.node, self.n_nodes)):
            second = origins[first + n : first + 2 * n]
            origins[first + 2 * n : first + (self.n_parts - 1) * n] = np.tile(second, self.n_left_out)
        origins[-1] = -1
        found: list[int] = origins.tolist()
        return found

    # Numbers of the shorter graph grow from part to part as those of the graph do.

    @cached_property
    def steps(self) -> Numbers:
        """By how much the number of each of the shorter graph's tensors grows from part to part; 0 last."""
        steps = np.zeros(len(self.kept) + 1, np.int64)
        steps[self.leaf : self.leaf + KEPT * self.n_leafs] = self.n_leafs
        steps[self.short_node : self.short_node + KEPT * self.n_nodes] = self.n_nodes
        return steps

    @cached_property
    def firsts(self) -> Numbers:
        """Numbers of the shorter graph's tensors; of its last part, those in the third part; -1 last."""
        firsts = np.array([*self.kept, -1], np.int64)
        for first, n in ((self.leaf, self.n_leafs), (self.short_node, self.n_nodes)):
            firsts[first + 2 * n : first + KEPT * n] -= self.n_left_out * n
        return firsts

    def is_alike(self, *found: Sequence[Any]) -> bool:
        """Whether the same was found for the first two parts' tensors, by number in the shorter graph."""
        starts = ((self.leaf, self.n_leafs), (self.short_node, self.n_nodes))
        return all(x[i : i + n] == x[i + n : i + 2 * n] for x in found for i, n in starts)

    def in_pairs(self) -> Repeats | None:
        """Return parts that are two of these each, whose results may take turns in two places.

        Returns:
            `None` if these are such, or none would be left out.
        """
        n_parts = self.n_parts // 2
        if self.are_pairs or n_parts <= KEPT:
            return None
        n_nodes, n_leafs = 2 * self.n_nodes, 2 * self.n_leafs
        return replace(self, n_nodes=n_nodes, n_leafs=n_leafs, n_parts=n_parts, are_pairs=True)

    def window(self, order: Sequence[int]) -> tuple[int, int] | None:
        """Return where in an order of the shorter graph's nodes those come that stand for the parts left out.

        They follow what stands for the part before, in the same order.

        Returns:
            The first and the end, equal if the order has no nodes of parts; `None` if it does not repeat.
        """
        first, n = self.short_node, self.n_nodes
        places = {i: place for place, i in enumerate(order) if first <= i < first + KEPT * n}
        start = min((place for i, place in places.items() if first + n <= i < first + 2 * n), default=-1)
        if start < 0:
            return None if places else (0, 0)
        end = 2 * start - places.get(order[start] - n, start)
        found = np.array(order[start:end], np.int64)
        if end == start or not np.array_equal(found - self.steps[found], order[2 * start - end : start]):
            return None
        return start, end

    def expand(self, order: Sequence[int]) -> list[int]:
        """Return the order of the graph's nodes, given one of the shorter graph's that repeats."""
        numbers, (start, end) = np.array(order, np.int64), self.window(order) or (0, 0)
        found: list[int] = np.concatenate(
            [self.firsts[numbers[:end]], self.left_out(numbers[start:end]).ravel(), self.last(numbers[end:])]
        ).tolist()
        return found

    def left_out(self, numbers: Numbers) -> Numbers:
        """Return the numbers that tensors of the second part stand for, a row for each part left out."""
        times = np.arange(1, self.n_left_out + 1)[:, None]
        found: Numbers = self.firsts[numbers] + times * self.steps[numbers]
        return found

    def last(self, numbers: Numbers) -> Numbers:
        """Return the numbers of the shorter graph's tensors where they come after the parts left out."""
        found: Numbers = self.firsts[numbers] + self.n_left_out * self.steps[numbers]
        return found


class RepeatedGraph(Graph):
    """A graph with equal parts, whose nodes are made when they are asked for: the shorter graph may do.

    Attributes:
        repeats: The parts.
        numbers: Numbers of the shorter graph's tensors.
        short_order: Numbers of its nodes, in order.
        buffers, offsets: By number in the whole graph, where tensors lie.
        make: Makes a graph of all nodes.
    """

    def __init__(
        self,
        short: Graph,
        repeats: Repeats,
        numbers: dict[Tensor | None, int],
        short_order: list[int],
        places: tuple[Sequence[Buffer | None], Sequence[int]],
        make: Callable[[], Graph],
    ) -> None:
        self._short = short
        self.repeats = repeats
        self.numbers = numbers
        self.short_order = short_order
        self.buffers, self.offsets = places
        self.make = make
        self.owner_checks = short.owner_checks

    @property
    def short(self) -> Graph:
        """The shorter graph."""
        return self._short

    @property
    def order(self) -> list[int]:
        """Numbers of the nodes."""
        return self.repeats.expand(self.short_order)

    def memory(self) -> set[Buffer | None]:
        """Return the buffers in which its tensors lie."""
        first, n = self.repeats.leaf, self.repeats.n_leafs * self.repeats.n_parts
        return self._short.memory().union(self.buffers[first : first + n])

    def __len__(self) -> int:
        start, end = self.repeats.window(self.short_order) or (0, 0)
        return len(self.short_order) + self.repeats.n_left_out * (end - start)

    def __getattr__(self, name: str) -> Any:
        """Make the nodes."""
        made = self.make()
        for slot in ("nodes", "leafs", "whole", "marks", "_seen", "_grads", "_accs"):
            setattr(self, slot, getattr(made, slot))
        return getattr(made, name)
