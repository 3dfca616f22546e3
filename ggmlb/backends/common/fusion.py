"""Fusion: finds groups of nodes of a graph that one kernel may compute.

    graph ── fuse(graph, can_fuse) ──> [node, Group, node, ...]

A `Pattern` names nodes and how they connect. `fuse` finds its instances in a graph, and drops those that
would change results that others read. `can_fuse` says whether the backend has a kernel for a group. A
backend lowers a graph by

    for item in fuse(graph, can_fuse):        # can_fuse(group) -> bool: there is a kernel for these types
        launches += lower(item)               # a node or a Group

and, if the nodes of a group are far apart, the backend's `graph_optimize` first calls `gather(graph,
can_fuse)`, so that the allocator cannot reuse an operand's memory in between. Groups whose first results are
read before their last node (`Pattern.early`) are only found then. A `Group` holds its nodes by the pattern's
names:

    ================  ====================================  ================================================
    pattern           parts                                 computes
    ================  ====================================  ================================================
    `norm`            [`add`] `norm` [`mul` [`shift`]]      `norm(x + b) * w + c`; `add` may be kept (below)
    `rope_set_rows`   `rope` `set_rows`                     rope, written to rows of a cache
    `mul_mat_add`     `mul_mat` `add`                       a product, plus a bias or a residual
    `mul_mat_unary`   `mul_mat` [`add`] `unary`             a function of a product, or of that plus a bias
    `glu`             `gate` [`gate_add`]                   a gated unit of two products of one operand; or,
                      [`up` [`up_add`]] `glu`               without `up`, of the halves of one product's rows
    `mul_mat_id_add`  `mul_mat` `add`                       a product with chosen experts, plus their biases
    `glu_id`          `gate` [`gate_add`]                   a gated unit of two such products
                      `up` [`up_add`] `glu`
    `routing`         `shares` [`sorted`] `chosen`          the experts of each token, and their weights:
                      `weights` [`total` [`clamp`] `div`]   soft max, top-k, get_rows, divided by the sum; or
                                                            top-k, get_rows, soft max (`shares`) of the chosen
    `experts_sum`     `weighted` `add1` ... `add`           the sum of the experts' results by their weights
    `mul_mats`        `mul_mat0` [`add0`] `mul_mat1` ...    products of one operand with several weights
    `rope_kv`         [`q_norm` `q_mul`] `q_rope`           queries, keys and values of a layer: rope of
                      [`k_norm` `k_mul`] `k_rope`           queries and keys, and both written to the cache
                      `k_rows` `v_rows`
    `conv`            [`cont`] `conv` [`tail1` ...          a convolution, then functions of it, and sums and
                      `tail`]                               products with it; `conv` may be a product with
                                                            `cont`, the transposed copy of planes
    ================  ====================================  ================================================

`group["norm"]` is a node, `"mul" in group` says whether it is present, `group.other("mul")` is its
operand from outside the group; `group.products` lists the products with their biases or residuals, in a
gated unit the activated one first. All results except the last are dropped, unless they are in `group.kept`:
the kernel must write these too. Each node keeps its own operands, params and memory.

Every group passed to `can_fuse` satisfies:

- A dropped result is float32 or int32, has no other readers in the whole graph (`Graph.use_counts`), is not
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
from itertools import chain
from typing import Final, Literal, NamedTuple, TypeAlias

from ggmlb.backends.common.strided import Mem
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, BufferUsage, Op, SortOrder, TensorFlag
from ggmlb.core.graph import Graph, alloc_dep
from ggmlb.core.ops import SPECS
from ggmlb.core.placement import overlap, same_place
from ggmlb.core.tensor import Tensor
from ggmlb.system import env

Name = Literal[
    "norm", "rope_set_rows", "mul_mat_add", "mul_mat_unary", "glu",
    "mul_mat_id_add", "glu_id", "routing", "experts_sum", "mul_mats", "rope_kv", "conv",
]  # fmt: skip

IN_PLACE: Final = frozenset(
    {"add", "norm", "mul", "shift", "set_rows", "gate_add", "up_add"}
    | {"q_norm", "q_mul", "q_rope", "k_rows", "v_rows", "tail", *(f"tail{i}" for i in range(1, 10))}
)
"""Parts whose outside operands may have the same memory as a result of the group."""


@dataclass(frozen=True, slots=True)
class PatternNode:
    """A node of a fusion pattern, with its inputs.

    Attributes:
        name: Its name in the group.
        ops: The allowed ops.
        inputs: Parts whose results it reads, with operand indices.
        keepable: Whether its result may have other readers.
        by_views: Whether views are allowed between it and its inputs.
        is_shared: Whether several parts of the group read its result.
        repeats: Whether its first operand may be another such node; the parts are numbered.
        in_place: Whether its result may be in the memory of its input, a part of the group.
    """

    name: str
    ops: tuple[Op, ...]
    inputs: Inputs = ()
    keepable: bool = False
    by_views: bool = False
    is_shared: bool = False
    repeats: bool = False
    in_place: bool = False


Inputs: TypeAlias = tuple[tuple[PatternNode, tuple[int, ...]], ...]
"""Parts whose results a part reads, and the allowed operand indices of each."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A fusion pattern: nodes with root `last`, and a condition `fits` on matched groups.

    With `early`, a group may also be computed at the position of its first node. `mul_mats` and `rope_kv`
    have nodes that `last` does not depend on: `_Finder` finds them by an operand that all read.
    """

    name: Name
    last: PatternNode
    fits: Callable[[Group], bool]
    early: bool = False


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
        readers: How often the nodes and views read each tensor; `None`: each inner result once.
    """

    __slots__ = ("kept", "nodes", "outside", "parts", "pattern", "readers", "reads", "result", "views")

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
        self.readers: Counter[Tensor] | None = None
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
        if self.pattern == "mul_mats":
            parts = [(part, part.replace("mul_mat", "add")) for part in self.parts if part[0] == "m"]
            return [Product(self[part], self.other(add) if add in self else None) for part, add in parts]
        if "glu" not in self:
            return [Product(self["mul_mat"], self._added("add"))]

        def half(part: str, first: int = 0) -> Product:
            return Product(self[part], self._added(f"{part}_add"), first)

        if "up" in self:
            return [half("gate"), half("up")]
        halves = [half("gate"), half("gate", self.result.ne[0])]
        return halves[::-1] if self["glu"].params["swapped"] else halves

    def _added(self, part: str) -> Tensor | None:
        """Return what a sum of the group adds to a product; of ADD_ID, the biases of all experts."""
        if part not in self:
            return None
        return self[part].sources[1] if self[part].op is Op.ADD_ID else self.other(part)

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
    (w, *read), (v, *others) = group["gate"].sources, group["up"].sources
    return read == others and w.ne == v.ne and _alike(w, v)


