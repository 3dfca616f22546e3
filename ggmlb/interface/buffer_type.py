"""BufferType: a kind of memory."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.core.arguments import named
from ggmlb.core.errors import AllocationError, ArgumentError
from ggmlb.core.lifetime import Unique
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface.observe import Action
from ggmlb.interface.planned import PlannedBuffer, is_planning

if TYPE_CHECKING:
    from ggmlb.core.dtypes import DType
    from ggmlb.interface.buffer import Buffer
    from ggmlb.interface.device import Device


@named("a buffer type, as device.buffer_type")
class BufferType(Unique, ABC):
    """A kind of memory that a device can use (ggml_backend_buffer_type).

    Attributes:
        device: The device that the memory belongs to (ggml_backend_buft_get_device).
        name: Unique name, as `CPU`, `CUDA0`, `CUDA_Host` (ggml_backend_buft_name).
        alignment: Tensors start at multiples of this [bytes] (ggml_backend_buft_get_alignment).
        is_used: Whether a buffer was ever allocated.
    """

    is_used = False

    def __init__(self, device: Device, name: str, alignment: int) -> None:
        self.device = device
        self.name = name
        self.alignment = alignment

    @property
    def max_size(self) -> int:
        """Largest buffer that can be allocated [bytes] (ggml_backend_buft_get_max_size)."""
        return sys.maxsize

    @property
    def is_host(self) -> bool:
        """Whether NumPy can read and write the memory at its address (ggml_backend_buft_is_host)."""
        return False

    def alloc_size(self, tensor: Tensor) -> int:
        """Return the bytes that the tensor needs in this memory (ggml_backend_buft_get_alloc_size)."""
        return tensor.nbytes

    def suits(self, tensor: Tensor) -> bool:
        """Whether to place a weight in this memory, because products with it are then faster.

        For `extra_bufts`, which only products can read (some also `get_rows`); for other ops the scheduler
        copies the tensor, if it `is_readable`.
        """
        return True

    def is_readable(self, tensor: Tensor) -> bool:
        """Whether the bytes of a tensor can be read back from this memory, and copied to another.

        False only for memory that stores it in another type. A scheduler gives such a tensor to no device
        that would need a copy of it.
        """
        return True

    def stored_layout(self, tensor: Tensor) -> tuple[DType, Ne]:
        """Type and byte strides in which this memory stores a tensor; by default its own."""
        return tensor.dtype, tensor.nb

    def packing(self, tensor: Tensor) -> str:
        """Name of the layout in which this memory packs a tensor's blocks; empty for ggml's.

        Kernels for a packed layout have it as a suffix of the type's name.
        """
        return ""

    def alloc_buffer(self, nbytes: int) -> Buffer:
        """Reserve memory; its contents are undefined until written.

        Within `planned_memory`, none is reserved.

        Args:
            nbytes: Size asked for [bytes]; 0 gives a buffer that holds only empty tensors.

        Raises:
            AllocationError: The device lacks room; carries `asked`, `free`, `total` [bytes].
            ArgumentError: The size is negative or not a whole number.

        Source: ggml_backend_buft_alloc_buffer.
        """
        nbytes = int(nbytes)
        if nbytes < 0:
            raise ArgumentError(f"alloc_buffer on {self.name}: the size is {nbytes} bytes; give 0 or more")
        if nbytes > self.max_size:
            raise self.out_of_memory(nbytes, f"one buffer holds at most {self.max_size:,} bytes")
        self.is_used = True
        if is_planning():
            return self._planned_buffer(nbytes)
        with Action("alloc_buffer") as action:
            action.buffer = buffer = self._alloc_buffer(nbytes)
        return buffer

    def place_tensors(self, tensors: Sequence[Tensor]) -> Buffer | None:
        """Place the tensors of a context by a rule of this memory, such as over several devices.

        Without one, return `None`: `alloc_tensors` places them one after another in buffers of this type.
        """
        return None

    def out_of_memory(self, asked: int, detail: str = "") -> AllocationError:
        """Return the error that `asked` bytes did not fit, with free and total memory and a `detail`."""
        free, total = self.device.memory
        return AllocationError(
            f"{self.name}: no room for {asked:,} bytes ({free:,} of {total:,} free)"
            + (f": {detail}" if detail else "")
            + "; free buffers, ask for less, or use more devices",
            asked=asked,
            free=free,
            total=total,
        )

    @abstractmethod
    def _alloc_buffer(self, nbytes: int) -> Buffer:
        """Allocate; raise `self.out_of_memory(nbytes)` if the runtime reports a failure."""

    def _planned_buffer(self, nbytes: int) -> Buffer:
        """Return a buffer without memory; a type made of others allocates theirs instead."""
        return PlannedBuffer(self, nbytes)

    def __repr__(self) -> str:
        return f"<BufferType {self.name}>"
