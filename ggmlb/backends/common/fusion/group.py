"""The table of fusion patterns, and Group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

Name = Literal["norm", "rope_set_rows", "mul_mat_add", "mul_mat_unary", "glu"]

IN_PLACE: Final = frozenset({"add", "norm", "mul", "shift", "set_rows", "gate_add", "up_add"})
"""Parts whose outside operands may have the same place as a result of the group."""


@dataclass(frozen=True, slots=True)
class PatternNode:
    """A node of a pattern.

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
    """A tree of parts, given by its last part, with further conditions."""

    name: Name
    last: PatternNode
    fits: Callable[[Group], bool]


class Product(NamedTuple):
    """A product of a group, or a half of it.

    Attributes:
        node: The product.
        added: What is added to it, if anything: a bias, or a residual.
        first: The first row of the weight, and element of what is added, that the half takes.
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
    """

    __slots__ = ("kept", "nodes", "outside", "parts", "pattern", "result", "views")

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

    def other(self, part: str) -> Tensor:
        """Return the one operand of a part that no node of the group computes."""
        (tensor,) = self.outside[part]
        return tensor

    @property
    def products(self) -> list[Product]:
        """The product; of a gated unit the two, or the two halves of one: first that which is activated."""
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


def _tiles(part: str) -> Callable[[Group], bool]:
    """Return the condition that a part's other operand has its extents, or 1."""

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
    """Whether all products read one operand, with weights of equal type and shape."""
    if "up" not in group:
        return all(s is None for s in group["glu"].src[1:])
    (w, x), (v, y) = group["gate"].sources, group["up"].sources
    return x is y and (w.dtype, w.ne, w.nb) == (v.dtype, v.ne, v.nb)


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
"""The patterns in order of trial: of two that end at one node, the longer first."""
