"""Repeats: the equal parts of a graph, as the layers of a model, of which a few stand for all.

A graph of many layers is split, ordered, planned and lowered by a shorter one, which has the first and the
last of its equal parts. Parts are equal in all that decisions depend on, read only themselves, the part
before and what all read alike, and share no memory but that of results. What is decided at a part's begin
depends on the part before, which the last part has as those left out have it; at its end, on the part behind,
as the first has it. So what was found alike for both holds for those between them. Where it was not alike,
the whole graph is looked at.
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

KEPT: Final = 2
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
        """Parts that the shorter graph lacks: all between the first and the last."""
        return self.n_parts - KEPT

    @property
    def gap(self) -> tuple[int, int]:
        """The numbers of the first node that was left out, and of the last part's first node."""
        return self.node + self.n_nodes, self.node + (self.n_parts - 1) * self.n_nodes

    @cached_property
    def kept(self) -> list[int]:
        """Numbers of the shorter graph's tensors."""
        lost, (first, last) = {*self.leafs[1:-1].ravel().tolist()}, self.gap
        leafs = [i for i in range(self.n_before) if i not in lost]
        return [*leafs, *range(self.n_before, first), *range(last, self.n_tensors)]

    @cached_property
    def early(self) -> Numbers:
        """What tensors of the shorter graph stand for up to the first part; -1 last, for `None`."""
        return np.array([*self.kept, -1], np.int64)

    @cached_property
    def short_node(self) -> int:
        """The number of the first part's first node in the shorter graph."""
        return self.node - self.leafs[1:-1].size

    @cached_property
    def origins(self) -> list[int]:
        """For each tensor, the number in the shorter graph of what stands for it; -1 for the last, `None`."""
        origins = np.empty(self.n_tensors + 1, np.int64)
        origins[self.kept] = np.arange(len(self.kept))
        origins[self.leafs[1:-1]] = origins[self.leafs[0]]
        first, last = self.gap
        origins[first:last] = np.tile(origins[self.node : first], self.n_left_out)
        origins[-1] = -1
        found: list[int] = origins.tolist()
        return found

    @cached_property
    def before(self) -> Numbers:
        """The number in the first part of each of the shorter graph's tensors; its own if it is common.

        Those of the first part have -2, for any: what is before that part need not be like it.
        """
        before = np.array([*range(len(self.kept)), -1], np.int64)
        i, n = self.short_node, self.n_nodes
        before[i + n : i + 2 * n] -= n
        first, last = self.short_leafs
        before[last] = first
        before[first] = before[i : i + n] = -2
        return before

    @cached_property
    def short_leafs(self) -> list[list[int]]:
        """The parts' leafs in the shorter graph."""
        return [[self.origins[i] for i in self.leafs[k].tolist()] for k in (0, -1)]

    def nodes_like(self, number: int) -> Sequence[int]:
        """Return the numbers of the nodes that one of the shorter graph stands for, its own included."""
        i, n = number - self.short_node, self.n_nodes
        if 0 <= i < n:
            return range(self.node + i, self.gap[1], n)
        return (int(self.late[number]),) if i >= n else (self.kept[number],)

    def is_common(self, number: int) -> bool:
        """Whether all parts that read a tensor of the shorter graph read the same, not one each."""
        first, n = self.short_node, self.n_nodes
        return not first - n <= number < first + KEPT * n and bool(self.before[number] == number)

    def is_alike(self, *found: Sequence[Any]) -> bool:
        """Whether the same was found for both parts' tensors, by number in the shorter graph."""
        i, n = self.short_node, self.n_nodes
        first, last = self.short_leafs
        return all(
            x[i : i + n] == x[i + n : i + 2 * n] and [x[k] for k in first] == [x[k] for k in last]
            for x in found
        )

    def in_pairs(self) -> Repeats | None:
        """Return parts that are two of these each, but the last: results may take turns in two places.

        Returns:
            `None` if these are such, or none would be left out.
        """
        n_parts = (self.n_parts - 1) // 2
        if self.are_pairs or n_parts <= KEPT:
            return None
        leafs = self.leafs[: 2 * n_parts].reshape(n_parts, -1)
        return replace(self, n_nodes=2 * self.n_nodes, leafs=leafs, are_pairs=True)

    def window(self, order: Sequence[int]) -> tuple[int, int] | None:
        """Return where in an order of the shorter graph's nodes those of the last part come.

        They follow those of the first part, in the same order; so do those of all parts between them.

        Returns:
            The first and the end, equal if the order has no nodes of parts; `None` if it does not repeat.
        """
        parts = range(self.short_node, self.short_node + KEPT * self.n_nodes)
        places = [k for k, i in enumerate(order) if i in parts]
        if not places:
            return 0, 0
        half = len(places) // KEPT
        start, end = places[0] + half, places[-1] + 1
        after = [i - self.n_nodes for i in order[start:end]]
        return (start, end) if after == [*order[start - half : start]] else None

    def expand(self, order: Sequence[int]) -> list[int]:
        """Return the order of the graph's nodes, given one of the shorter graph's that repeats."""
        start, end = self.window(order) or (0, 0)
        numbers = np.array(order, np.int64)
        between = self.left_out(numbers[start:end]).ravel()
        parts = [self.early[numbers[:start]], between, self.late[numbers[start:]]]
        found: list[int] = np.concatenate(parts).tolist()
        return found

    @cached_property
    def late(self) -> Numbers:
        """What tensors of the shorter graph stand for in the last part and behind it, by number.

        There, tensors of the first part stand for those of the part before the last.
        """
        late = self.early.copy()
        late[self.short_node : self.short_node + self.n_nodes] += self.n_left_out * self.n_nodes
        late[self.short_leafs[0]] = self.leafs[-2]
        return late

    def left_out(self, numbers: Numbers) -> Numbers:
        """Return what the parts left out have or read where the last part does some tensors.

        Returns:
            Numbers, a row for each part.
        """
        return self._left_out[:, numbers]

    @cached_property
    def _left_out(self) -> Numbers:
        found = np.tile(self.early, (self.n_left_out, 1))
        first, n = self.short_node, self.n_nodes
        times = np.arange(self.n_left_out)[:, None]
        found[:, first : first + n] += times * n
        found[:, first + n : first + 2 * n] += (times - self.n_left_out) * n
        before, own = self.short_leafs
        found[:, before], found[:, own] = self.leafs[:-2], self.leafs[1:-1]
        return found


