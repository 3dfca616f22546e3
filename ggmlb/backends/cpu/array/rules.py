"""Rules: which function lowers an op, and for which types and layouts it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.casts import Casts
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.array.lowering import Lowering

Lower = Callable[["Lowering", Tensor], None]
"""Emits the steps that compute a node."""

Condition = Callable[[Tensor, Casts], "str | None"]
"""Says why a rule does not take a node; `None` if it does."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to compute an op, and the conditions under which it holds."""

    lower: Lower
    conditions: tuple[Condition, ...]

    def declines(self, node: Tensor, casts: Casts) -> str | None:
        """Return the first condition's reason that the node does not meet."""
        for condition in self.conditions:
            why = condition(node, casts)
            if why is not None:
                return why
        return None


class Rules:
    """A set of rules, filled by the decorator `rule`; at most one per op."""

    def __init__(self) -> None:
        self.by_op: dict[Op, Rule] = {}

    def rule(self, op: Op, *conditions: Condition) -> Callable[[Lower], Lower]:
        """Register the decorated function as the way to compute `op` where all conditions hold."""

        def register(lower: Lower) -> Lower:
            assert op not in self.by_op, f"two rules for {op}"
            self.by_op[op] = Rule(lower, conditions)
            return lower

        return register


reference = Rules()
"""The definition of every op; the modules of `ggmlb.backends.cpu.array.ops` fill it."""

rule = reference.rule


class RuleTable:
    """What a device can compute: sets of rules, the preferred first, and the types it reads and writes.

    Asking whether a node can run and choosing how it runs look at the same place.
    """

    def __init__(self, casts: Casts, *sets: Rules) -> None:
        self.casts = casts
        self._by_op: dict[Op, tuple[Rule, ...]] = {
            op: tuple(s.by_op[op] for s in sets if op in s.by_op) for op in Op if op not in NO_OPS
        }
        self._conditions = {op: tuple(r.conditions for r in rules) for op, rules in self._by_op.items()}
        self._conditions.update(dict.fromkeys(NO_OPS, ((),)))  # what computes nothing meets all of none

    def find(self, node: Tensor) -> Rule | str:
        """Return the first rule that takes the node, or why even the last does not."""
        why = ""
        for candidate in self._by_op[node.op]:
            reason = candidate.declines(node, self.casts)
            if reason is None:
                return candidate
            why = reason
        return why or f"there is no rule for {node.op}"

    def declines(self, node: Tensor) -> str | None:
        """Return why the node cannot be computed, or `None`.

        As `find`, without its calls: a scheduler asks this of every node.
        """
        casts = self.casts
        why: str | None = ""
        for conditions in self._conditions[node.op]:
            for condition in conditions:
                why = condition(node, casts)
                if why is not None:
                    break
            else:
                return None
        return why or f"there is no rule for {node.op}"


# -- conditions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Types:
    """A set of tensor types: some plain ones, and if so asked all quantised ones the device knows."""

    plain: frozenset[DType]
    quantized: bool = False


FLOAT = Types(frozenset({DType.F32, DType.F16, DType.BF16}))
"""Types of intermediate results."""

VALUE = Types(FLOAT.plain, quantized=True)
"""Types of weights: floats and blocks."""

PLAIN = Types(frozenset(d for d in DType if not d.is_quantized))
"""Types of which each element can be moved by itself."""

ANY = Types(PLAIN.plain, quantized=True)
"""Every type."""

INDEX = Types(frozenset({DType.I32, DType.I64}))
"""Types of positions and row numbers."""

F32 = Types(frozenset({DType.F32}))
I32 = Types(frozenset({DType.I32}))


def operands(*src: Types, out: Types = FLOAT) -> Condition:
    """Require the types of the sources, in order (absent ones pass), and of the result."""
    made, taken = out.plain, [(i, types.plain, types.quantized) for i, types in enumerate(src)]

    def check(node: Tensor, casts: Casts) -> str | None:
        dtype = node.dtype
        if dtype not in made and not (out.quantized and dtype.is_quantized and casts.can_store(dtype)):
            return f"it cannot produce {dtype.name.lower()}"
        for s, (i, plain, quantized) in zip(node.src, taken):  # noqa: B905 - a keyword costs as much again
            if s is None or s.dtype in plain:
                continue
            dtype = s.dtype
            if not (quantized and dtype.is_quantized and casts.can_load(dtype)):
                return f"it cannot take {dtype.name.lower()} as src{i}"
            if not s.is_contiguous_rows():
                return f"the {dtype.name.lower()} rows of src{i} are not contiguous"
        return None

    return check


def has_elements(node: Tensor, casts: Casts) -> str | None:
    """Require that src0 has elements, where the result has some that follow from them."""
    if node.sources[0].is_empty and not node.is_empty:
        return "src0 has no elements to go on with"
    return None


def same_types(node: Tensor, casts: Casts) -> str | None:
    """Require that all sources have the type of the result: data is moved, not converted."""
    for i, s in enumerate(node.sources):
        if s.dtype != node.dtype:
            return f"src{i} is {s.dtype.name.lower()}, the result {node.dtype.name.lower()}"
        if not s.is_contiguous_rows() and s.dtype.is_quantized:
            return f"the rows of src{i} are not contiguous"
    return None


def contiguous(node: Tensor, casts: Casts) -> str | None:
    """Require that the result lies packed, as that of a node that is no view always does."""
    return None if node.is_contiguous() else "the result is not contiguous"