def _alike(w: Tensor, v: Tensor) -> bool:
    """Whether two weights have one type, packing, row length and strides of rows."""
    if (w.dtype, w.ne[0], w.nb[:2]) != (v.dtype, v.ne[0], v.nb[:2]):
        return False
    return Mem.of(w).packing == Mem.of(v).packing


def scores_of(group: Group) -> Tensor:
    """Return the scores by which experts are chosen: their shares, or their logits."""
    return group["sorted" if "sorted" in group else "chosen"].sources[0]


def _chosen_rows(group: Group) -> bool:
    """Whether the weights are those of the chosen experts: `[1, n_used, n]` of scores `[1, n_expert, n]`."""
    scores, chosen, weights = scores_of(group), group["chosen"], group["weights"]
    (n, n_rows, *rest), k = scores.ne, chosen.ne[0]
    per_expert = weights.sources[0]
    if "sorted" in group and (
        group["sorted"].params["order"] is not SortOrder.DESC
        or chosen.view_offs != group["sorted"].view_offs
        or chosen.nb[:2] != group["sorted"].nb[:2]
    ):
        return False
    if "div" in group and group["total"].sources[0].ne != (k, n_rows, 1, 1):
        return False
    if group.result is not weights and group.result.ne != (k, n_rows, 1, 1):
        return False
    return (
        rest == [1, 1]
        and scores.is_contiguous()
        and chosen.ne == (k, n_rows, 1, 1)
        and per_expert.ne == (1, n, n_rows, 1)
        and per_expert.is_contiguous()
        and (per_expert.view_src or per_expert) is (scores.view_src or scores)
        and per_expert.view_offs == scores.view_offs
        and group.result.is_contiguous()
    )


