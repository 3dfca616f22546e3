"""Differences between a result and its reference: the first wrong element, and where the wrong ones are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

TILE: Final = 4
"""Least extent and alignment of a block of wrong elements that is called a tile."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class WrongElements:
    """A result that is not that of the reference. Arrays are in NumPy's order; the text's indices in ggml's.

    Attributes:
        got: The device's elements; for blocks that must be equal, their bytes along a fifth axis.
        expected: The reference's.
        wrong: Mask of the wrong elements.
        allowed: The largest difference of an element that does not count as wrong.
        unwritten: Whether NaNs among the wrong elements are those that the kit fills memory with.
    """

    got: npt.NDArray[Any]
    expected: npt.NDArray[Any]
    wrong: Mask
    allowed: float = 0.0
    unwritten: bool = False

    @property
    def text(self) -> str:
        """The first wrong element, the number of wrong ones and where they are, and the largest error."""
        n, size = int(np.count_nonzero(self.wrong)), self.wrong.size
        if not n:
            return ""
        first = np.unravel_index(int(np.argmax(self.wrong)), self.wrong.shape)
        what = "block" if self.got.ndim > self.wrong.ndim else "element"
        told = [
            f"first wrong {what}: {_index(first, self.wrong.shape)}: {self._values(first)}",
            f"wrong {what}s: {n:,} of {size:,}, {pattern(self.wrong)}",
        ]
        if what == "element" and self.got.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                error = np.abs(self.got.astype(np.float64) - self.expected)
            error[~np.isfinite(error)] = -1
            largest = np.unravel_index(int(np.argmax(error)), error.shape)
            if error[largest] > 0:
                beyond = f"; above {self.allowed:.2g} counts as wrong" if self.allowed else ""
                told.append(
                    f"largest error: {error[largest]:.3g} at {_index(largest, error.shape)}: "
                    f"{self._values(largest)}{beyond}"
                )
        if self.unwritten:
            told.append("NaNs have the bytes of memory that was not written since the kit filled it")
        return "\n".join(told)

    def _values(self, index: tuple[Any, ...]) -> str:
        return f"expected {_value(self.expected[index])}, got {_value(self.got[index])}"


def of_floats(got: npt.NDArray[Any], expected: npt.NDArray[Any], limit: float = 0.0) -> WrongElements:
    """Return the difference of floats whose normalised mean squared error is above `limit`.

    An element is wrong if its error is above the root of the allowed mean: if the mean is above the limit,
    at least one is.
    """
    is_finite = np.isfinite(expected)
    mean = float(np.mean(expected[is_finite].astype(np.float64) ** 2)) if is_finite.any() else 0.0
    allowed = math.sqrt(limit * mean)
    with np.errstate(invalid="ignore"):
        off = np.abs(got.astype(np.float64) - expected)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected) & (limit == 0))
        wrong: Mask = ~same & ~(off <= allowed)
    return WrongElements(got, expected, wrong, allowed)


def pattern(wrong: Mask) -> str:
    """Say where the elements of a mask (NumPy order) are: a tail, rows, a tile, scattered, ..."""
    if wrong.all():
        return "all"
    if np.count_nonzero(wrong) == 1:
        return "only this one"
    flat = np.flatnonzero(wrong)
    if flat[0] == wrong.size - flat.size and flat.size % wrong.shape[-1]:
        return f"the tail: the last {flat.size:,} elements in succession"
    axes: list[Mask] = [
        np.asarray(wrong.any(axis=tuple(a for a in range(wrong.ndim) if a != wrong.ndim - 1 - i)))
        for i in range(wrong.ndim)
    ]
    if wrong[np.ix_(*reversed(axes))].all():
        parts = {i: axis for i, axis in enumerate(axes) if not axis.all()}
        told = ", ".join(f"i{i} {_span(axis)}" for i, axis in parts.items())
        return f"{_kind(parts)}: {told}"
    if flat[-1] - flat[0] == flat.size - 1:
        return f"{flat.size:,} elements in succession, from number {flat[0]:,} on"
    box = ", ".join(
        f"i{i} {np.flatnonzero(axis)[0]} to {np.flatnonzero(axis)[-1]}"
        for i, axis in enumerate(axes)
        if axis.size > 1
    )
    return f"scattered: {box}"


def _kind(parts: dict[int, Mask]) -> str:
    """Name a pattern whose indices along some axes are any of those in masks, and all along other axes."""
    runs = {i: _run(axis) for i, axis in parts.items()}
    if 0 not in parts:
        return "whole rows" if 1 in parts else "whole matrices"
    if list(parts) == [0]:
        run = runs[0]
        return "the tail of each row" if run and run[1] == parts[0].size else "in each row"
    if all(run is not None for run in runs.values()):
        ends = [runs[i] for i in (0, 1) if i in runs]
        is_tile = len(ends) == 2 and all(
            run is not None and run[1] - run[0] >= TILE and run[0] % TILE == 0 and _is_power(run[1] - run[0])
            for run in ends
        )
        return "a tile" if is_tile else "a block"
    return "a pattern"


def _span(axis: Mask) -> str:
    """Say which indices of a mask are set."""
    run = _run(axis)
    if run is not None:
        first, end = run
        told = f"= {first}" if end == first + 1 else f"= {first} to {end - 1}"
        return told + (f" (the last {end - first} of {axis.size})" if end == axis.size else "")
    for period in (2, 4, 8, 16, 32, 64, 128, 256):
        if period >= axis.size:
            break
        head = axis[:period]
        if _run(head) and np.array_equal(np.resize(head, axis.size), axis):
            return f"% {period} {_span(head).partition(' (')[0]}"
    n = int(np.count_nonzero(axis))
    return f"at {n} of {axis.size} places, from {np.flatnonzero(axis)[0]} to {np.flatnonzero(axis)[-1]}"


def _run(axis: Mask) -> tuple[int, int] | None:
    """Return the start and end of the set indices; `None` if there is a gap between them."""
    at = np.flatnonzero(axis)
    return (int(at[0]), int(at[-1]) + 1) if at.size and at[-1] - at[0] == at.size - 1 else None


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0


def _index(index: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    """Format an index in ggml's order, without trailing dimensions of extent 1."""
    n = max((i + 1 for i, extent in enumerate(reversed(shape)) if extent > 1), default=1)
    return str([int(i) for i in reversed(index)][:n])


def _value(value: Any) -> str:
    return value.tobytes().hex(" ") if isinstance(value, np.ndarray) else f"{value:.9g}"
