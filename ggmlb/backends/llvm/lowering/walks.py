"""Arguments of walks over operands: merged dimensions, and chunks for threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.host import kept_nbytes
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

VECTOR = 64
"""Bytes of the widest vectors."""

LEAST_PART = 2048
"""Elements that a part of a row has at least."""


@dataclass(slots=True)
class Operand:
    """A walk's operand: address and byte strides; 0 where one element is repeated."""

    address: int
    nb: tuple[int, int, int, int]


def operand(t: Tensor, steps: Steps, ne: Ne | None = None, offset: int = 0) -> Operand:
    """See a tensor as one of extents `ne`, which its own must equal or be 1."""
    nb = t.nb
    if t.ne[0] == 1:  # its own stride is never taken; as a whole row's, such rows may be joined by it
        nb = (t.dtype.type_size, *nb[1:])
    if ne is not None and ne != t.ne:
        nb = tuple(0 if n == 1 else b for n, b in zip(t.ne, nb, strict=True))  # type: ignore[assignment]
    return Operand(steps.address(t) + offset, nb)


def walk(
    ne: Ne, operands: Sequence[Operand], steps: Steps, work: float, *, join: bool = True, cut: bool = True
) -> tuple[list[int], int]:
    """Return the arguments of a walk and its chunks.

    Args:
        ne: The extents that are walked.
        operands: In the kernel's order.
        steps: Tells how many threads there are.
        work: Of an element [ns].
        join: Whether rows that follow each other in all operands may be seen as one.
        cut: Whether a row may be cut into parts.
    """
    extents, strides = list(ne), [list(o.nb) for o in operands]
    if join:
        i = 1
        while i < len(extents):
            if extents[i] == 1 or all(nb[i] == nb[i - 1] * extents[i - 1] for nb in strides):
                extents[i - 1] *= extents[i]
                del extents[i]
                for nb in strides:
                    del nb[i]
            else:
                i += 1
        extents += [1] * (4 - len(extents))
        for nb in strides:
            nb += [0] * (4 - len(nb))
    n_rows = extents[1] * extents[2] * extents[3]
    n = steps.chunks(extents[0] * n_rows * work)
    groups = min(n, n_rows)
    parts = 1
    if cut and groups < n:
        parts = max(1, min(-(-n // groups), extents[0] // LEAST_PART))
    args = [*extents, parts]
    for o, nb in zip(operands, strides, strict=True):
        args += (o.address, *nb[1:])
    return args, groups * parts


def past_caches(node: Tensor, steps: Steps) -> bool:
    """Whether to write a result past the caches, because a thread's operands do not fit there."""
    nbytes = sum(t.nbytes for t in (node, *node.src) if t is not None)
    if nbytes <= steps.n_threads * kept_nbytes():
        return False
    return not any(n % VECTOR for n in (steps.address(node), *node.nb[1:]))