def _each_slot_once(group: Group) -> bool:
    """Whether all slots are added up in order: views `[n_embd, n]` of `[n_embd, n_used, n]`."""
    weighted = group["weighted"]
    a, w = weighted.sources
    n_embd, n_used, n, _ = weighted.ne
    return (
        (a.ne, w.ne) == (weighted.ne, (1, n_used, n, 1))
        and len(group.views) == n_used == len(group.parts)
        and all(
            view.view_offs == weighted.view_offs + i * weighted.nb[1]
            and view.ne == (n_embd, n, 1, 1)
            and view.nb[:2] == (weighted.nb[0], weighted.nb[2])
            for i, view in enumerate(group.views)
        )
    )


def _rows_of_heads(group: Group, rope_: str = "rope", put: str = "set_rows") -> bool:
    """Whether each written row consists of all heads of a token, in order."""
    rope, rows = group[rope_], group[put].sources[0]
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


def _chosen(is_sorted: bool, inputs: Inputs = ()) -> PatternNode:
    """Return the choice of experts by top-k of scores, or by the first places of the sorted scores."""
    if not is_sorted:
        return PatternNode("chosen", (Op.TOP_K,), inputs, keepable=True)
    sorted_ = PatternNode("sorted", (Op.ARGSORT,), inputs)
    return PatternNode("chosen", (Op.VIEW,), ((sorted_, (0,)),), keepable=True)


def _routing(*, is_sorted: bool, div: bool, clamp: bool = False) -> Pattern:
    shares = PatternNode("shares", (Op.SOFT_MAX,), is_shared=True)
    inputs = ((shares, (0,)), (_chosen(is_sorted, ((shares, (0,)),)), (1,)))
    last = PatternNode("weights", (Op.GET_ROWS,), inputs, by_views=True, is_shared=div)
    if div:
        total = PatternNode("total", (Op.SUM_ROWS,), ((last, (0,)),), by_views=True)
        if clamp:
            total = PatternNode("clamp", (Op.CLAMP,), ((total, (0,)),), in_place=True)
        last = PatternNode("div", (Op.DIV,), ((last, (0,)), (total, (1,))), by_views=True)
    return Pattern("routing", last, _chosen_rows, early=True)


def _routing_of_logits(*, is_sorted: bool) -> Pattern:
    weights = PatternNode("weights", (Op.GET_ROWS,), ((_chosen(is_sorted), (1,)),), by_views=True)
    last = PatternNode("shares", (Op.SOFT_MAX,), ((weights, (0,)),), by_views=True)
    return Pattern("routing", last, _chosen_rows, early=True)


@cache
def _rope(part: str, *, norm: bool) -> PatternNode:
    """Return the rope of queries or keys, of a normalised head or any tensor; `part` is `q` or `k`."""
    scaled = PatternNode(f"{part}_mul", (Op.MUL,), ((PatternNode(f"{part}_norm", (Op.RMS_NORM,)), (0, 1)),))
    return PatternNode(f"{part}_rope", (Op.ROPE,), ((scaled, (0,)),) if norm else ())


@cache
def _keys(*, norm: bool) -> PatternNode:
    return PatternNode("k_rows", (Op.SET_ROWS,), ((_rope("k", norm=norm), (0,)),), by_views=True)


def _glu(product: Callable[[str, str | None], PatternNode], *, add: bool, split: bool = True) -> Pattern:
    parts = [product(part, f"{part}_add" if add else None) for part in ("gate", "up")[: 1 + split]]
    last = PatternNode("glu", (Op.GLU,), tuple((part, (i,)) for i, part in enumerate(parts)))
    if product is _of_experts:
        return Pattern("glu_id", last, _same_experts)
    return Pattern("glu", last, _all(_same_operand, _tiles("gate_add"), _tiles("up_add")))


def _of_experts(name: str, added: str | None) -> PatternNode:
    """Return a product with chosen experts, or its sum with their biases, under these names."""
    product = PatternNode(name, (Op.MUL_MAT_ID,))
    return PatternNode(added, (Op.ADD_ID,), ((product, (0,)),)) if added else product


def _same_experts(group: Group) -> bool:
    """Whether biases are of the same experts as the weights; of a gated unit, all of both products."""
    sums = [node for node in group.nodes if node.op is Op.ADD_ID]
    if any(node.src[2] is not node.sources[0].src[2] for node in sums):
        return False
    return "glu" not in group or _same_operand(group)


