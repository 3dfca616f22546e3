"""Padding and rolling, by copies of slices.

A run is a slice of the result along one dimension, and the source slice that is copied to it. Each
combination of the dimensions' runs is one copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np

from ggmlb.backends.common.rules import has_elements, operands, same_types
from ggmlb.backends.cpu.lowering import PLAIN, RULES, NodeLowering
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

Run = tuple[slice, slice]

_types = operands(PLAIN, out=PLAIN)


def _has_elements(node: Tensor) -> str | None:
    return has_elements(node) if node.params["circular"] else None


def _assemble(lw: NodeLowering, t: Tensor, runs: Iterable[list[Run]]) -> None:
    """Emit the copies of all blocks; `runs` by dimension, dimension 0 first."""
    y, x = lw.view(t), lw.view(t.sources[0])
    for block in product(*reversed(list(runs))):
        lw.emit(np.copyto, y[tuple(to for to, _ in block)], x[tuple(of for _, of in block)])


def _around(n: int, start: int, length: int) -> list[Run]:
    """`length` elements from `start` on, with wrap-around after the last of `n`."""
    runs, done = [], 0
    while done < length:
        first = (start + done) % n
        count = min(n - first, length - done)
        runs.append((slice(done, done + count), slice(first, first + count)))
        done += count
    return runs


def _mirrored(n: int, left: int, right: int) -> list[Run]:
    """All `n` elements, between those next to the ends once more, backwards."""
    end = left + n
    runs = [(slice(left, end), slice(0, n))]
    if left:
        runs.append((slice(0, left), slice(left, 0, -1)))
    if right:
        first = n - 1 - right
        runs.append((slice(end, end + right), slice(n - 2, first - 1 if first else None, -1)))
    return runs


@RULES.rule(Op.PAD, _types, same_types, _has_elements)
def pad(lw: NodeLowering, t: Tensor) -> None:
    """`a`, padded with zeros or, if `circular`, with its own elements (periodic)."""
    ne, left = t.sources[0].ne, t.params["left"]
    if t.params["circular"]:
        _assemble(lw, t, [_around(n, -p, length) for n, p, length in zip(ne, left, t.ne, strict=True)])
        return
    lw.emit(np.ndarray.fill, lw.view(t), 0)
    _assemble(lw, t, [[(slice(p, p + n), slice(0, n))] for n, p in zip(ne, left, strict=True)])


@RULES.rule(Op.PAD_REFLECT_1D, _types, same_types)
def pad_reflect_1d(lw: NodeLowering, t: Tensor) -> None:
    """Pad rows at both ends by their elements mirrored there."""
    n, *others = t.sources[0].ne
    runs = _mirrored(n, t.params["left"], t.params["right"])
    _assemble(lw, t, [runs, *([(slice(0, m), slice(0, m))] for m in others)])


@RULES.rule(Op.ROLL, _types, same_types)
def roll(lw: NodeLowering, t: Tensor) -> None:
    """`y[i] = a[i - shift]` in each dimension, with wrap-around."""
    _assemble(lw, t, [_around(n, -shift, n) for n, shift in zip(t.ne, t.params["shifts"], strict=True)])