class RepeatedGraph(Graph):
    """A graph with equal parts, whose nodes are made when they are asked for: the shorter graph may do.

    Attributes:
        repeats: The parts.
        numbers: Numbers of the shorter graph's tensors.
        short_order: Numbers of its nodes, in order.
        window: Where those of the last part come in that order.
        buffers, offsets: By number in the whole graph, where tensors lie.
        make: Makes a graph of all nodes.
    """

    def __init__(
        self,
        short: Graph,
        repeats: Repeats,
        numbers: dict[Tensor | None, int],
        short_order: list[int],
        window: tuple[int, int],
        places: tuple[Sequence[Buffer | None], Sequence[int]],
        make: Callable[[], Graph],
    ) -> None:
        self._short = short
        self.repeats = repeats
        self.numbers = numbers
        self.short_order, self.window = short_order, window
        self.buffers, self.offsets = places
        self.make = make
        self._memory = short.memory().union([self.buffers[i] for i in repeats.leafs.ravel().tolist()])
        self.owner_checks = short.owner_checks

    @property
    def short(self) -> Graph:
        """The shorter graph."""
        return self._short

    def memory(self) -> set[Buffer | None]:
        """Return the buffers in which its tensors lie."""
        return self._memory

    def __len__(self) -> int:
        start, end = self.window
        return len(self.short_order) + self.repeats.n_left_out * (end - start)

    def __getattr__(self, name: str) -> Any:
        """Make the nodes."""
        made = self.make()
        for slot in ("nodes", "leafs", "whole", "marks", "_seen", "_grads", "_accs"):
            setattr(self, slot, getattr(made, slot))
        return getattr(made, name)
