"""Lowering of nodes to steps.

CUDA-only kernels and cuBLAS (`kernels`) are tried first, then the portable kernels, whose table decides
what is declined. A product with a split weight is computed by several devices, outside CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends import gpu
from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.cuda.buffer import CudaBuffer
from ggmlb.backends.cuda.kernels import MAX_GROUPS, Lowering
from ggmlb.backends.cuda.work import Part
from ggmlb.backends.gpu import Launch, Target
from ggmlb.core.enums import NO_OPS
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.parallel import row_split

if TYPE_CHECKING:
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.work import Binder, Request, UncapturedCall


def declines(node: Tensor, target: Target) -> str | None:
    """Return why nothing here computes a node; `None` if something does."""
    return row_split.declines(node) or gpu.declines(node) or _too_many_groups(node, target)


def _too_many_groups(node: Tensor, target: Target) -> str | None:
    if node.op in NO_OPS or max(node.ne[1:]) <= MAX_GROUPS >= node.ne[2] * node.ne[3]:
        return None
    for launch in gpu.lower(node, target):
        if max(launch.groups[1:]) > MAX_GROUPS:
            return f"its {launch.groups[1]} x {launch.groups[2]} groups of work are more than CUDA takes"
    return None


def can_fuse(group: Group, device: CudaDevice) -> bool:
    """Whether a kernel computes a group of nodes at once, and faster than one by one."""
    if any(row_split.is_split(node) for node in group.nodes):
        return False
    return Lowering(device.target, device.facts.capability, blas=device.has_blas).can_fuse(group)


def lower(graph: Graph, backend: CudaBackend, binder: Binder) -> list[Part]:
    """Return the parts of a graph whose nodes are not declined, in the order in which they run."""
    device = backend.device
    lowering = Lowering(device.target, device.facts.capability, blas=device.has_blas)
    parts: list[Part] = []
    for item in fuse(graph, backend.can_fuse):
        if isinstance(item, Group):
            parts.append(Part(item.nodes, list(lowering.lower_group(item))))
            continue
        node = item
        if node.op in NO_OPS or node.is_empty:
            continue
        if row_split.is_split(node):
            requests: list[Request] = [_split_product(node, backend, binder)]
            lowering.wrote(node)
        else:
            requests = [r for r in lowering.lower(node) if not _is_nothing(r)]
        parts.append(Part((node,), requests))
    return parts


def _split_product(node: Tensor, backend: CudaBackend, binder: Binder) -> UncapturedCall:
    product = row_split.RowSplitProduct(node, backend, backend.helpers)
    for buffer in product.buffers:
        assert isinstance(buffer, CudaBuffer)
        binder.use(buffer)
    return lambda stream: product.run()


def _is_nothing(request: Request) -> bool:
    return isinstance(request, Launch) and 0 in request.groups
