"""Fusion: finds groups of nodes of a graph that one kernel may compute.

    graph ── fuse(graph, can_fuse) ──> [node, Group, node, ...]

A `Pattern` names nodes and how they connect. `fuse` finds its instances in a graph, and drops those that
would change results that others read. `can_fuse` says whether the backend has a kernel for a group. A
backend lowers a graph by

    for item in fuse(graph, can_fuse):        # can_fuse(group) -> bool: there is a kernel for these types
        launches += lower(item)               # a node or a Group

and, if the nodes of a group are far apart, the backend's `graph_optimize` first calls `gather(graph,
can_fuse)`, so that the allocator cannot reuse an operand's memory in between. A `Group` holds its nodes
by the pattern's names:

    ================  ====================================  ================================================
    pattern           parts                                 computes
    ================  ====================================  ================================================
    `norm`            [`add`] `norm` [`mul` [`shift`]]      `norm(x + b) * w + c`; `add` may be kept (below)
    `rope_set_rows`   `rope` `set_rows`                     rope, written to rows of a cache
    `mul_mat_add`     `mul_mat` `add`                       a product, plus a bias or a residual
    `mul_mat_unary`   `mul_mat` [`add`] `unary`             a function of a product, or of that plus a bias
    `glu`             `gate` [`gate_add`]                   a gated unit of two products of one operand; or,
                      [`up` [`up_add`]] `glu`               without `up`, of the halves of one product's rows
    ================  ====================================  ================================================

`group["norm"]` is a node, `"mul" in group` says whether it is present, `group.other("mul")` is its
operand from outside the group; `group.products` lists the products with their biases or residuals, in a
gated unit the activated one first. All results except the last are dropped, unless they are in `group.kept`:
the kernel must write these too. Each node keeps its own operands, params and memory.

Every group passed to `can_fuse` satisfies:

- A dropped result is float32, has no other readers in the whole graph (`Graph.use_counts`), is not
  flagged and not a view, and was placed by an allocator. Results placed by the user are always written.
- No result overlaps an operand, except at the same place with the same strides if the pattern is
  elementwise or row-wise (`IN_PLACE`): kernels must then work in place, like those of single nodes.
- Results do not overlap, and the group may be computed at the position of its last node.
- Outside operands of `add`, `mul` and `shift` have in each dimension the result's extent or 1. No tensor
  is empty. Other types are checked by `can_fuse`.

`GGMLB_FUSE=0` turns fusion off. Source: ggml_can_fuse and its callers; the conditions on memory are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

from ggmlb.backends.common.strided import Mem
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, BufferUsage, Op, TensorFlag
from ggmlb.core.graph import Graph
from ggmlb.core.placement import overlap, same_place
from ggmlb.core.tensor import Tensor
from ggmlb.system import env

Name = Literal["norm", "rope_set_rows", "mul_mat_add", "mul_mat_unary", "glu"]

IN_PLACE: Final = frozenset({"add", "norm", "mul", "shift", "set_rows", "gate_add", "up_add"})
"""Parts whose outside operands may have the same memory as a result of the group."""


@dataclass(frozen=True, slots=True)
class PatternNode:
    """A node of a fusion pattern, with its inputs.

    Attributes:
        name: Its name in the group.
        ops: The allowed ops.
        inputs: Parts whose results it reads, and the allowed operand indices of each.
        keepable: Whether its result may have other readers.
        by_views: Whether views are allowed between it and its inputs.
    """

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[tuple[PatternNode, tuple[int, ...]], ...] = ()
    keepable: bool = False
    by_views: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """A fusion pattern: a tree of nodes with root `last`, and a condition `fits` on matched groups."""

    name: Name
    last: PatternNode
    fits: Callable[[Group], bool]


class Product(NamedTuple):
    """A matrix product of a fused group; or, if one product computes gate and up rows, either half of it.

    Attributes:
        node: The product.
        added: The bias or residual added to it, if any.
        first: The first row of the weight, and first element of the bias, of the half.
    """

    node: Tensor
    added: Tensor | None
    first: int = 0


class Group:
    """A group of nodes that one kernel may compute.

    Attributes:
        pattern: The pattern's name.
        parts: The nodes by the names of their parts, in topological order.
        views: Views between them, without other readers.
        kept: Results that must be written in addition to the last.
        nodes: The nodes in that order.
        result: The last node.
        outside: For each part, its operands that no node of the group computes.
        reads: All of them, each with whether it may have the same place as a result.
    """

    __slots__ = ("kept", "nodes", "outside", "parts", "pattern", "reads", "result", "views")

    def __init__(
        self,
        pattern: Name,
        parts: dict[str, Tensor],
        views: tuple[Tensor, ...] = (),
        kept: tuple[Tensor, ...] = (),
    ) -> None:
        self.pattern: Name = pattern
        self.parts = parts
        self.views = views
        self.kept = kept
        self.nodes = nodes = tuple(parts.values())
        self.result = nodes[-1]
        inside = {None, *nodes, *views}
        self.outside: dict[str, tuple[Tensor, ...]] = {
            part: tuple([s for s in node.src if s is not None and s not in inside])
            for part, node in parts.items()
        }
        self.reads = [(t, part in IN_PLACE) for part, operands in self.outside.items() for t in operands]

    def other(self, part: str) -> Tensor:
        """Return the operand of a part (a named node) from outside the group; there must be exactly one."""
        (tensor,) = self.outside[part]
        return tensor

    @property
    def products(self) -> list[Product]:
        """The matrix products of the group; for a gated unit the activated one (gate), then the other."""
        if self.pattern != "glu":
            return [Product(self["mul_mat"], self.other("add") if "add" in self else None)]

        def half(part: str, first: int = 0) -> Product:
            return Product(self[part], self.other(f"{part}_add") if f"{part}_add" in self else None, first)

        if "up" in self:
            return [half("gate"), half("up")]
        halves = [half("gate"), half("gate", self.result.ne[0])]
        return halves[::-1] if self["glu"].params["swapped"] else halves

    def __getitem__(self, part: str) -> Tensor:
        return self.parts[part]

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def __repr__(self) -> str:
        return f"<Group {self.pattern}: {', '.join(f'{k}={n.describe()}' for k, n in self.parts.items())}>"


Item: TypeAlias = Tensor | Group
"""A node or a group of fused nodes."""


def _tiles(part: str) -> Callable[[Group], bool]:
    """Return the condition that a part's outside operand is broadcast by extents of 1, if at all."""

    def tiles(group: Group) -> bool:
        node = group.parts.get(part)
        if node is None:
            return True
        ne, others = node.ne, group.outside[part]
        inner = next((s for s in node.src if s in group.nodes), node.src[0])
        if inner is None or inner.ne != ne or not (len(others) == 1 or inner in others):
            return False
        for other in others:
            if other.ne != ne:
                for n, m in zip(other.ne, ne, strict=True):
                    if n != m and n != 1:
                        return False
        return True

    return tiles