def _conv(conv: PatternNode, *, tail: bool) -> Pattern:
    ops = (Op.ADD, Op.MUL, Op.UNARY, Op.SCALE, Op.CLAMP, Op.LEAKY_RELU)
    last = PatternNode("tail", ops, ((conv, (0, 1)),), by_views=True, repeats=True) if tail else conv
    return Pattern("conv", last, lambda _: True)


_OF_PLANES = PatternNode("conv", (Op.MUL_MAT,), ((PatternNode("cont", (Op.CONT,)), (0,)),))

_WEIGHTED = PatternNode("weighted", (Op.MUL,), is_shared=True)

PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern("mul_mats", PatternNode("", (Op.ADD, Op.MUL_MAT)), lambda _: True, early=True),
    Pattern(
        "rope_kv",
        PatternNode("v_rows", (Op.SET_ROWS,)),
        lambda group: _rows_of_heads(group, "k_rope", "k_rows"),
    ),
    Pattern(
        "experts_sum",
        PatternNode("add", (Op.ADD,), ((_WEIGHTED, (0,)), (_WEIGHTED, (1,))), by_views=True, repeats=True),
        _each_slot_once,
    ),
    *[
        _routing(is_sorted=is_sorted, div=div, clamp=clamp)
        for div, clamp in ((True, True), (True, False), (False, False))
        for is_sorted in (False, True)
    ],
    *[_routing_of_logits(is_sorted=is_sorted) for is_sorted in (False, True)],
    _conv(PatternNode("conv", (Op.CONV_2D, Op.CONV_2D_DW)), tail=True),
    *[_conv(_OF_PLANES, tail=tail) for tail in (True, False)],
    *[_glu(_of_experts, add=add) for add in (True, False)],
    Pattern("mul_mat_id_add", _of_experts("mul_mat", "add"), _same_experts),
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
    *[_glu(_product, add=add, split=split) for split in (True, False) for add in (True, False)],
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
_NAMES: Final[frozenset[Name]] = frozenset(pattern.name for pattern in PATTERNS)


def fuse(
    graph: Graph, can_fuse: CanFuse, *, by_place: bool = True, names: frozenset[Name] = _NAMES
) -> list[Tensor | Group]:
    """Return the graph's nodes in topological order, with nodes that one kernel computes joined to groups.

    A group has the position of its last node. A node is in at most one group.

    Args:
        graph: A graph, or a view of one (`Graph.view`).
        can_fuse: Whether the backend has a kernel for a fusable group.
        by_place: Whether `can_fuse` depends on the tensors' memory.
        names: The patterns to look for.
    """
    if len(graph) < 2 or not env.flag("GGMLB_FUSE", default=True):
        return list(graph.nodes)
    return _items(graph, _Finder(graph, can_fuse, by_place, names).groups())


def _items(graph: Graph, groups: list[Group]) -> list[Tensor | Group]:
    ends = {group.result: group for group in groups}
    inner = {node for group in groups for node in group.nodes}
    return [ends.get(node, node) for node in graph.nodes if node in ends or node not in inner]


def gather(graph: Graph, can_fuse: CanFuse, names: frozenset[Name] = _NAMES) -> None:
    """Reorder a graph so that the nodes of each group that `fuse` finds stand together, at its last node.

    Those of early patterns are moved to the group's first node, where that is possible.
    Views without an op are inserted after a group, so that the allocator keeps its operands until its
    result is placed. The groups are saved in `graph.marks`: a plan only checks whether they are valid.
    """
    if len(graph) < 2 or not env.flag("GGMLB_FUSE", default=True):
        return
    graph.nodes = list(graph.nodes)
    finder = _Finder(graph, can_fuse, True, names)
    owners: dict[Tensor, Group] = {}
    waiting: dict[Tensor, list[Tensor]] = {}
    needed: dict[Tensor, list[Tensor]] = {}
    for item in _items(graph, [*finder.hoisted(), *finder.groups()]):
        if isinstance(item, Group):
            graph.marks[item.result] = item
            waiting[item.result] = []
            needed[item.result] = [alloc_dep(t) for t in _to_be_placed(item)]
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


