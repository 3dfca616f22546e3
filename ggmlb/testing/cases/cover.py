"""Going through a family's choices: every alternative is drawn, in few programs, and always the same ones.

A program's choices are taken least-used first, so that each type, layout, mode and flag of a family comes up
at least `TIMES` times. Sizes follow a cycle: odd ones, ones, empty ones, large ones.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import numpy as np

from ggmlb.errors import ArgumentError, Error
from ggmlb.testing.cases.draw import FAMILIES, Program

TIMES = 2
"""How often each alternative is drawn, at least."""
LEAST, MOST = 12, 150
"""Programs of a family."""
ROW = 1000
"""About the length of a long row."""


class Size(Enum):
    """How large the tensors of a program are."""

    ODD = "odd"
    ONE = "one"
    LARGE = "large"
    EMPTY = "empty"
    NO_ROW = "no row"


CYCLE = (Size.ODD, Size.ODD, Size.LARGE, Size.ONE, Size.NO_ROW, Size.ODD, Size.EMPTY)


@dataclass(frozen=True, slots=True)
class KitCase:
    """A program to compute on two devices.

    Attributes:
        family: The name of its family.
        id: Op, types, shapes and layouts: `"mul_mat(q4_0[64,17],f32[64,5].padded)"`; unique.
        ops: Names by which it can be chosen: of the function and of the op.
        program: What to compute.
        memory: The kind of memory in which the op's first operand lies; the device's own if empty.
    """

    family: str
    id: str
    ops: frozenset[str]
    program: Program
    memory: str = ""

    def within(self, memory: str) -> KitCase:
        """Return the same case with the op's first operand, a weight, in another kind of memory."""
        return replace(self, id=f"{self.id} in {memory}", memory=memory)


class Covering:
    """Choices of one program.

    Args:
        size: How large its tensors are.
        seed: Where random numbers start.
        used: How often each alternative was drawn, by (place in the program, number of alternatives).
    """

    beyond = True

    def __init__(self, size: Size, seed: int, used: dict[tuple[int, int], Counter[int]]) -> None:
        self.size = size
        self.large = size is Size.LARGE
        self.random = np.random.default_rng(seed)
        self.used = used
        self.n_picks = 0

    def integer(self, low: int, high: int) -> int:
        """A random number; the lowest in small programs.

        Raises:
            ArgumentError: There is none: extents before it leave no room.
        """
        if low > high:
            raise ArgumentError(f"no number lies from {low} to {high}")
        if self.size is Size.ONE and high < 1000:
            return low
        return int(self.random.integers(low, high, endpoint=True))

    def number(self, low: float, high: float) -> float:
        """A random float32."""
        return float(np.float32(self.random.uniform(low, high)))

    def pick(self, n: int) -> int:
        """The alternative that was drawn least often here, one of them at random."""
        used = self.used.setdefault((self.n_picks, n), Counter())
        self.n_picks += 1
        fewest = min(used[i] for i in range(n))
        choice = int(self.random.choice([i for i in range(n) if used[i] == fewest]))
        used[choice] += 1
        return choice

    def order(self, items: Sequence[int]) -> Sequence[int]:
        """A random order."""
        return [int(i) for i in self.random.permutation(list(items))]

    def extents(self, limits: Sequence[int]) -> Sequence[int]:
        """Extents of the program's size."""
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


@cache
def cases_of(family: str) -> tuple[KitCase, ...]:
    """Return the programs that cover a family."""
    used: dict[tuple[int, int], Counter[int]] = {}
    found: dict[str, KitCase] = {}
    for number in range(MOST):
        choices = Covering(CYCLE[number % len(CYCLE)], zlib.crc32(f"{family} {number}".encode()), used)
        program = Program(choices)
        try:
            FAMILIES[family](program)
            built = program.case().build()
        except (Error, ValueError):  # such extents do not go together
            continue
        node = built.tensors[program.outputs[0]]
        ops = {program.fn, program.fn.removesuffix("_inplace"), node.op.value.lower(), node.op_desc().lower()}
        found.setdefault(program.text, KitCase(family, program.text, frozenset(ops), program))
        covered = all(counts[i] >= TIMES for (_, n), counts in used.items() for i in range(n))
        if number >= LEAST and covered:
            break
    return tuple(found.values())
