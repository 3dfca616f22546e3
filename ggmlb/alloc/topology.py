"""Topology: what the allocation of a graph depends on besides sizes, as lists of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.enums import BufferUsage, TensorFlag
from ggmlb.errors import FreedError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ggmlb.graph import Graph
    from ggmlb.interface import Buffer
    from ggmlb.tensor import Tensor

TopologyKey = tuple[Any, ...]


class Topology:
    """A graph whose tensors are numbers: leafs first, then nodes, then what they need unlisted.

    Attributes:
        tensors: By number.
        listed: Numbers of the graph's leafs and nodes; a tensor may be listed twice.
        n_leafs: How many of `listed` are leafs.
        ops: By number.
        flags: By number.
        bases: Number of the tensor in whose memory each view lies; -1 for what is no view.
        sources: For all nodes, one after another, the numbers of their sources; -1 for an absent one.
        n_sources: How many of `sources` belong to each node.
        outside: Whether each, no view, lies in a buffer that is not the allocator's; empty if none does.
        unlisted: Numbers of the tensors that are needed, as a source or as the base of a view, but not
            listed. They hold data from outside, like leafs.
        n_distinct: How many numbers are listed.
        users: For each of `unlisted`, the number of a listed tensor that needs it.
        key: All of the above but `tensors`: graphs with equal keys can be allocated alike, sizes apart.
    """

    __slots__ = (
        "bases",
        "flags",
        "key",
        "listed",
        "n_distinct",
        "n_leafs",
        "n_sources",
        "ops",
        "outside",
        "sources",
        "tensors",
        "unlisted",
        "users",
    )

    def __init__(self, graph: Graph, own: Collection[Buffer], keep_inputs: bool = False) -> None:
        """Read a graph.

        Args:
            graph: Its lists are read, nothing is changed.
            own: The buffers that the allocator may give out anew.
            keep_inputs: Flag inputs as outputs, too.

        Raises:
            FreedError: A tensor lies in a freed buffer of the user's.
        """
        leafs, nodes = graph.leafs, graph.nodes
        listed = [*leafs, *nodes]
        self.n_leafs = len(leafs)
        self.listed: Sequence[int] = range(len(listed))
        self.tensors = tensors = listed
        ids: dict[Tensor | None, int] = dict(zip(listed, self.listed, strict=True))
        if len(ids) < len(listed):
            self.tensors = tensors = list(dict.fromkeys(listed))
            ids = {t: i for i, t in enumerate(tensors)}
            self.listed = [ids[t] for t in listed]
        ids[None] = -1
        self.users: list[int] = []
        try:
            self.sources = [ids[s] for t in nodes for s in t.src]
            self.bases = [ids[t.view_src] for t in tensors]
        except KeyError:
            self._add_unlisted(ids, nodes)
            self.sources = [ids[s] for t in nodes for s in t.src]
            self.bases = [ids[t.view_src] for t in tensors]
        self.n_distinct = len(tensors) - len(self.users)
        self.unlisted = range(self.n_distinct, len(tensors))
        self.n_sources = [len(t.src) for t in nodes]
        self.ops = [t.op for t in tensors]
        self.flags = [t.flags for t in tensors]
        if keep_inputs:
            self.flags = [f | TensorFlag.OUTPUT if f & TensorFlag.INPUT else f for f in self.flags]
        buffers = [t.buffer for t in tensors]
        foreign = {b for b in set(buffers).difference(own) if b is not None and not _is_void(b)}
        self.outside: list[bool] = []
        if foreign:  # a view is where its base is, or will be
            self.outside = [base < 0 and b in foreign for base, b in zip(self.bases, buffers, strict=True)]
        if any(b.is_freed for b in foreign):
            self._check_freed()
        self.key: TopologyKey = (
            self.n_leafs,
            self.listed,
            self.n_sources,
            self.sources,
            self.bases,
            self.ops,
            self.flags,
            self.outside,
        )

    def placeable(self) -> list[bool]:
        """For each tensor, whether it needs a place: it is no view, and does not lie elsewhere."""
        if not self.outside:
            return [base < 0 for base in self.bases]
        return [base < 0 and not outside for base, outside in zip(self.bases, self.outside, strict=True)]

    def _add_unlisted(self, ids: dict[Tensor | None, int], nodes: Sequence[Tensor]) -> None:
        tensors, users = self.tensors, self.users
        n_listed = len(tensors)
        for node, number in zip(nodes, self.listed[self.n_leafs :], strict=True):
            for source in node.src:
                if source not in ids:
                    ids[source] = len(tensors)
                    tensors.append(source)  # type: ignore[arg-type]
                    users.append(number)
        for number, tensor in enumerate(tensors):  # which grows
            base = tensor.view_src
            if base not in ids:
                ids[base] = len(tensors)
                tensors.append(base)  # type: ignore[arg-type]
                users.append(number if number < n_listed else users[number - n_listed])

    def _check_freed(self) -> None:
        for tensor, placeable in zip(self.tensors, self.placeable(), strict=True):
            buffer = tensor.buffer
            if buffer is not None and buffer.is_freed and tensor.view_src is None and not placeable:
                raise FreedError(
                    f"{tensor.describe()} lies in a {buffer.name} buffer of {buffer.size:,} bytes that "
                    "was freed; place it anew before the graph is allocated"
                )


def _is_void(buffer: Buffer) -> bool:
    """Whether the buffer is freed memory of an allocator: what lay there is to be placed anew."""
    return buffer.is_freed and buffer.usage is BufferUsage.COMPUTE