def _all(*conditions: Callable[[Group], bool]) -> Callable[[Group], bool]:
    return lambda group: all([condition(group) for condition in conditions])


def _same_operand(group: Group) -> bool:
    """Whether all products read one operand, with weights of equal type, shape and packing."""
    if "up" not in group:
        return all(s is None for s in group["glu"].src[1:])
    (w, x), (v, y) = group["gate"].sources, group["up"].sources
    if x is not y or (w.dtype, w.ne, w.nb) != (v.dtype, v.ne, v.nb):
        return False
    return Mem.of(w).packing == Mem.of(v).packing


def _rows_of_heads(group: Group) -> bool:
    """Whether each written row consists of all heads of a token, in order."""
    rope, rows = group["rope"], group["set_rows"].sources[0]
    return (
        rope.is_contiguous()
        and rows.is_contiguous()
        and rows.view_offs == rope.view_offs
        and rows.ne == (rope.ne[0] * rope.ne[1], rope.ne[2], rope.ne[3], 1)
    )


def _norm(*, add: bool, mul: bool, shift: bool) -> Pattern:
    sum_ = PatternNode("add", (Op.ADD,), keepable=True)
    last = PatternNode("norm", (Op.NORM, Op.RMS_NORM), ((sum_, (0,)),) if add else ())
    if mul:
        last = PatternNode("mul", (Op.MUL,), ((last, (0, 1)),))
    if shift:
        last = PatternNode("shift", (Op.ADD,), ((last, (0, 1)),))
    return Pattern("norm", last, _all(_tiles("add"), _tiles("mul"), _tiles("shift")))


def _product(name: str, added: str | None) -> PatternNode:
    product = PatternNode(name, (Op.MUL_MAT,))
    return PatternNode(added, (Op.ADD,), ((product, (0, 1)),)) if added else product


def _glu(*, add: bool, split: bool) -> Pattern:
    inputs = [(_product("gate", "gate_add" if add else None), (0,))]
    if split:
        inputs.append((_product("up", "up_add" if add else None), (1,)))
    fits = _all(_same_operand, _tiles("gate_add"), _tiles("up_add"))
    return Pattern("glu", PatternNode("glu", (Op.GLU,), tuple(inputs)), fits)


