"""Rules: for each op and fusion pattern an ordered list of lowering functions with their conditions.

    RULES: Rules[Callable[[Any, Target], list[Launch]]] = Rules()

    @RULES.rule(Op.SOFT_MAX, operands(F32, FLOATS, F32, out=F32), in_rows(0, RESULT))
    def soft_max(node: Tensor, target: Target) -> list[Launch]: ...

    @RULES.rule("norm")
    def norm(group: Group, target: Target) -> list[Launch]: ...

The first rule whose conditions hold is used. `declines` (for `supports_op`) and `find` (for lowering) read
the same list, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypeVar

from ggmlb.backends.common.fusion import Group, Item, Name
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, Op, Prec
from ggmlb.core.errors import UnsupportedOpError
from ggmlb.core.ops.binary import window_fault
from ggmlb.core.tensor import Tensor

Lower = TypeVar("Lower")
"""Type of a backend's lowering functions."""

Condition = Callable[[Any], "str | None"]
"""Returns why a rule declines a node or group; `None` if it does not."""

TargetCondition = Callable[[Any, Any], "str | None"]
"""As `Condition`, of an item and the target that the backend lowers for."""


class LoweringRule(NamedTuple):
    """A function that lowers a node or group to launches or calls, and the conditions of its use."""

    lower: Any
    conditions: tuple[Condition, ...]
    on: TargetCondition | None

    def declines(self, item: Item, target: Any) -> str | None:
        """Return why the rule does not apply to a node or group on this device, or `None` if it does."""
        for condition in self.conditions:
            why = condition(item)
            if why is not None:
                return why
        return None if self.on is None or target is None else self.on(item, target)


class Rules(Generic[Lower]):
    """A backend's table of lowering rules: for each op and fusion pattern a list, the first match wins.

    Args:
        always: A condition added to the rules of all ops.
        base: Fallback rules, as those of portable kernels. They get no group that contains a node of these
            rules: a better kernel for one node is faster than a portable one for the group.
    """

    def __init__(self, always: Condition | None = None, base: Rules[Lower] | None = None) -> None:
        self._rules: dict[Op | Name, list[LoweringRule]] = {}
        self._always = always
        self._base = base

    def rule(
        self, keys: Op | Name | Iterable[Op | Name], *conditions: Condition, on: TargetCondition | None = None
    ) -> Callable[[Lower], Lower]:
        """Decorator that appends a function as a lowering rule of the ops or fusion patterns `keys`.

        Args:
            keys: The ops, or patterns.
            conditions: Conditions on the node or group.
            on: Condition on the node or group and the target.
        """

        def register(lower: Lower) -> Lower:
            for key in (keys,) if isinstance(keys, str) else keys:
                always = (self._always,) if self._always is not None and isinstance(key, Op) else ()
                self._rules.setdefault(key, []).append(LoweringRule(lower, (*conditions, *always), on))
            return lower

        return register

    @property
    def patterns(self) -> frozenset[Name]:
        """The fusion patterns that have a rule."""
        own = frozenset(key for key in self._rules if not isinstance(key, Op))
        return own if self._base is None else own | self._base.patterns

    def find(self, item: Item, target: Any = None) -> Lower | None:
        """Return the lowering function of the first rule that applies to a node or group, or `None`.

        Does not check that each node of a group could be lowered; `to_lower` does, once for each kind.
        """
        own = self._own(item, target)
        if own is not None or self._base is None:
            return own
        if isinstance(item, Group):
            known = [node for node in item.nodes if node.op in self._rules]
            if any([self._own(node, target) is not None for node in known]):
                return None
        return self._base.find(item, target)

    def to_lower(self, item: Item, target: Any = None) -> Lower:
        """Return the lowering function of the first rule that applies to a node or group; raise if none does.

        Raises:
            UnsupportedOpError: No rule applies to it, or to a node of the group.
        """
        found = self.find(item, target)
        nodes = item.nodes if isinstance(item, Group) else (item,)
        if found is None or any([len(nodes) > 1 and self.declines(node, target) for node in nodes]):
            why = [self.declines(node, target) for node in nodes]
            named = " with ".join([node.describe() for node in nodes])
            reason = next(filter(None, why), "no kernel computes these nodes together")
            raise UnsupportedOpError(f"cannot compute {named}: {reason}")
        return found

    def _own(self, item: Item, target: Any) -> Lower | None:
        for rule in self._rules.get(_key(item), ()):
            if rule.declines(item, target) is None:
                return rule.lower  # type: ignore[no-any-return]
        return None

    def declines(self, node: Tensor, target: Any = None) -> str | None:
        """Return why no rule applies to a node on this device, or `None` if one does.

        Args:
            node: The node.
            target: The target of the lowering; without one, `on` conditions are skipped.
        """
        if node.op in NO_OPS:
            return None
        why = f"no kernel for {node.op}"
        for rule in self._all(node.op):
            reason = rule.declines(node, target)
            if reason is None:
                return None
            why = reason
        return why

    def _all(self, key: Op | Name) -> Iterator[LoweringRule]:
        yield from self._rules.get(key, ())
        if self._base is not None:
            yield from self._base._all(key)

    def __contains__(self, op: Op) -> bool:
        return any(True for _ in self._all(op))


def _key(item: Item) -> Op | Name:
    return item.pattern if isinstance(item, Group) else item.op


