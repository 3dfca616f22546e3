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


@dataclass(frozen=True, eq=False)
class Repeats:
    """Parts of a graph that follow each other, and are equal but for their numbers.

    A node of the next part has a number larger by `n_nodes`. Other leafs and earlier nodes that parts read
    are common to all.

    Attributes:
        node: Number of the first part's first node.
        n_nodes: Nodes of a part.
        leafs: Numbers of the leafs that only one part reads, a row for each part, in the same order.
        n_before: Number of the graph's leafs.
        n_tensors: Number of its tensors.
        are_pairs: Whether each part is two equal ones.
    """

    node: int
    n_nodes: int
    leafs: Numbers
    n_before: int
    n_tensors: int
    are_pairs: bool = False

    @property
    def n_parts(self) -> int:
        """Number of parts."""
        return len(self.leafs)

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
        lost, (third, last) = {*self.leafs[2:-1].ravel().tolist()}, self.third
        leafs = [i for i in range(self.n_before) if i not in lost]
        return [*leafs, *range(self.n_before, third), *range(last, self.n_tensors)]

    @cached_property
    def short_node(self) -> int:
        """The number of the first part's first node in the shorter graph."""
        return self.node - self.leafs[2:-1].size

    @cached_property
    def origins(self) -> list[int]:
        """For each tensor, the number in the shorter graph of what stands for it; -1 for the last, `None`."""
        origins = np.empty(self.n_tensors + 1, np.int64)
        origins[self.kept] = np.arange(len(self.kept))
        origins[self.leafs[2:-1]] = origins[self.leafs[1]]
        third, last = self.third
        origins[third:last] = np.tile(origins[third - self.n_nodes : third], self.n_left_out)
        origins[-1] = -1
        found: list[int] = origins.tolist()
        return found

    @cached_property
    def before(self) -> Numbers:
        """The number in the part before of each of the shorter graph's tensors; its own if it is common."""
        before = np.array([*range(len(self.kept)), -1], np.int64)
        before[self.short_node : self.short_node + KEPT * self.n_nodes] -= self.n_nodes
        first, second, last = self.short_leafs
        before[second], before[last] = first, second
        return before

    @cached_property
    def short_leafs(self) -> list[list[int]]:
        """The parts' leafs in the shorter graph."""
        return [[self.origins[i] for i in self.leafs[k].tolist()] for k in (0, 1, -1)]

    def is_alike(self, *found: Sequence[Any]) -> bool:
        """Whether the same was found for the first two parts' tensors, by number in the shorter graph."""
        i, n = self.short_node, self.n_nodes
        first, second, _ = self.short_leafs
        return all(
            x[i : i + n] == x[i + n : i + 2 * n] and [x[k] for k in first] == [x[k] for k in second]
            for x in found
        )

    def in_pairs(self) -> Repeats | None:
        """Return parts that are two of these each, whose results may take turns in two places.

        Returns:
            `None` if these are such, or none would be left out.
        """
        n_parts = self.n_parts // 2
        if self.are_pairs or n_parts <= KEPT:
            return None
        leafs = self.leafs[: 2 * n_parts].reshape(n_parts, -1)
        return replace(self, n_nodes=2 * self.n_nodes, leafs=leafs, are_pairs=True)

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
        if end == start or not np.array_equal(self.before[found], order[2 * start - end : start]):
            return None
        return start, end

    def expand(self, order: Sequence[int]) -> list[int]:
        """Return the order of the graph's nodes, given one of the shorter graph's that repeats."""
        start, end = self.window(order) or (0, 0)
        kept = np.array(self.kept, np.int64)
        early, late = np.array(order[:end], np.int64), np.array(order[end:], np.int64)
        # Before the parts left out, the last part is the third; after them, the first two are its neighbours.
        n, lost = self.n_nodes, self.n_left_out * self.n_nodes
        first = early - self.short_node
        early_numbers = kept[early] - lost * ((first >= 2 * n) & (first < KEPT * n))
        last = late - self.short_node
        late_numbers = kept[late] + lost * ((last >= 0) & (last < 2 * n))
        second = self.left_out(early[start:])
        found: list[int] = np.concatenate([early_numbers, second.ravel(), late_numbers]).tolist()
        return found

    def left_out(self, numbers: Numbers) -> Numbers:
        """Return what tensors of the shorter graph stand for in the parts left out, a row for each part.

        Args:
            numbers: Of tensors that the second part has or reads.
        """
        return self._left_out[:, numbers]

    @cached_property
    def _left_out(self) -> Numbers:
        found = np.tile(np.array([*self.kept, -1], np.int64), (self.n_left_out, 1))
        first, n = self.short_node, self.n_nodes
        times = np.arange(1, self.n_left_out + 1)[:, None]
        found[:, first : first + 2 * n] += times * n
        for part, leafs in enumerate(self.short_leafs[:2]):
            found[:, leafs] = self.leafs[part + 1 : part + 1 + self.n_left_out]
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
        return self._short.memory().union([self.buffers[i] for i in self.repeats.leafs.ravel().tolist()])

    def __len__(self) -> int:
        start, end = self.repeats.window(self.short_order) or (0, 0)
        return len(self.short_order) + self.repeats.n_left_out * (end - start)

    def __getattr__(self, name: str) -> Any:
        """Make the nodes."""
        made = self.make()
        for slot in ("nodes", "leafs", "whole", "marks", "_seen", "_grads", "_accs"):
            setattr(self, slot, getattr(made, slot))
        return getattr(made, name)
