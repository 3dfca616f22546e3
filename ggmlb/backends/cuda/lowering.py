"""Lowering of nodes to steps.

The rules of CUDA-only kernels and cuBLAS (`kernels`) come before those of the portable kernels. A product
with a row-split weight is computed by several devices, outside CUDA graphs.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

from ggmlb.backends.common.fusion import Group, Item
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.cublas import Gemm
from ggmlb.backends.cuda.kernels import RULES
from ggmlb.backends.gpu import Launch, PreparedOperand, Target, argument_block, lower
from ggmlb.backends.gpu.source import tensor_words
from ggmlb.core.tensor import Tensor
from ggmlb.parallel import row_split

Request: TypeAlias = Launch | Gemm
"""A kernel launch or cuBLAS call, before memory is bound."""


def declines(node: Tensor, target: Target) -> str | None:
    """Return why a card cannot compute a node, or `None` if it can."""
    return row_split.declines(node) or RULES.declines(node, target)


def can_fuse(group: Group, target: Target) -> bool:
    """Whether a fused kernel computes the group (not if it has a row-split product)."""
    split = any([row_split.is_split(node) for node in group.nodes])
    return not split and RULES.find(group, target) is not None


class CudaLowering(NamedTuple):
    """Lowering of nodes and groups to kernel launches and cuBLAS calls (see `gpu.kinds.KindLowering`)."""

    target: Target

    def lower(self, item: Item) -> list[Request | PreparedOperand]:
        """Return the launches and cuBLAS calls that compute a node or group; empty grids are left out."""
        return [x for x in lower(item, self.target, RULES) if not isinstance(x, Launch) or 0 not in x.groups]

    def step(self, request: Request, slots: tuple[int, ...]) -> tuple[Request, Hashable]:
        """Return the step to cache and its key: CUDA graphs of steps with equal keys are interchangeable."""
        if isinstance(request, Launch):
            return request, (request.kernel.name, request.defines, request.wg)
        # The library may use other kernels for other shapes.
        shape = request.m, request.n, request.k, request.count, bool(request.places)
        return request, ("gemm", request.a.dtype, request.tf32, *shape)

    def mems(self, request: Request) -> Sequence[Mem]:
        """Return the tensor arguments of a launch or cuBLAS call."""
        if isinstance(request, Launch):
            return [arg for arg in request.args if isinstance(arg, Mem)]
        return request.mems

    def block(self, request: Request) -> bytes:
        """Return the packed arguments of a launch or cuBLAS call, with zeros in place of addresses."""
        if isinstance(request, Launch):
            return argument_block(request, "cuda")
        return struct.pack("6q", *[word for mem in request.mems for word in (0, mem.offset)])

    def address_words(self, request: Request) -> Sequence[int]:
        """Return where tensors are in the argument block of a launch or cuBLAS call, in words of 8 bytes."""
        return tensor_words(request.kernel, "cuda") if isinstance(request, Launch) else (0, 2, 4)