# -- types -----------------------------------------------------------------------------------------

Types = frozenset[DType]

F32: Final = frozenset({DType.F32})
I32: Final = frozenset({DType.I32})

FLOATS: Final = frozenset({DType.F32, DType.F16, DType.BF16})
"""Float types, computed in float32."""

INDEX: Final = frozenset({DType.I32, DType.I64})
"""Types of positions and row indices."""

BLOCKS: Final = frozenset(d for d in DType if d.is_quantized)
"""Quantised types."""

ANY: Final = frozenset(DType)
"""Every type."""

RESULT: Final = -1
"""Index of the result among indices of operands."""

_FEW = 4

_CONVERTED: Final = {DType.F16: Prec.F16, DType.BF16: Prec.BF16}


def operands(*src: Types, out: Types = FLOATS) -> Condition:
    """Condition on the types of the sources, in order (absent ones are accepted), and of the result.

    Quantised operands must have contiguous rows.
    """
    taken = [(i, types, types - BLOCKS) for i, types in enumerate(src)]

    def check(node: Tensor) -> str | None:
        for s, (i, types, plain) in zip(node.src, taken):  # noqa: B905 - a keyword costs as much again
            if s is None or s.dtype in plain:
                continue
            if s.dtype not in types:
                return _not_of(types, node, i)
            if not s.is_contiguous_rows():
                return _not_in_rows(node, i)
        return None if node.dtype in out else _not_of(out, node, RESULT)

    return check


def all_operands(types: Types) -> Condition:
    """Condition that all present sources, and the result, have one of these types."""
    return operands(*[types] * 16, out=types)


def in_rows(*which: int) -> Condition:
    """Condition that the operands `which` (source numbers or `RESULT`), if present, have contiguous rows."""

    def check(node: Tensor) -> str | None:
        for i in which:
            t = node if i == RESULT else node.optional(i)
            if t is not None and not t.is_contiguous_rows():
                return _not_in_rows(node, i)
        return None

    return check


def keeps_operand(node: Tensor) -> str | None:
    """Condition that src1 of a product may be converted to the weights' type, or to Q8 for quantised ones."""
    least = node.params.get("prec_src1", Prec.DEFAULT)
    if least == Prec.DEFAULT or node.sources[0].dtype is DType.F32:
        return None
    made = _CONVERTED.get(node.sources[0].dtype, Prec.Q8)
    if least >= made:
        return None
    return f"src1 is converted to {made.name}, prec_set_src asks for {Prec(least).name}"


def has_elements(node: Tensor) -> str | None:
    """Condition that src0 is not empty, unless the result is."""
    if node.sources[0].is_empty and not node.is_empty:
        return "src0 has no elements"
    return None


def converts(can: Callable[[DType, DType], bool]) -> Condition:
    """Condition that `can(src0's type, result's type)` is true; if one is quantised, rows are contiguous.

    Args:
        can: `can(src, dst)`: whether there is a conversion between two types.
    """
    rows = in_rows(0, RESULT)

    def check(node: Tensor) -> str | None:
        a = node.operand(0)
        if not can(a.dtype, node.dtype):
            return f"no kernel converts {a.dtype.name.lower()} to {node.dtype.name.lower()}"
        return rows(node) if a.dtype.is_quantized or node.dtype.is_quantized else None

    return check


def same_shape_of_blocks(node: Tensor) -> str | None:
    """Condition that src0 and the result have equal shapes, if one of them is quantised."""
    a = node.operand(0)
    if a.ne != node.ne and (a.dtype.is_quantized or node.dtype.is_quantized):
        return "src0 and the result have different shapes, and one is quantised"
    return None


def in_window(node: Tensor) -> str | None:
    """Condition that the view that ACC or SET writes (`nb1`, `nb2`, `nb3`, `offset`) is within the result."""
    p = node.params
    return window_fault(node, node.operand(1), p["nb1"], p["nb2"], p["nb3"], p["offset"])


def same_types(node: Tensor) -> str | None:
    """Condition that all sources have the type of the result."""
    for i, s in enumerate(node.sources):
        if s.dtype is not node.dtype:
            return f"src{i} is {s.dtype.name.lower()}, the result {node.dtype.name.lower()}"
        if s.dtype.is_quantized and not s.is_contiguous_rows():
            return _not_in_rows(node, i)
    return None


def _named(node: Tensor, i: int) -> str:
    if i == RESULT:
        return "the result"
    name = node.operand(i).name
    return f"src{i} ({name!r})" if name else f"src{i}"


def _not_of(types: Types, node: Tensor, i: int) -> str:
    name = (node if i == RESULT else node.operand(i)).dtype.name.lower()
    if len(types) > _FEW:
        return f"no kernel writes {name}" if i == RESULT else f"no kernel takes {name} as {_named(node, i)}"
    *first, last = (d.name.lower() for d in sorted(types))
    cast = "; cast it to f32" if name == "f64" and DType.F32 in types else ""
    return f"{_named(node, i)} is {name}: only {', '.join(first)}{' and ' if first else ''}{last}{cast}"


def _not_in_rows(node: Tensor, i: int) -> str:
    nb0 = (node if i == RESULT else node.operand(i)).nb[0]
    why = f"the rows of {_named(node, i)} are not contiguous (nb0 = {nb0})"
    return why if i == RESULT else f"{why}: apply cont"
