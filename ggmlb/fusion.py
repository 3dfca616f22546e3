"""Fusion: which neighbouring nodes of a graph one kernel may compute at once.

    graph ── fuse(graph, takes) ──> [node, Group, node, ...]

A `Pattern` names nodes and how they connect. `fuse` finds its instances in a graph, and drops those that
would change what anybody can see. A backend says which of the rest it has a kernel for. So lowering is

    for item in fuse(graph, takes):        # takes(group) -> bool: there is a kernel for these types
        launches += lower_group(item) if isinstance(item, Group) else lower(item)

and, where the nodes of a group stand far apart, the backend's `graph_optimize` first calls
`gather(graph, takes)`, so that the allocator cannot reuse an operand's memory in between. A `Group` holds
its nodes by the names that the pattern gives them:

    ================  ====================================  ================================================
    pattern           parts                                 computes
    ================  ====================================  ================================================
    `norm`            [`add`] `norm` [`mul` [`shift`]]      `norm(x + b) * w + c`; `add` may be kept (below)
    `rope_set_rows`   `rope` `set_rows`                     rope, written to rows of a cache
    `mul_mat_add`     `mul_mat` `add`                       a product, plus a bias or a residual
    `glu`             `gate` [`gate_add`]                   a gated unit of two products of one operand; or,
                      [`up` [`up_add`]] `glu`               without `up`, of the halves of one product's rows
    ================  ====================================  ================================================

`group["norm"]` is a node, `"mul" in group` tells whether it is there, `group.other("mul")` is the operand
that comes from outside. All results but the last are dropped, unless they are in `group.kept`: the kernel
must write these too. Each node keeps its own operands, params and place, so a backend reads the rest there.

What holds for every group that `takes` is asked about:

- What is dropped is a float32 result that nothing else in the whole graph reads (`Graph.use_counts`), that is
  not flagged, is no view, and lies in memory that an allocator placed. What a user placed is always written.
- No result lies over an operand, except exactly, with the same strides, where the pattern reads and writes
  element by element or row by row (`IN_PLACE`): kernels must work so, as those of single nodes do.
- Results do not overlap, and the group may be computed where its last node stands.
- Operands of `add`, `mul` and `shift` from outside have in each dimension as many elements as the result, or
  one. Nothing is empty. Types are not looked at otherwise: `takes` does.

`GGMLB_FUSE=0` turns fusion off. Source: ggml_can_fuse and its users; the conditions on memory are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

from ggmlb import env
from ggmlb.dtypes import DType
from ggmlb.enums import NO_OPS, BufferUsage, Op, TensorFlag
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from collections import Counter

    from ggmlb.graph import Graph

Name = Literal["norm", "rope_set_rows", "mul_mat_add", "glu"]

Takes = Callable[["Group"], bool]
"""Says whether a backend computes a group."""

IN_PLACE: Final = frozenset({"add", "norm", "mul", "shift", "set_rows", "gate_add", "up_add"})
"""Parts whose operands from outside may lie exactly where a result of the group does."""


@dataclass(frozen=True, slots=True)
class Part:
    """A node of a pattern.

    Attributes:
        name: What the group calls it.
        ops: What it may be.
        inputs: Parts whose results it takes, and at which operands each may stand.
        keepable: Its result may be needed elsewhere too.
        by_views: Views may lie between it and what it takes.
    """

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[tuple[Part, tuple[int, ...]], ...] = ()
    keepable: bool = False
    by_views: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """A tree of parts, told by its last, and what else must hold."""

    name: Name
    last: Part
    fits: Callable[[Group], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Nodes that one kernel may compute.

    Attributes:
        pattern: The pattern's name.
        parts: The nodes by the names of their parts.
        views: Views between them, none of which anybody else reads.
        kept: Results that must be written besides the last.
    """

    pattern: Name
    parts: dict[str, Tensor]
    views: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()

    @property
    def result(self) -> Tensor:
        """The last node."""
        return self.parts[next(reversed(self.parts))]

    @property
    def nodes(self) -> tuple[Tensor, ...]:
        """The nodes, each after those that it reads."""
        return tuple(self.parts.values())

    def outside(self, part: str) -> tuple[Tensor, ...]:
        """Return the operands of a part that no node of the group computes."""
        inside = {*self.parts.values(), *self.views}
        return tuple(s for s in self.parts[part].src if s is not None and s not in inside)

    def other(self, part: str) -> Tensor:
        """Return the one operand of a part that no node of the group computes."""
        (tensor,) = self.outside(part)
        return tensor

    def __getitem__(self, part: str) -> Tensor:
        return self.parts[part]

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def __repr__(self) -> str:
        return f"<Group {self.pattern}: {', '.join(f'{k}={n.describe()}' for k, n in self.parts.items())}>"


