"""From nodes to steps.

What computes a node is looked for in three places, in this order: CUDA's own kernels and cuBLAS, by compute
capability (`kernels`); the portable kernels, which compute everything that they do not decline; and the array
rules, for what has no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends import gpu
from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.cuda import array
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
    from ggmlb.backends.cuda.work import Binder, Outside, Request


def declines(node: Tensor, target: Target) -> str | None:
    """Return why nothing here computes a node; `None` if something does."""
    why = row_split.declines(node)
    if why is not None:
        return why
    why = gpu.declines(node)
    if why is None:
        return _too_many_groups(node, target)
    return why if array.declines(node) is not None else None


def _too_many_groups(node: Tensor, target: Target) -> str | None:
    if node.op in NO_OPS or max(node.ne[1:]) <= MAX_GROUPS >= node.ne[2] * node.ne[3]:
        return None
    for launch in gpu.lower(node, target):
        if max(launch.groups[1:]) > MAX_GROUPS:
            return f"its {launch.groups[1]} x {launch.groups[2]} groups of work are more than CUDA takes"
    return None


def takes(group: Group, device: CudaDevice) -> bool:
    """Whether a kernel computes a group of nodes at once, and faster than one by one."""
    if any(row_split.is_split(node) for node in group.nodes):
        return False
    return Lowering(device.target, device.facts.capability, blas=device.has_blas).takes(group)


def lower(graph: Graph, backend: CudaBackend, binder: Binder) -> list[Part]:
    """Return the parts of a graph whose nodes are not declined, in the order in which they run."""
    device = backend.device
    lowering = Lowering(device.target, device.facts.capability, blas=device.has_blas)
    rules: array.ArrayLowering | None = None
    parts: list[Part] = []
    for item in fuse(graph, backend.takes):
        if isinstance(item, Group):
            parts.append(Part(item.nodes, list(lowering.lower_group(item))))
            continue
        node = item
        if node.op in NO_OPS or node.is_empty:
            continue
        if row_split.is_split(node):
            requests: list[Request] = [_split_product(node, backend, binder)]
            lowering.wrote(node)
        elif gpu.declines(node) is None:
            requests = [r for r in lowering.lower(node) if not _is_nothing(r)]
        else:
            rules = rules or array.ArrayLowering(backend, binder)
            requests = [rules.step(node)]
            lowering.wrote(node)
        parts.append(Part((node,), requests))
    return parts


def _split_product(node: Tensor, backend: CudaBackend, binder: Binder) -> Outside:
    product = row_split.RowSplitProduct(node, backend, backend.helpers)
    for buffer in product.buffers:
        assert isinstance(buffer, CudaBuffer)
        binder.use(buffer)
    return lambda stream: product.run()


def _is_nothing(request: Request) -> bool:
    return isinstance(request, Launch) and 0 in request.groups
