"""Lowering of nodes to CUDA-only kernels and cuBLAS where suitable, else to portable kernels.

Converted activations of a product (8 bits, or the weights' type) may serve later products with the same input
(`gpu.kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.gemm import Gemm
from ggmlb.backends.cuda.kernels import attention, products
from ggmlb.backends.gpu import Launch, Target, can_fuse, declines, lower, lower_group
from ggmlb.backends.gpu.kinds import Prepared
from ggmlb.core.enums import NO_OPS, Op
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
    """Lowers nodes and groups, each by itself.

    Attributes:
        target: How work is split on the card.
        capability: Compute capability times ten: 90 for 9.0.
        blas: Whether products may be left to cuBLAS.
        ready: Forms of tensors that are there already, so that no steps need make them.
        prepared_forms: Forms of tensors that the last item reads.
    """

    def __init__(self, target: Target, capability: int, blas: bool = True) -> None:
        self.target = target
        self.capability = capability
        self.blas = blas
        self.ready: Collection[tuple[Tensor, str]] = ()
        self.prepared_forms: Prepared = {}

    def lower(self, node: Tensor) -> list[Step]:
        """Return the steps that compute a node that is not declined; none for views and empty results."""
        if node.op in NO_OPS or node.is_empty:
            return []
        self.prepared_forms = {}
        fast = self.fast(node)
        return [*lower(node, self.target)] if fast is None else fast

    def lower_group(self, group: Group) -> list[Step]:
        """Return the steps that compute a group of nodes that is taken."""
        self.prepared_forms = {}
        fast = self.fast_group(group)
        return [*lower_group(group, self.target)] if fast is None else fast

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

    def prepared(
        self, source: Tensor, form: str, make: Callable[[], tuple[list[Step], tuple[Mem, ...]]]
    ) -> tuple[list[Step], tuple[Mem, ...]]:
        """Return another form of a tensor's data, and the steps that make it (none if it is there).

        Args:
            source: The tensor.
            form: The form.
            make: Returns the steps and the place of their result.
        """
        known = self.prepared_forms.get((source, form))
        if known is not None:
            return [], known
        steps, mems = make()
        self.prepared_forms[source, form] = mems
        return ([] if (source, form) in self.ready else steps), mems


def _in_grid(steps: list[Step] | None) -> list[Step] | None:
    """Return the steps, if CUDA takes their grids."""
    if steps is not None and any(
        max(step.groups[1:]) > MAX_GROUPS for step in steps if isinstance(step, Launch)
    ):
        return None
    return steps
