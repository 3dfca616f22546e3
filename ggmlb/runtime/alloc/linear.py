"""TensorAllocator: one tensor after another in a buffer that exists."""

from __future__ import annotations

from ggmlb.core import arguments
from ggmlb.core.errors import AllocationError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, tensor_alloc


def padded(nbytes: int, alignment: int) -> int:
    """Return `nbytes` rounded up to a multiple of `alignment` [bytes]."""
    return nbytes + -nbytes % alignment


@arguments.checked_methods
class TensorAllocator:
    """Places tensors in a buffer in the order of the calls, never to be taken back (ggml_tallocr).

    Attributes:
        buffer: Where it places them.
        used: Bytes given out so far, with what alignment costs.
    """

    __slots__ = ("buffer", "used")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.used = 0

    def alloc(self, tensor: Tensor) -> None:
        """Place a tensor after those placed before.

        Args:
            tensor: Neither a view nor placed before.

        Raises:
            AllocationError: The rest of the buffer is too small; carries `asked`, `free`, `total` [bytes].
            ArgumentError: The tensor is a view, or placed already.
            FreedError: The buffer was freed.

        Source: ggml_tallocr_alloc.
        """
        buffer = self.buffer
        size = padded(buffer.alloc_size(tensor), buffer.alignment)
        if self.used + size > buffer.size:
            free = buffer.size - self.used
            raise AllocationError(
                f"no room for {tensor.describe()} in a {buffer.name} buffer: it takes {size:,} bytes, "
                f"{free:,} of {buffer.size:,} are left; allocate a larger buffer "
                "(alloc_ctx_tensors_size says how large)",
                asked=size,
                free=free,
                total=buffer.size,
            )
        tensor_alloc(buffer, tensor, self.used)
        self.used += size
