"""Arguments of walks over operands: merged dimensions, and chunks for threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.common.strided import Mem, merged
from ggmlb.backends.llvm.codegen.host import kept_nbytes
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

VECTOR = 64
"""Bytes of the widest vectors."""

LEAST_PART = 2048
"""Elements that a part of a row has at least."""


def walk(
    ne: Ne,
    operands: Sequence[Tensor | Mem],
    steps: Steps,
    work: float,
    *,
    join: bool = True,
    cut: bool = True,
) -> tuple[list[int], int]:
    """Return the arguments of a walk and its chunks.

    Args:
        ne: The extents that are walked.
        operands: In the kernel's order; each of these extents, but that 1 stands for any.
        steps: Tells how many threads there are.
        work: Of an element [ns].
        join: Whether rows that follow each other in all operands may be seen as one.
        cut: Whether a row may be cut into parts.
    """
    extents: Sequence[int] = ne
    strides: list[Sequence[int]] = [_strides(o, ne) for o in operands]
    if join:
        merged_ne, merged_nbs = merged(extents, strides, keep_first=True)
        rest = 4 - len(merged_ne)
        extents, strides = [*merged_ne, *[1] * rest], [[*nb, *[0] * rest] for nb in merged_nbs]
    n_rows = extents[1] * extents[2] * extents[3]
    n = steps.chunks(extents[0] * n_rows * work)
    groups = min(n, n_rows)
    parts = 1
    if cut and groups < n:
        parts = max(1, min(-(-n // groups), extents[0] // LEAST_PART))
    args = [*extents, parts]
    for o, nb in zip(operands, strides, strict=True):
        args += (steps.address(o), *nb[1:])
    return args, groups * parts


def _strides(operand: Tensor | Mem, ne: Ne) -> Sequence[int]:
    """Return the strides of a walk [bytes]: 0 where one element is repeated, but not within a row of one."""
    nb = operand.nb
    if operand.ne[0] == 1:  # its own stride is never taken; as a whole row's, such rows may be joined by it
        nb = (operand.dtype.type_size, *nb[1:])
    if operand.ne == ne:
        return nb
    first = nb[0] if ne[0] == 1 else 0  # by which such rows are not joined to one that is longer than memory
    return [first if operand.ne[0] == 1 else nb[0]] + [
        0 if n == 1 else b for n, b in zip(operand.ne[1:], nb[1:], strict=True)
    ]


def past_caches(node: Tensor, steps: Steps) -> bool:
    """Whether to write a result past the caches, because a thread's operands do not fit there."""
    nbytes = sum(t.nbytes for t in (node, *node.src) if t is not None)
    if nbytes <= steps.n_threads * kept_nbytes():
        return False
    return not any(n % VECTOR for n in (steps.address(node), *node.nb[1:]))
