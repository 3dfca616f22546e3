"""Buffer: an allocation of device or host memory that holds tensors."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage, as_enum
from ggmlb.core.errors import ArgumentError
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface.observe import QUIET, Access, Action, observers, reading
from ggmlb.interface.storage import Storage, check_byte

if TYPE_CHECKING:
    from ggmlb.interface.buffer_type import BufferType
    from ggmlb.interface.data import Bytes


class Buffer(Storage):
    """An allocation that holds tensors at byte offsets (ggml_backend_buffer).

    It is a piece of memory with its facts; how bytes go in and come out is that of a `Storage`.

    Attributes:
        buft: Its buffer type.
        size: Bytes.
    """

    def __init__(self, buft: BufferType, size: int) -> None:
        self.buft = buft
        self.size = size
        self._usage = BufferUsage.ANY

    # -- facts ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of its type (ggml_backend_buffer_name)."""
        return self.buft.name

    @property
    @abstractmethod
    def base(self) -> Any:
        """The memory as the array library sees it; a flat uint8 array where `is_host`.

        Source: ggml_backend_buffer_get_base.
        """

    @property
    def usage(self) -> BufferUsage:
        """Kind of its contents, read by the scheduler; set it to a member or its name.

        Raises:
            ArgumentError: There is no such usage.

        Source: ggml_backend_buffer_get_usage, ggml_backend_buffer_set_usage.
        """
        return self._usage

    @usage.setter
    def usage(self, usage: BufferUsage | str) -> None:
        self._usage = as_enum("buffer.usage", BufferUsage, usage)
        placement_clock.tick()  # plans leave out what nobody else reads of compute memory
        self._set_usage(self._usage)

    @property
    def is_host(self) -> bool:
        """Whether `base` is a NumPy array over the memory itself (ggml_backend_buffer_is_host)."""
        return self.buft.is_host

    @property
    def host_memory(self) -> Bytes | None:
        """The memory as a flat uint8 array; `None` if the host cannot access it."""
        return self.base if self.is_host else None

    @property
    def alignment(self) -> int:
        """Alignment of tensors [bytes] (ggml_backend_buffer_get_alignment)."""
        return self.buft.alignment

    @property
    def max_size(self) -> int:
        """Largest buffer of this type [bytes] (ggml_backend_buffer_get_max_size)."""
        return self.buft.max_size

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that the tensor takes here (ggml_backend_buffer_get_alloc_size)."""
        return self.buft.alloc_size(tensor)

    def stored_layout(self, tensor: Tensor) -> tuple[DType, Ne]:
        """Type and byte strides of a tensor in this memory; its own unless it is stored in another layout."""
        return tensor.dtype, tensor.nb

    def packing(self, tensor: Tensor) -> str:
        """Name of the byte order of a tensor's blocks in this memory; empty for ggml's own.

        Kernels for another order have it as a suffix of the type's name.
        """
        return ""

    @property
    def prepares_tensors(self) -> bool:
        """Whether `init_tensor` does anything here."""
        return type(self)._init_tensor is not Buffer._init_tensor

    # -- data ----------------------------------------------------------------------------------

    def tensor_copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy a tensor in this buffer; see `ggmlb.tensor_copy` (ggml_backend_tensor_copy)."""
        from ggmlb.interface.transfer import tensor_copy

        tensor_copy(src, dst)

    def init_tensor(self, tensor: Tensor) -> None:
        """Prepare a tensor just placed here (ggml_backend_buffer_init_tensor)."""
        self.check_alive("init_tensor")
        self._init_tensor(tensor)

    def clear(self, value: int = 0) -> None:
        """Set every byte to `value` (ggml_backend_buffer_clear).

        Raises:
            ArgumentError: `value` is not a byte.
            FreedError: The buffer was freed.
        """
        self.check_alive("clear")
        check_byte("clear", value)
        if self.size:
            self.check_writable("clear")
            everything = [Access(self, 0, self.size, is_write=True, tensor=None)] if observers else []
            with Action("clear", None, everything) if observers else QUIET:
                self._clear(value)

    def reset(self) -> None:
        """Discard the preparations of `init_tensor` (ggml_backend_buffer_reset)."""
        self.check_alive("reset")
        self._reset()

    def free(self) -> None:
        """Free the memory; its tensors must not be used any more (ggml_backend_buffer_free).

        Raises:
            FreedError: The buffer was freed before.
        """
        self.check_alive("free")
        with Action("free", buffer=self) if observers else QUIET:
            self.is_freed = True
            placement_clock.tick()  # plans that use the memory must notice
            self._free()

    def as_array(self, tensor: Tensor) -> Any:
        """Return the memory of a tensor in this buffer as an array of the device's library, without a copy.

        A quantised tensor is returned as rows of bytes. See `Tensor.as_array`.

        Raises:
            ArgumentError: The memory has no array library or stores another layout, or the tensor is in
                another buffer.
            FreedError: The buffer was freed.
        """
        self.check_holds(tensor, "as_array")
        if self.stored_layout(tensor) != (tensor.dtype, tensor.nb):
            raise ArgumentError(
                f"as_array on {tensor.describe()}: {self.name} memory stores it in another type or layout; "
                "use to_numpy() for a copy"
            )
        n = tensor.n_dims
        shape, strides = tensor.ne[:n][::-1], tensor.nb[:n][::-1]
        if tensor.dtype.is_quantized:
            shape, strides = (*shape[:-1], tensor.dtype.row_size(tensor.ne[0])), (*strides[:-1], 1)
            return self._as_array(tensor, np.dtype(np.uint8), shape, strides)
        return self._as_array(tensor, tensor.dtype.numpy, shape, strides)

    def exported(self, tensor: Tensor, call: str) -> Any:
        """As `as_array`, for an array protocol, whose caller may read immediately: waits for queued work."""
        if observers:
            self.check_alive(call)
            with Action(call, None, [reading(tensor)]):
                return self.as_array(tensor)
        return self.as_array(tensor)

    # -- checks --------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"this {self.name} buffer of {self.size:,} bytes"

    # -- hooks ---------------------------------------------------------------------------------

    @abstractmethod
    def _clear(self, value: int) -> None:
        """Set all bytes."""

    def _init_tensor(self, tensor: Tensor) -> None:
        """Prepare a tensor."""

    def _as_array(
        self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        if self.is_host:
            return np.ndarray(shape, dtype, self.base, tensor.offset, strides)
        raise ArgumentError(f"as_array on {tensor.describe()}: {self.name} memory has no array library")

    def _reset(self) -> None:
        """Discard prepared tensors."""

    def _set_usage(self, usage: BufferUsage) -> None:
        """React to a new usage."""

    def _free(self) -> None:
        """Release the memory, once queued work that uses it has finished."""

    # -- Python --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "freed" if self.is_freed else self.usage.value
        return f"<Buffer {self.name} {self.size:,} bytes, {state}>"
