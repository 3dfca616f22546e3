"""Lowering of nodes to CUDA-only kernels and cuBLAS where suitable, else to portable kernels.

Converted activations of a product (8 bits, or the weights' type) are reused by later products with the
same input, until it is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.gemm import Gemm
from ggmlb.backends.cuda.kernels import attention, products
from ggmlb.backends.gpu import Launch, Target, can_fuse, declines, lower, lower_group
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor

Step: TypeAlias = Launch | Gemm

_FAST = {
    Op.MUL_MAT: products.mul_mat,
    Op.MUL_MAT_ID: products.mul_mat_id,
    Op.FLASH_ATTN_EXT: attention.flash_attn,
}
_FAST_GROUPS = {"mul_mat_add": products.mul_mat_add, "glu": products.glu}

MAX_GROUPS = 65535
"""CUDA's limit of a grid's second and third extents."""


class Lowering:
    """Lowers the nodes of one plan, in the order in which they run.

    Attributes:
        target: How work is split on the card.
        capability: Compute capability times ten: 90 for 9.0.
        blas: Whether products may be left to cuBLAS.
    """

    def __init__(self, target: Target, capability: int, blas: bool = True) -> None:
        self.target = target
        self.capability = capability
        self.blas = blas
        self._prepared: dict[tuple[int, str], tuple[Tensor, tuple[Mem, ...]]] = {}

    def lower(self, node: Tensor) -> list[Step]:
        """Return the steps that compute a node that is not declined; none for views and empty results."""
        if node.op in NO_OPS or node.is_empty:
            return []
        fast = self.fast(node)
        steps: list[Step] = [*lower(node, self.target)] if fast is None else fast
        self.wrote(node)
        return steps

    def lower_group(self, group: Group) -> list[Step]:
        """Return the steps that compute a group of nodes that is taken."""
        fast = self.fast_group(group)
        steps: list[Step] = [*lower_group(group, self.target)] if fast is None else fast
        for node in group.nodes:  # results that are left out may hold what comes between
            self.wrote(node)
        return steps

    def can_fuse(self, group: Group) -> bool:
        """Whether a kernel computes a group of nodes at once, and faster than one by one.

        Products that CUDA's own kernels or cuBLAS take are better off so than in a portable kernel.
        """
        if any(declines(node) is not None for node in group.nodes):
            return False
        if any(self.fast(node) is not None for node in group.nodes):
            return self.fast_group(group) is not None
        return can_fuse(group, self.target)

    def fast(self, node: Tensor) -> list[Step] | None:
        """Return CUDA's own steps for a node, or None where the portable kernels are to be used."""
        rule = _FAST.get(node.op)
        return _in_grid(None if rule is None else rule(self, node))

    def fast_group(self, group: Group) -> list[Step] | None:
        """Return CUDA's own steps for a group, or None where there are none."""
        rule = _FAST_GROUPS.get(group.pattern)
        return _in_grid(None if rule is None else rule(self, group))

    def wrote(self, node: Tensor) -> None:
        """Discard prepared forms of memory that a node writes; called for every node in order."""
        if not self._prepared:
            return
        written = (node, *(node.sources[i] for i in SPECS[node.op].also_written))
        for key, (source, _) in list(self._prepared.items()):
            if any(source.buffer is t.buffer and _overlap(source, t) for t in written):
                del self._prepared[key]

    def prepared(
        self, source: Tensor, form: str, make: Callable[[], tuple[list[Step], tuple[Mem, ...]]]
    ) -> tuple[list[Step], tuple[Mem, ...]]:
        """Return another form of a tensor's data, and the steps that create it (none if cached).

        Args:
            source: The tensor.
            form: The form.
            make: Returns the steps and the place of their result.
        """
        known = self._prepared.get((id(source), form))
        if known is not None:
            return [], known[1]
        steps, mems = make()
        self._prepared[id(source), form] = source, mems
        return steps, mems


def _in_grid(steps: list[Step] | None) -> list[Step] | None:
    """Return the steps, if CUDA takes their grids."""
    if steps is not None and any(
        max(step.groups[1:]) > MAX_GROUPS for step in steps if isinstance(step, Launch)
    ):
        return None
    return steps


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
