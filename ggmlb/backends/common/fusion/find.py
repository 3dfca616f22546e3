"""Finds the fusable groups of a graph, and moves their nodes together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, cached_property

from ggmlb.backends.common.fusion.group import IN_PLACE, PATTERNS, Group, Pattern, PatternNode
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, BufferUsage, Op, TensorFlag
from ggmlb.core.graph import Graph
from ggmlb.core.placement import overlap, same_place
from ggmlb.core.tensor import Tensor
from ggmlb.system import env

CanFuse = Callable[["Group"], bool]
"""Whether a backend has a kernel for a group."""

_NEEDED = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS
_LAST = frozenset(op for pattern in PATTERNS for op in pattern.last.ops)


def fuse(graph: Graph, can_fuse: CanFuse, *, by_place: bool = True) -> list[Tensor | Group]:
    """Return the nodes and groups of a graph in a computable order.

    A group has the position of its last node. A node is in at most one group.

    Args:
        graph: A graph, or a view of one (`Graph.view`).
        can_fuse: Whether the backend has a kernel for a fusable group.
        by_place: Whether `can_fuse` asks where tensors lie.
    """
    if len(graph) < 2 or not env.flag("GGMLB_FUSE", default=True):
        return list(graph.nodes)
    groups = _Finder(graph, can_fuse, by_place).groups()
    ends = {group.result: group for group in groups}
    inner = {node for group in groups for node in group.nodes}
    return [ends.get(node, node) for node in graph.nodes if node in ends or node not in inner]


def gather(graph: Graph, can_fuse: CanFuse) -> None:
    """Move the nodes of each group found by `fuse` to its last node; for `Backend.graph_optimize`.

    Views without an op are inserted after a group, so that the allocator keeps its operands until its
    result is placed. The groups are marks of the graph, by their results: an owner's plan only asks whether
    they still fit.
    """
    owners: dict[Tensor, Group] = {}
    waiting: dict[Tensor, list[Tensor]] = {}
    needed: dict[Tensor, list[Tensor]] = {}
    for item in fuse(graph, can_fuse):
        if isinstance(item, Group):
            graph.marks[item.result] = item
            waiting[item.result] = []
            needed[item.result] = [_view_of(t) for t in _to_be_placed(item)]
            owners.update(dict.fromkeys(item.nodes[:-1], item))
    ordered: list[Tensor] = []
    for node in graph.nodes:
        if node in waiting:
            ordered += waiting[node]
            for member in waiting.pop(node):
                del owners[member]
        elif node.op in NO_OPS and node.view_src is not None and node.src[0] in owners:
            owners[node] = owners[node.src[0]]  # a view comes after what it views
        if node in owners:
            waiting[owners[node].result].append(node)
        else:
            ordered.append(node)
        if node in needed:
            ordered += needed[node]
    graph.nodes = ordered


def _to_be_placed(group: Group) -> list[Tensor]:
    """Return the unplaced operands that no result may overlap."""
    operands = [t for part in group.parts if part not in IN_PLACE for t in group.outside[part]]
    return [t for t in dict.fromkeys(operands) if t.buffer is None]


def _view_of(tensor: Tensor) -> Tensor:
    name = f"{tensor.name} (needed)"
    return Tensor(tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=name)


class _Finder:
    """Finds the groups of one graph."""

    def __init__(self, graph: Graph, can_fuse: CanFuse, by_place: bool) -> None:
        self._graph = graph
        self._nodes = graph.nodes
        self._places = {node: i for i, node in enumerate(graph.nodes)}
        self._can_fuse = can_fuse
        self._by_place = by_place
        self._marks = graph.marks if graph.owner_checks else {}
        self._taken: set[Tensor] = set()

    @cached_property
    def _uses(self) -> Counter[Tensor]:
        return self._graph.use_counts()

    def groups(self) -> list[Group]:
        found: list[Group] = []
        for node in reversed(self._nodes):  # the last node has the choice: a residual goes to the norm
            if node.op not in _LAST:
                continue
            if self._marks:  # no other group was found where all were looked for
                known = self._marks.get(node)
                if isinstance(known, Group) and self._still_fits(known):
                    self._taken.update(known.nodes)
                    found.append(known)
                continue
            for pattern in _patterns(node.op, *[None if s is None else s.op for s in node.src]):
                group = self._match(pattern, node)
                if (
                    group is not None
                    and pattern.fits(group)
                    and self._is_safe(group)
                    and self._can_fuse(group)
                ):
                    self._taken.update(group.nodes)
                    found.append(group)
                    break
        return found

    # -- structure -----------------------------------------------------------------------------

    def _match(self, pattern: Pattern, node: Tensor) -> Group | None:
        parts: dict[str, Tensor] = {}
        views: list[Tensor] = []
        if not self._find(pattern.last, node, parts, views):
            return None
        kept = [t for t in parts.values() if t is not node and not self._may_drop(t)]
        return Group(pattern.name, parts, tuple(views), tuple(kept))

    def _still_fits(self, group: Group) -> bool:
        """Whether a group that was found before the nodes had a place is one still."""
        if any([node in self._taken or node not in self._places for node in group.nodes]):
            return False
        kept = [node for node in group.nodes[:-1] if not self._may_drop(node)]
        is_seen = any([self._uses[view] != 1 for view in group.views])
        if is_seen or kept != [*group.kept] or not self._is_safe(group):
            return False
        return not self._by_place or self._can_fuse(group)

    def _find(self, part: PatternNode, node: Tensor, parts: dict[str, Tensor], views: list[Tensor]) -> bool:
        """Add a part and its inputs in computing order; return whether they match (or `parts` is invalid)."""
        if node not in self._places or node in self._taken or 0 in node.ne or node in parts.values():
            return False
        for inner, operands in part.inputs:
            for i in operands:
                if self._find_input(part, inner, node, i, parts, views):
                    break
            else:
                return False
        parts[part.name] = node
        return True

    def _find_input(
        self,
        part: PatternNode,
        inner: PatternNode,
        node: Tensor,
        i: int,
        parts: dict[str, Tensor],
        views: list[Tensor],
    ) -> bool:
        source = node.src[i] if i < len(node.src) else None
        between = []
        while part.by_views and source is not None and source.op in NO_OPS and source.src:
            if self._uses[source] != 1 or source.flags & _NEEDED:
                return False
            between.append(source)
            source = source.src[0]
        if source is None or source.op not in inner.ops or source.dtype is not DType.F32:
            return False
        if not (inner.keepable or self._may_drop(source)):
            return False
        views += between
        return self._find(inner, source, parts, views)

    def _may_drop(self, node: Tensor) -> bool:
        return (
            self._uses[node] == 1
            and not node.flags & _NEEDED
            and node.view_src is None
            and (node.buffer is None or node.buffer.usage is BufferUsage.COMPUTE)
        )

    # -- memory --------------------------------------------------------------------------------

    def _is_safe(self, group: Group) -> bool:
        """Whether one kernel at the last node's position reads and writes the same values as the nodes."""
        written = (*group.kept, group.result)
        for i, result in enumerate(written):
            for other in written[:i]:
                if overlap(result, other):
                    return False
            for part, operands in group.outside.items():
                for operand in operands:
                    if overlap(result, operand) and not (part in IN_PLACE and same_place(result, operand)):
                        return False
        return self._may_wait(group)

    def _may_wait(self, group: Group) -> bool:
        """Whether all nodes can be computed as late as the group's last node."""
        nodes, places = self._nodes, self._places
        inside = {*group.nodes, *group.views}
        start, end = min([places[node] for node in group.nodes]), places[group.result]
        between = [i for i in range(start + 1, end) if nodes[i].op not in NO_OPS and nodes[i] not in inside]
        for part, node in group.parts.items() if between else ():
            kept = node in group.kept
            for i in between:
                other = nodes[i]
                if i < places[node] or node is group.result:
                    continue
                for operand in group.outside[part]:
                    if overlap(other, operand):
                        return False
                if kept and any(overlap(t, node) for t in (other, *other.src) if t is not None):
                    return False
        return True


@cache
def _patterns(op: Op, *sources: Op | None) -> tuple[Pattern, ...]:
    """Return the patterns that may end at a node, by its op and those of its sources."""

    def may_read(part: PatternNode, inner: PatternNode, i: int) -> bool:
        source = sources[i] if i < len(sources) else None
        return source in inner.ops or (part.by_views and source in NO_OPS)

    return tuple(
        pattern
        for pattern in PATTERNS
        if op in pattern.last.ops
        and all(any(may_read(pattern.last, inner, i) for i in read) for inner, read in pattern.last.inputs)
    )