class _Finder:
    """Finds the groups of one graph."""

    def __init__(self, graph: Graph, can_fuse: CanFuse, by_place: bool, names: frozenset[Name]) -> None:
        self._graph = graph
        self._nodes = graph.nodes
        self._places = {node: i for i, node in enumerate(graph.nodes)}
        self._can_fuse = can_fuse
        self._by_place = by_place
        self._names = names
        self._marks = graph.marks if graph.owner_checks else {}
        self._taken: set[Tensor] = set()
        self._gated: dict[Tensor, bool] = {}

    @cached_property
    def _uses(self) -> Counter[Tensor]:
        return self._graph.use_counts()

    def groups(self) -> list[Group]:
        """Return the groups that may be computed at their last nodes."""
        if self._marks:  # gather has searched all nodes: there are no other groups
            return [
                group
                for group in self._marks.values()
                if isinstance(group, Group) and self._still_fits(group)
            ]
        found: list[Group] = []
        ends = _ends(self._names)
        for node in reversed(self._nodes):  # later nodes match first: a residual joins the norm
            if node.op in ends and (group := self._search(node)) is not None:
                self._taken.update(group.nodes)
                found.append(group)
        return found

    def hoisted(self) -> list[Group]:
        """Move the nodes of early groups to the group's first node, in the graph; return these groups."""
        found: list[Group] = []
        nodes, places, i = self._nodes, self._places, len(self._nodes) - 1
        ends = _ends(self._names, True)
        while i >= 0 and ends:
            group = self._search(nodes[i], early=True) if nodes[i].op in ends else None
            if group is None:
                i -= 1
                continue
            self._taken.update(group.nodes)
            found.append(group)
            start = min([places[node] for node in group.nodes])
            views = [t for part in group.parts for operand in group.outside[part] for t in _views_to(operand)]
            late = [t for t in views if places.get(t, -1) > start]
            moved = sorted(places[node] for node in {*group.nodes, *group.views, *late} & places.keys())
            for at, place in enumerate(moved, moved[0]):
                nodes.insert(at, nodes.pop(place))
            for place in range(moved[0], i + 1):
                places[nodes[place]] = place
        return found

    # -- structure -----------------------------------------------------------------------------

    def _search(self, node: Tensor, early: bool = False) -> Group | None:
        """Return the group that ends at a node; with `early`, one to be computed at its first node."""
        if node in self._taken:
            return None
        sources = [None if s is None else s.op for s in node.src]
        for pattern in _patterns(self._names, early, node.op, *sources):
            group = self._match(pattern, node)
            if (
                group is not None
                and pattern.fits(group)
                and self._is_safe(group)
                and self._may_move(group, early)
                and self._can_fuse(group)
            ):
                return group
        return None

    def _match(self, pattern: Pattern, node: Tensor) -> Group | None:
        parts: dict[str, Tensor] = {}
        views: list[Tensor] = []
        if pattern.name == "mul_mats":
            is_found = self._find_products(node, parts)
        elif pattern.name == "rope_kv":
            is_found = self._find_heads(node, parts, views)
        else:
            is_found = self._find(pattern.last, node, parts, views)
        if not is_found or any([node.params.get("prec_src1") for node in parts.values()]):
            return None  # a product with a precision of its operand is computed alone
        group = Group(pattern.name, parts, tuple(dict.fromkeys(views)))
        if pattern.name in _COUNTED:
            read = chain.from_iterable([t.src for t in (*group.nodes, *group.views)])
            group.readers = Counter(s for s in read if s is not None)
        kept = [t for t in parts.values() if t is not node and not self._may_drop(t, group)]
        if not self._may_drop_views(group) or any([t is parts.get(part) for t in kept for part in _SHARED]):
            return None
        group.kept = tuple(kept)
        return group

    def _still_fits(self, group: Group) -> bool:
        """Whether a group found before its nodes were allocated is still valid."""
        places, kept = self._places, group.kept
        for node in group.nodes:
            if node not in places or not (
                node is group.result or node in kept or self._may_drop(node, group)
            ):
                return False
        return (
            self._may_drop_views(group)
            and self._is_safe(group)
            and self._may_move(group)
            and (not self._by_place or self._can_fuse(group))
        )

    def _find(self, part: PatternNode, node: Tensor, parts: dict[str, Tensor], views: list[Tensor]) -> bool:
        """Add a part and its inputs in order; return whether they match (or `parts` is invalid)."""
        if node in parts.values():
            return parts.get(part.name) is node
        if node not in self._places or node in self._taken or 0 in node.ne:
            return False
        links = [node]
        while part.repeats and self._is_link(part, inner := links[-1].sources[0]):
            links.append(inner)
        for i, link in enumerate(reversed(links)):
            for inner_part, operands in part.inputs[min(i, 1) :]:
                for operand in operands:
                    if self._find_input(part, inner_part, link, operand, parts, views):
                        break
                else:
                    return False
            parts[part.name if link is node else f"{part.name}{i + 1}"] = link
        return True

    def _is_link(self, part: PatternNode, inner: Tensor) -> bool:
        is_here = inner in self._places and inner not in self._taken
        return is_here and inner.op in part.ops and self._may_drop(inner)

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
        while part.by_views and source is not None and source.op in NO_OPS and source.op not in inner.ops:
            if not source.src or source.flags & _NEEDED or (self._uses[source] != 1 and not inner.is_shared):
                return False
            between.append(source)
            source = source.src[0]
        if source is None or source.op not in inner.ops or source.dtype not in (DType.F32, DType.I32):
            return False
        if not (inner.keepable or inner.is_shared or self._may_drop(source, in_place=inner.in_place)):
            return False
        views += between
        return self._find(inner, source, parts, views)

    @cached_property
    def _readers(self) -> dict[tuple[Op, Tensor | None], list[Tensor]]:
        """The products, ropes and writes of rows that have a tensor as their second operand."""
        found: dict[tuple[Op, Tensor | None], list[Tensor]] = {}
        for node in self._nodes:
            if node.op in (Op.MUL_MAT, Op.ROPE, Op.SET_ROWS):
                found.setdefault((node.op, node.src[1]), []).append(node)
        return found

    @cached_property
    def _followers(self) -> dict[Tensor | None, Tensor]:
        """The last sum or gated unit that reads a tensor."""
        return {s: node for node in self._nodes if node.op in (Op.ADD, Op.GLU) for s in node.src}

    def _find_products(self, node: Tensor, parts: dict[str, Tensor]) -> bool:
        """Add all products of one operand with alike weights, and their biases; the last result is `node`."""
        last = node if node.op is Op.MUL_MAT else next((s for s in node.sources if s.op is Op.MUL_MAT), None)
        alike = self._readers.get((Op.MUL_MAT, last.src[1]), ()) if last is not None else ()
        if last is None or len(alike) < 2:
            return False
        weight = last.sources[0]
        units: list[list[Tensor]] = []
        for product in reversed(alike):
            if product in self._taken or 0 in product.ne or not _alike(product.sources[0], weight):
                continue
            unit = [product]
            if self._may_drop(product) and self._adds_row(self._followers.get(product), product):
                unit.append(self._followers[product])
            if self._is_gated(unit[-1]):
                continue
            if not units and product is not last:
                return False
            units.append(unit)
        units.sort(key=lambda unit: self._places[unit[-1]])
        for i, unit in enumerate(units):
            parts.update(zip((f"mul_mat{i}", f"add{i}"), unit, strict=False))
        return len(units) > 1 and units[-1][-1] is node

    def _adds_row(self, node: Tensor | None, product: Tensor) -> bool:
        """Whether a node adds a bias to a product: one row for all, a leaf."""
        if node is None or node.op is not Op.ADD or node.ne != product.ne:
            return False
        return all(s is product or (s.ne[1:] == (1, 1, 1) and s not in self._places) for s in node.sources)

    def _is_gated(self, node: Tensor) -> bool:
        """Whether a kernel computes the gated unit that reads a product or biased product, with that."""
        unit = self._followers.get(node)
        if unit is None or unit.op is not Op.GLU:
            return False
        if unit not in self._gated:
            self._gated[unit] = self._search(unit) is not None
        return self._gated[unit]

    def _find_heads(self, node: Tensor, parts: dict[str, Tensor], views: list[Tensor]) -> bool:
        """Add rope of queries and keys, and the writes of keys and values (`node`) to rows of the cache."""
        puts = self._readers.get((Op.SET_ROWS, node.src[1]), [])
        i = puts.index(node) if node not in self._taken and 0 not in node.ne else 0
        for norm in (True, False) if i else ():
            parts.clear()
            views.clear()
            if not self._find(_keys(norm=norm), puts[i - 1], parts, views):
                continue
            key = parts["k_rope"]
            ropes = self._readers[Op.ROPE, key.src[1]]
            at = ropes.index(key)
            beside = [rope for rope in ropes[max(at - 1, 0) : at + 2] if rope is not key]
            query = min(beside, key=lambda rope: abs(self._places[rope] - self._places[key]), default=key)
            if self._places[query] > self._places[node]:
                return False
            alike = (query.params, query.src[2:], query.ne[0]) == (key.params, key.src[2:], key.ne[0])
            if alike and self._find(_rope("q", norm=norm), query, parts, views):
                parts["v_rows"] = node
                return True
        return False

    def _may_drop(self, node: Tensor, group: Group | None = None, in_place: bool = False) -> bool:
        """Whether nothing but the node's reader, or the nodes of its group, reads its result."""
        return (
            self._uses[node] == (1 if group is None or group.readers is None else group.readers[node])
            and not node.flags & _NEEDED
            and (node.view_src is None or in_place or (group is not None and node.view_src in group.nodes))
            and (node.buffer is None or node.buffer.usage is BufferUsage.COMPUTE)
        )

    def _may_drop_views(self, group: Group) -> bool:
        readers = group.readers
        return all([self._uses[t] == (1 if readers is None else readers[t]) for t in group.views])

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
        return True

    def _may_move(self, group: Group, early: bool = False) -> bool:
        """Whether all nodes can be computed at the group's last node; `early`: only at its first."""
        nodes, places = self._nodes, self._places
        start, end = min([places[node] for node in group.nodes]), places[group.result]
        if end - start == len(group.nodes) - 1:
            return not early
        if early and self._may_move(group):
            return False
        inside = {*group.nodes, *group.views}
        between = [i for i in range(start + 1, end) if nodes[i].op not in NO_OPS and nodes[i] not in inside]
        for part, node in group.parts.items() if between else ():
            operands, is_written = group.outside[part], node in group.kept or node is group.result
            if early and any([places.get(_base(operand), -1) > start for operand in operands]):
                return False
            for i in between:
                if (i > places[node]) is early:
                    continue  # the node keeps its side
                other = nodes[i]
                written = (other, *[other.sources[k] for k in SPECS[other.op].also_written])
                if any([overlap(t, operand) for t in written for operand in operands]):
                    return False
                if is_written and any(overlap(t, node) for t in (other, *other.src) if t is not None):
                    return False
        return True


