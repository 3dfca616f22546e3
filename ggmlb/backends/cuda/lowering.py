"""Lowering of nodes to steps.

CUDA-only kernels and cuBLAS (`kernels`) are tried first, then the portable kernels, whose table decides
what is declined. A product with a split weight is computed by several devices, outside CUDA graphs.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ggmlb.backends import gpu
from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.kinds import Item
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.gemm import Gemm
from ggmlb.backends.cuda.kernels import MAX_GROUPS, Lowering
from ggmlb.backends.gpu import Launch, Target, argument_block
from ggmlb.backends.gpu.kinds import Prepared
from ggmlb.backends.gpu.source import tensor_words
from ggmlb.core.enums import NO_OPS
from ggmlb.core.tensor import Tensor
from ggmlb.parallel import row_split

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice

Request: TypeAlias = Launch | Gemm
"""What is queued for an item, before it is bound."""


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


class CudaLowering(NamedTuple):
    """Lowers items for a card; a request's block of arguments is its kernel's, or cuBLAS' addresses.

    Attributes:
        target, capability, blas: As `kernels.Lowering` says.
    """

    target: Target
    capability: int
    blas: bool = True

    def lower(self, item: Item, ready: Collection[tuple[Tensor, str]]) -> tuple[list[Request], Prepared]:
        """As `gpu.kinds.KindLowering.lower`."""
        rules = Lowering(*self)
        rules.ready = ready
        found = rules.lower_group(item) if isinstance(item, Group) else rules.lower(item)
        return [request for request in found if not _is_nothing(request)], rules.prepared_forms

    def step(self, request: Request, slots: tuple[int, ...]) -> tuple[Request, Hashable]:
        """As `gpu.kinds.KindLowering.step`: the request, and its key without arguments."""
        if isinstance(request, Launch):
            return request, (request.kernel.name, request.defines, request.wg)
        # The library may use other kernels for other shapes.
        shape = request.m, request.n, request.k, request.count, bool(request.places)
        return request, ("gemm", request.a.dtype, *shape)

    def mems(self, request: Request) -> Sequence[Mem]:
        """As `gpu.kinds.KindLowering.mems`."""
        if isinstance(request, Launch):
            return [arg for arg in request.args if isinstance(arg, Mem)]
        return request.mems

    def block(self, request: Request) -> bytes:
        """As `gpu.kinds.KindLowering.block`."""
        if isinstance(request, Launch):
            return argument_block(request, "cuda")
        return struct.pack("6q", *[word for mem in request.mems for word in (0, mem.offset)])

    def address_words(self, request: Request) -> Sequence[int]:
        """As `gpu.kinds.KindLowering.address_words`."""
        return tensor_words(request.kernel, "cuda") if isinstance(request, Launch) else (0, 2, 4)


def _is_nothing(request: Request) -> bool:
    return isinstance(request, Launch) and 0 in request.groups
