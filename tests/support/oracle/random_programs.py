"""Programs that hypothesis draws."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ggmlb.testing.cases import FAMILIES
from ggmlb.testing.draw import Program


class Hypothesis:
    """Choices that hypothesis makes, and shrinks.

    Args:
        draw: Of hypothesis.
        beyond: Whether to choose what ggml's CPU backend does not take, too.
    """

    large = False
    plain = False

    def __init__(self, draw: st.DrawFn, beyond: bool) -> None:
        self.draw = draw
        self.beyond = beyond

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def number(self, low: float, high: float) -> float:
        return self.draw(st.floats(low, high, width=32))

    def pick(self, n: int) -> int:
        return self.draw(st.integers(0, n - 1))

    def order(self, items: Sequence[int]) -> Sequence[int]:
        return self.draw(st.permutations(items))

    def extents(self, limits: Sequence[int]) -> Sequence[int]:
        if self.integer(0, 19) == 19:
            limits = (30 * limits[0], *limits[1:])
        return tuple(self.integer(1, n if self.integer(0, 4) else 1) for n in limits)


@st.composite
def programs(draw: st.DrawFn, name: str, beyond: bool = False) -> Program:
    """Programs of a family."""
    program = Program(Hypothesis(draw, beyond))
    FAMILIES[name](program)
    return program