# -- the table ---------------------------------------------------------------------------------


def _tiles(part: str) -> Callable[[Group], bool]:
    """Make the condition that a part adds or multiplies by a tensor whose extents are its own, or 1."""

    def tiles(group: Group) -> bool:
        if part not in group:
            return True
        node = group[part]
        inner = next((s for s in node.src if s in group.parts.values()), node.src[0])
        others = group.outside(part)
        return (
            inner is not None
            and inner.ne == node.ne
            and (len(others) == 1 or inner in others)
            and all(a == b or a == 1 for s in others for a, b in zip(s.ne, node.ne, strict=True))
        )

    return tiles


def _all(*conditions: Callable[[Group], bool]) -> Callable[[Group], bool]:
    return lambda group: all(condition(group) for condition in conditions)


def _same_operand(group: Group) -> bool:
    """Whether both products are of one operand, with weights of one type and shape; or there is but one."""
    if "up" not in group:
        return all(s is None for s in group["glu"].src[1:])
    (w, x), (v, y) = group["gate"].src, group["up"].src
    assert w is not None and v is not None
    return x is y and (w.dtype, w.ne, w.nb) == (v.dtype, v.ne, v.nb)


def _rows_of_heads(group: Group) -> bool:
    """Whether a row that is written is all heads of a token, in order."""
    rope, rows = group["rope"], group["set_rows"].src[0]
    assert rows is not None
    return (
        rope.is_contiguous()
        and rows.is_contiguous()
        and rows.view_offs == rope.view_offs
        and rows.ne == (rope.ne[0] * rope.ne[1], rope.ne[2], rope.ne[3], 1)
    )


def _norm(*, add: bool, mul: bool, shift: bool) -> Pattern:
    sum_ = Part("add", (Op.ADD,), keepable=True)
    last = Part("norm", (Op.NORM, Op.RMS_NORM), ((sum_, (0,)),) if add else ())
    if mul:
        last = Part("mul", (Op.MUL,), ((last, (0, 1)),))
    if shift:
        last = Part("shift", (Op.ADD,), ((last, (0, 1)),))
    return Pattern("norm", last, _all(_tiles("add"), _tiles("mul"), _tiles("shift")))


def _product(name: str, added: str | None) -> Part:
    product = Part(name, (Op.MUL_MAT,))
    return Part(added, (Op.ADD,), ((product, (0, 1)),)) if added else product


def _glu(*, add: bool, split: bool) -> Pattern:
    inputs = [(_product("gate", "gate_add" if add else None), (0,))]
    if split:
        inputs.append((_product("up", "up_add" if add else None), (1,)))
    fits = _all(_same_operand, _tiles("gate_add"), _tiles("up_add"))
    return Pattern("glu", Part("glu", (Op.GLU,), tuple(inputs)), fits)


PATTERNS: Final[tuple[Pattern, ...]] = (
    _norm(add=True, mul=True, shift=True),
    _norm(add=False, mul=True, shift=True),
    _norm(add=True, mul=True, shift=False),
    _norm(add=False, mul=True, shift=False),
    _norm(add=True, mul=False, shift=False),
    Pattern(
        "rope_set_rows",
        Part("set_rows", (Op.SET_ROWS,), ((Part("rope", (Op.ROPE,)), (0,)),), by_views=True),
        _rows_of_heads,
    ),
    _glu(add=True, split=True),
    _glu(add=False, split=True),
    _glu(add=True, split=False),
    _glu(add=False, split=False),
    Pattern("mul_mat_add", _product("mul_mat", "add"), _tiles("add")),
)
"""In the order in which they are tried: of two that end at one node, the longer first."""


# -- finding -----------------------------------------------------------------------------------


def fuse(graph: Graph, takes: Takes) -> list[Tensor | Group]:
    """Return the nodes of a graph, some of them in groups, in an order in which they can be computed.

    A group stands where its last node stood. A node is in one group at most.

    Args:
        graph: A graph, or a part of one that knows its whole (`Graph.view`).
        takes: The backend's answer, for groups that may be fused.
    """
    if len(graph) < 2 or not env.fuse():
        return list(graph.nodes)
    groups = _Finder(graph, takes).groups()
    ends = {group.result: group for group in groups}
    inner = {node for group in groups for node in group.nodes}
    return [ends.get(node, node) for node in graph.nodes if node in ends or node not in inner]


