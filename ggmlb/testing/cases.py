"""The kit's table of cases, drawn by the families in `ggmlb.testing.ops`.

Few programs cover every alternative of every choice, and they are always the same.

A family's first program is its plainest: the first alternative of each choice, on small matrices. The
last ones differ from it in one choice each, for devices that support few variants. The others mix choices,
least-used alternatives first, so that each type, layout, mode and flag occurs at least `TIMES` times, with
sizes in a cycle: odd, ones, empty, large.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Final

import numpy as np

from ggmlb.core.errors import ArgumentError, Error
from ggmlb.testing.draw import Choices, Program
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.ops.record import Family

FAMILIES: Final[dict[str, Family]] = {
    name: draw for record in RECORDS.values() for name, draw in record.families.items()
}
"""Functions that draw programs, by the name of the family."""

NOT_OF_GGML: Final = frozenset(name for r in RECORDS.values() if not r.of_ggml for name in r.families)
"""Families whose programs only Python computes, not ggml."""

TIMES = 2
"""Number of times that each alternative is drawn at least."""
LEAST, MOST = 12, 150
"""Least and largest number of mixed programs of a family."""
ROW = 1000
"""About the length of a long row."""


class Size(Enum):
    """Size class of a program's tensors: odd (any extents), one, large, empty, or no row (rows of 0)."""

    ODD = "odd"
    ONE = "one"
    LARGE = "large"
    EMPTY = "empty"
    NO_ROW = "no row"


CYCLE = (Size.ODD, Size.ODD, Size.LARGE, Size.ONE, Size.NO_ROW, Size.ODD, Size.EMPTY)


@dataclass(frozen=True, slots=True)
class KitCase:
    """A test program, computed by the device under test and by the reference to compare their results.

    Attributes:
        family: The name of its family.
        id: Op, types, shapes and layouts: `"mul_mat(q4_0[64,17],f32[64,5].padded)"`; unique.
        ops: Names that select it: of the function and of the op.
        program: The program to compute.
        op: The op of its result, as `Tensor.op_desc` names it.
        memory: The buffer type of the op's first operand; the device's own if empty.
    """

    family: str
    id: str
    ops: frozenset[str]
    program: Program
    op: str
    memory: str = ""

    def within(self, memory: str) -> KitCase:
        """Return the same case with the op's first operand, a weight, in another buffer type."""
        return replace(self, id=f"{self.id} in {memory}", memory=memory)


