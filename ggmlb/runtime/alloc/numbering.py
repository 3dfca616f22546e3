"""Numbering: the tensors of a graph as numbers, and its edges as lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor


class Numbering:
    """A graph whose tensors are numbers: leafs first, then nodes, then what they need unlisted.

    Attributes:
        tensors: By number.
        numbers: Number of each tensor; -1 for `None`, an absent one.
        listed: Numbers of the graph's leafs and nodes; a tensor may be listed twice.
        n_leafs: How many of `listed` are leafs.
        sources: For all nodes, one after another, the numbers of their sources; -1 for an absent one.
        n_sources: How many of `sources` belong to each node.
        bases: Number of the tensor in whose memory each view lies; -1 for what is no view.
        users: For each tensor that is needed, as a source or as the base of a view, but not listed: the
            number of a listed one that needs it.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.n_leafs = len(graph.leafs)
        self.tensors: Sequence[Tensor] = [*graph.leafs, *nodes]
        self.listed: Sequence[int] = range(len(self.tensors))
        numbers: dict[Tensor | None, int] = dict(zip(self.tensors, self.listed, strict=True))
        if len(numbers) < len(self.tensors):
            listed = self.tensors
            self.tensors = list(dict.fromkeys(listed))
            numbers = {t: i for i, t in enumerate(self.tensors)}
            self.listed = [numbers[t] for t in listed]
        numbers[None] = -1
        self.numbers = numbers
        self.users: list[int] = []
        try:
            self.sources = [numbers[s] for t in nodes for s in t.src]
            self.bases = [numbers[t.view_src] for t in self.tensors]
        except KeyError:
            self._add_unlisted(nodes)
            self.sources = [numbers[s] for t in nodes for s in t.src]
            self.bases = [numbers[t.view_src] for t in self.tensors]
        self.n_sources = [len(t.src) for t in nodes]

    @cached_property
    def views(self) -> list[int]:
        """Numbers of the views."""
        return [i for i, base in enumerate(self.bases) if base >= 0]

    @property
    def nodes(self) -> Sequence[int]:
        """Numbers of the graph's nodes, in order."""
        return self.listed[self.n_leafs :]

    @property
    def unlisted(self) -> Sequence[int]:
        """Numbers of the tensors that are needed, but not listed."""
        return range(self.n_distinct, len(self.tensors))

    @property
    def n_distinct(self) -> int:
        """How many tensors are listed."""
        return len(self.tensors) - len(self.users)

    def _add_unlisted(self, nodes: Sequence[Tensor]) -> None:
        numbers, users = self.numbers, self.users
        tensors = self.tensors = list(self.tensors)
        n_distinct = len(tensors)
        for node in nodes:
            for source in node.src:
                if source is not None and source not in numbers:
                    numbers[source] = len(tensors)
                    tensors.append(source)
                    users.append(numbers[node])
        for number, tensor in enumerate(tensors):  # which grows
            base = tensor.view_src
            if base is not None and base not in numbers:
                numbers[base] = len(tensors)
                tensors.append(base)
                users.append(number if number < n_distinct else users[number - n_distinct])
