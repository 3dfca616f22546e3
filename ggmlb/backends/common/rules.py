"""Rules: the table of a backend's lowering functions and their operand conditions.

    RULES: Rules[Callable[[Tensor, Target], list[Launch]]] = Rules()

    @RULES.rule(Op.SOFT_MAX, operands(F32, FLOATS, F32, out=F32), in_rows(0, RESULT))
    def soft_max(node: Tensor, target: Target) -> list[Launch]: ...

A rule is a function that lowers a node, with conditions. `Rules.declines` and lowering (`RULES[op]`) read one
table, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.ops.binary import window_fault
from ggmlb.core.tensor import Tensor

Lower = TypeVar("Lower")
"""Type of a backend's lowering functions."""

Condition = Callable[[Tensor], "str | None"]
"""Returns why a rule declines a node; `None` if it does not."""


class Rules(Generic[Lower]):
    """The rules of a backend: for each op a lowering function and its conditions."""

    def __init__(self) -> None:
        self._lower: dict[Op, Lower] = {}
        self._conditions: dict[Op, tuple[Condition, ...]] = dict.fromkeys(NO_OPS, ())

    def rule(self, ops: Op | Iterable[Op], *conditions: Condition) -> Callable[[Lower], Lower]:
        """Register the decorated function to lower one or more ops under conditions."""

        def register(lower: Lower) -> Lower:
            for op in (ops,) if isinstance(ops, Op) else ops:
                assert op not in self._lower, f"two rules for {op}"
                self._lower[op] = lower
                self._conditions[op] = conditions
            return lower

        return register

    def declines(self, node: Tensor) -> str | None:
        """Return why the node cannot be computed, or `None` if it can."""
        conditions = self._conditions.get(node.op)
        if conditions is None:
            return f"no kernel for {node.op}"
        for condition in conditions:
            why = condition(node)
            if why is not None:
                return why
        return None

    def __getitem__(self, op: Op) -> Lower:
        return self._lower[op]

    def __contains__(self, op: Op) -> bool:
        return op in self._lower


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


def operands(*src: Types, out: Types = FLOATS) -> Condition:
    """Condition on the types of the sources, in order (absent ones pass), and of the result.

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
    """Condition on the types of all present sources, and of the result."""
    return operands(*[types] * 16, out=types)


def in_rows(*which: int) -> Condition:
    """Condition that rows are contiguous, in these sources (if present) or the result."""

    def check(node: Tensor) -> str | None:
        for i in which:
            t = node if i == RESULT else node.optional(i)
            if t is not None and not t.is_contiguous_rows():
                return _not_in_rows(node, i)
        return None

    return check


def has_elements(node: Tensor) -> str | None:
    """Condition that src0 has elements, if the result has some that depend on them."""
    if node.sources[0].is_empty and not node.is_empty:
        return "src0 has no elements"
    return None


def converts(can: Callable[[DType, DType], bool]) -> Condition:
    """Require that elements of src0 can become those of the result; those of blocks, along contiguous rows.

    Args:
        can: Whether elements of one type can become those of another.
    """
    rows = in_rows(0, RESULT)

    def check(node: Tensor) -> str | None:
        a = node.operand(0)
        if not can(a.dtype, node.dtype):
            return f"no kernel converts {a.dtype.name.lower()} to {node.dtype.name.lower()}"
        return rows(node) if a.dtype.is_quantized or node.dtype.is_quantized else None

    return check


def same_shape_of_blocks(node: Tensor) -> str | None:
    """Require that src0 and the result have one shape, if one of them consists of blocks."""
    a = node.operand(0)
    if a.ne != node.ne and (a.dtype.is_quantized or node.dtype.is_quantized):
        return "a copy between shapes of quantised tensors"
    return None


def in_window(node: Tensor) -> str | None:
    """Require that the window of an ACC or SET, as its params are now, lies on elements."""
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