class PlainChoices:
    """Takes the first alternative at each choice of a test program, except at one choice (`other`), if given.

    Args:
        seed: Seed of random numbers.
        other: Index and alternative of the choice that differs.
    """

    beyond = True
    large = False
    plain = True

    def __init__(self, seed: int, other: tuple[int, int] | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.other = other
        self.alternatives: list[int] = []

    def integer(self, low: int, high: int) -> int:
        """Return a random number from the upper half of the range, so that extents are seldom 1.

        Raises:
            ArgumentError: The interval is empty.
        """
        _check_range(low, high)
        return int(self.random.integers((low + high + 1) // 2, high, endpoint=True))

    def number(self, low: float, high: float) -> float:
        """Return a random float32 from `low` to `high`."""
        return float(np.float32(self.random.uniform(low, high)))

    def pick(self, n: int) -> int:
        """Return 0 (first of `n` alternatives), unless `other` names this choice and another index."""
        self.alternatives.append(n)
        place, choice = self.other or (-1, 0)
        return choice if place == len(self.alternatives) - 1 else 0

    def order(self, items: Sequence[int]) -> Sequence[int]:
        """Return the items in an order other than given: the first moved to the end."""
        return [*items[1:], *items[:1]]

    def extents(self, limits: Sequence[int]) -> Sequence[int]:
        """Return extents of a matrix: at least 2 for the first two limits, and 1 for the others."""
        rows = [max(2, self.integer(1, n)) for n in limits[:2]]
        return [*rows, *(1 for _ in limits[2:])]


class CoveringChoices:
    """Takes the least-used alternative of each choice, so that few programs cover all.

    Args:
        size: How large its tensors are.
        seed: Seed of random numbers.
        used: Count of each drawn alternative, by (index in the program, number of alternatives).
    """

    beyond = True
    plain = False

    def __init__(self, size: Size, seed: int, used: dict[tuple[int, int], Counter[int]]) -> None:
        self.size = size
        self.large = size is Size.LARGE
        self.random = np.random.default_rng(seed)
        self.used = used
        self.n_picks = 0

    def integer(self, low: int, high: int) -> int:
        """Return a random number from `low` to `high`; `low` if the program's size class is `Size.ONE`.

        Raises:
            ArgumentError: The interval is empty.
        """
        _check_range(low, high)
        if self.size is Size.ONE and high < 1000:
            return low
        return int(self.random.integers(low, high, endpoint=True))

    def number(self, low: float, high: float) -> float:
        """Return a random float32 from `low` to `high`."""
        return float(np.float32(self.random.uniform(low, high)))

    def pick(self, n: int) -> int:
        """Return the least-used alternative of this choice, at random among equals."""
        used = self.used.setdefault((self.n_picks, n), Counter())
        self.n_picks += 1
        fewest = min(used[i] for i in range(n))
        choice = int(self.random.choice([i for i in range(n) if used[i] == fewest]))
        used[choice] += 1
        return choice

    def order(self, items: Sequence[int]) -> Sequence[int]:
        """Return the items in random order."""
        return [int(i) for i in self.random.permutation(list(items))]

    def extents(self, limits: Sequence[int]) -> Sequence[int]:
        """Return random extents up to `limits`; by size class all are 1, one is 0, or the first is large."""
        if self.size is Size.ONE:
            return [1] * len(limits)
        extents = [int(self.random.integers(1, n, endpoint=True)) for n in limits]
        if self.size is Size.LARGE:
            extents[0] = max(extents[0], limits[0] - 1) * (1 + ROW // max(4 * limits[0], 70))
        if self.size is Size.NO_ROW:
            extents[0] = 0
        if self.size is Size.EMPTY:
            extents[int(self.random.integers(0, len(extents)))] = 0
        return extents


def _check_range(low: int, high: int) -> None:
    if low > high:
        raise ArgumentError(f"there is no number from {low} to {high}")


@cache
def cases_of(family: str) -> tuple[KitCase, ...]:
    """Return the cases of a family (a function that draws test programs), the plainest first."""
    first = PlainChoices(_seed(family, "plain"))
    drawn = [_case(family, first), *_mixed(family), *_one_choice_away(family, first.alternatives)]
    found: dict[str, KitCase] = {}
    for case in drawn:
        if case is not None:
            found.setdefault(case.id, case)
    return tuple(found.values())


def _mixed(family: str) -> Iterator[KitCase | None]:
    """Yield programs until each alternative was drawn `TIMES` times."""
    used: dict[tuple[int, int], Counter[int]] = {}
    for number in range(MOST):
        case = _case(family, CoveringChoices(CYCLE[number % len(CYCLE)], _seed(family, str(number)), used))
        yield case
        covered = all(counts[i] >= TIMES for (_, n), counts in used.items() for i in range(n))
        if case is not None and number >= LEAST and covered:
            return


def _one_choice_away(family: str, alternatives: Sequence[int]) -> Iterator[KitCase | None]:
    """Yield programs that differ in one choice from the plainest, given its numbers of alternatives."""
    for place, n in enumerate(alternatives):
        for other in range(1, n):
            yield _case(family, PlainChoices(_seed(family, "plain"), (place, other)))


def _case(family: str, choices: Choices) -> KitCase | None:
    """Draw a program; `None` if its extents do not match."""
    program = Program(choices)
    try:
        FAMILIES[family](program)
        built = program.case().build()
    except (Error, ValueError):
        return None
    node = built.tensors[program.outputs[0]]
    ops = {program.fn, program.fn.removesuffix("_inplace"), node.op.value.lower(), node.op_desc().lower()}
    return KitCase(family, program.text, frozenset(ops), program, node.op_desc())


def _seed(family: str, name: str) -> int:
    return zlib.crc32(f"{family} {name}".encode())