def gather(graph: Graph, takes: Takes) -> None:
    """Move the nodes of each group that `fuse` finds to its last node; for `Backend.graph_optimize`.

    Views without an op follow a group, so that the allocator keeps its operands until its result has a place.
    """
    owners: dict[Tensor, Group] = {}
    waiting: dict[Tensor, list[Tensor]] = {}
    needed: dict[Tensor, list[Tensor]] = {}
    for item in fuse(graph, takes):
        if isinstance(item, Group):
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
    """Return the operands that no result may overlap, and that have no place yet."""
    operands = [t for part in group.parts if part not in IN_PLACE for t in group.outside(part)]
    return [t for t in dict.fromkeys(operands) if t.buffer is None]


def _view_of(tensor: Tensor) -> Tensor:
    name = f"{tensor.name} (needed)"
    return Tensor(tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=name)


class _Finder:
    """Finds the groups of one graph."""

    def __init__(self, graph: Graph, takes: Takes) -> None:
        self._graph = graph
        self._nodes = graph.nodes
        self._places = {node: i for i, node in enumerate(graph.nodes)}
        self._takes = takes
        self._taken: set[Tensor] = set()

    @cached_property
    def _uses(self) -> Counter[Tensor]:
        return self._graph.use_counts()

    def groups(self) -> list[Group]:
        found: list[Group] = []
        for node in reversed(self._nodes):  # the last node has the choice: a residual goes to the norm
            for pattern in _BY_OP.get(node.op, ()):
                group = self._match(pattern, node)
                if group is not None and pattern.fits(group) and self._is_safe(group) and self._takes(group):
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
        kept = tuple(t for t in parts.values() if t is not node and not self._may_drop(t))
        return Group(pattern.name, parts, tuple(views), kept)

    def _find(self, part: Part, node: Tensor, parts: dict[str, Tensor], views: list[Tensor]) -> bool:
        """Add a part and what it takes, in the order of computing; `parts` is of no use where it fails."""
        if (
            node.op not in part.ops
            or node not in self._places
            or node in self._taken
            or node.is_empty
            or node in parts.values()
        ):
            return False
        for inner, operands in part.inputs:
            if not any(self._find_input(part, inner, node, i, parts, views) for i in operands):
                return False
        parts[part.name] = node
        return True

    def _find_input(
        self, part: Part, inner: Part, node: Tensor, i: int, parts: dict[str, Tensor], views: list[Tensor]
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
        """Whether one kernel, run where the last node stands, reads and leaves what the nodes would."""
        written = [*group.kept, group.result]
        operands = [(part, s) for part in group.parts for s in group.outside(part)]
        for i, result in enumerate(written):
            if any(overlap(result, other) for other in written[:i]):
                return False
            for part, operand in operands:
                if overlap(result, operand) and not (part in IN_PLACE and _same_place(result, operand)):
                    return False
        return all(self._may_wait(node, group) for node in group.nodes[:-1])

    def _may_wait(self, node: Tensor, group: Group) -> bool:
        """Whether nothing between a node and the group's last minds that the node is computed late."""
        kept = node in group.kept
        inside = {*group.nodes, *group.views}
        reads = [s for s in node.src if s is not None and s not in inside]
        for other in self._nodes[self._places[node] + 1 : self._places[group.result]]:
            if other in inside or other.op in NO_OPS:
                continue
            if any(overlap(other, s) for s in reads):
                return False
            if kept and any(overlap(t, node) for t in (other, *other.src) if t is not None):
                return False
        return True


_NEEDED = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS
_BY_OP: dict[Op, list[Pattern]] = {}
for _pattern in PATTERNS:
    for _op in _pattern.last.ops:
        _BY_OP.setdefault(_op, []).append(_pattern)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share a byte: by their places, or before these are known by what they view."""
    if a.buffer is not None and b.buffer is not None:
        return a.buffer is b.buffer and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
    return (a.view_src or a) is (b.view_src or b)


def _same_place(a: Tensor, b: Tensor) -> bool:
    places = [
        (id(t.buffer), t.offset) if t.buffer is not None else (id(t.view_src or t), t.view_offs)
        for t in (a, b)
    ]
    return places[0] == places[1] and (a.dtype, a.ne, a.nb) == (b.dtype, b.ne, b.nb)