PATTERNS: Final[tuple[Pattern, ...]] = (
    _norm(add=True, mul=True, shift=True),
    _norm(add=False, mul=True, shift=True),
    _norm(add=True, mul=True, shift=False),
    _norm(add=False, mul=True, shift=False),
    _norm(add=True, mul=False, shift=False),
    Pattern(
        "rope_set_rows",
        PatternNode("set_rows", (Op.SET_ROWS,), ((PatternNode("rope", (Op.ROPE,)), (0,)),), by_views=True),
        _rows_of_heads,
    ),
    _glu(add=True, split=True),
    _glu(add=False, split=True),
    _glu(add=True, split=False),
    _glu(add=False, split=False),
    Pattern("mul_mat_add", _product("mul_mat", "add"), _tiles("add")),
    *(
        Pattern(
            "mul_mat_unary",
            PatternNode("unary", (Op.UNARY,), ((_product("mul_mat", added), (0,)),)),
            _tiles("add"),
        )
        for added in ("add", None)
    ),
)
"""The patterns in the order of matching: of two with the same last node, the longer first."""


# -- search ----------------------------------------------------------------------------------------

CanFuse = Callable[[Group], bool]
"""Whether a backend has a kernel for a group."""

_NEEDED = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS
_LAST = frozenset(op for pattern in PATTERNS for op in pattern.last.ops)


def fuse(graph: Graph, can_fuse: CanFuse, *, by_place: bool = True) -> list[Tensor | Group]:
    """Return the graph's nodes in topological order, with nodes that one kernel computes joined to groups.

    A group has the position of its last node. A node is in at most one group.

    Args:
        graph: A graph, or a view of one (`Graph.view`).
        can_fuse: Whether the backend has a kernel for a fusable group.
        by_place: Whether `can_fuse` depends on the tensors' memory.
    """
    if len(graph) < 2 or not env.flag("GGMLB_FUSE", default=True):
        return list(graph.nodes)
    groups = _Finder(graph, can_fuse, by_place).groups()
    ends = {group.result: group for group in groups}
    inner = {node for group in groups for node in group.nodes}
    return [ends.get(node, node) for node in graph.nodes if node in ends or node not in inner]


def gather(graph: Graph, can_fuse: CanFuse) -> None:
    """Reorder a graph so that the nodes of each group that `fuse` finds stand together, at its last node.

    Views without an op are inserted after a group, so that the allocator keeps its operands until its
    result is placed. The groups are saved in `graph.marks`: a plan only checks whether they are valid.
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
            owners[node] = owners[node.src[0]]  # a view comes after its source
        if node in owners:
            waiting[owners[node].result].append(node)
        else:
            ordered.append(node)
        if node in needed:
            ordered += needed[node]
    graph.nodes = ordered


def _to_be_placed(group: Group) -> list[Tensor]:
    """Return the operands without memory that no result may overlap."""
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
        if self._marks:  # gather has searched all nodes: there are no other groups
            return [
                group
                for group in self._marks.values()
                if isinstance(group, Group) and self._still_fits(group)
            ]
        found: list[Group] = []
        for node in reversed(self._nodes):  # later nodes match first: a residual joins the norm
            if node.op not in _LAST:
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
        """Whether a group found before its nodes were allocated is still valid."""
        places, kept = self._places, group.kept
        for node in group.nodes:
            if node not in places or not (node is group.result or node in kept or self._may_drop(node)):
                return False
        if any([self._uses[view] != 1 for view in group.views]):
            return False
        return self._is_safe(group) and (not self._by_place or self._can_fuse(group))

    def _find(self, part: PatternNode, node: Tensor, parts: dict[str, Tensor], views: list[Tensor]) -> bool:
        """Add a part and its inputs in order; return whether they match (or `parts` is invalid)."""
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
            buffer, start, end = result.buffer, result.offset, result.offset + result.nbytes
            for other in written[:i]:
                if overlap(result, other):
                    return False
            for operand, may_be_in_place in group.reads:
                if buffer is not None and operand.buffer is not None:  # as `overlap`, without a call
                    at = operand.offset
                    meet = operand.buffer is buffer and at < end and start < at + operand.nbytes
                else:
                    meet = (operand.view_src or operand) is (result.view_src or result)
                if meet and not (may_be_in_place and same_place(result, operand)):
                    return False
        return self._may_wait(group)

    def _may_wait(self, group: Group) -> bool:
        """Whether all nodes can be computed as late as the group's last node."""
        nodes, places = self._nodes, self._places
        start, end = min([places[node] for node in group.nodes]), places[group.result]
        if end - start == len(group.nodes) - 1:
            return True
        inside = {*group.nodes, *group.views}
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