def _views_to(tensor: Tensor) -> list[Tensor]:
    """Return a tensor that is a view, what it views if that is one, and so on."""
    found = []
    while tensor.op in NO_OPS and tensor.src:
        found.append(tensor)
        tensor = tensor.sources[0]
    return found


def _base(tensor: Tensor) -> Tensor:
    """Return a tensor, or what it views."""
    views = _views_to(tensor)
    return views[-1].sources[0] if views else tensor


_COUNTED: Final = frozenset({"routing", "experts_sum", "mul_mats", "rope_kv"})
"""Patterns with parts that are read more than once, or by no node of the group."""

_SHARED: Final = ("shares", "weights", "weighted")
"""Parts that only the group may read, though more than one of its nodes does."""


@cache
def _ends(names: frozenset[Name], early: bool = False) -> frozenset[Op]:
    """Return the ops of the last nodes of patterns."""
    found = [pattern for pattern in PATTERNS if pattern.name in names and pattern.early >= early]
    return frozenset(op for pattern in found for op in pattern.last.ops)


@cache
def _patterns(names: frozenset[Name], early: bool, op: Op, *sources: Op | None) -> tuple[Pattern, ...]:
    """Return the patterns that may end at a node, by its op and those of its sources."""

    def may_read(part: PatternNode, inner: PatternNode, i: int) -> bool:
        source = sources[i] if i < len(sources) else None
        if part.repeats and i == 0 and source in part.ops:
            return True
        return source in inner.ops or (part.by_views and source in NO_OPS)

    return tuple(
        pattern
        for pattern in PATTERNS
        if op in pattern.last.ops
        and pattern.name in names
        and pattern.early >= early
        and all(any(may_read(pattern.last, inner, i) for i in read) for inner, read in pattern.last.inputs)
    )
