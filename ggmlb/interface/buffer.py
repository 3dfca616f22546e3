"""Buffer: an allocation that holds tensors. MultiBuffer: several that are used as one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ggmlb.core.arguments import named
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage, as_enum
from ggmlb.core.errors import ArgumentError, BackendError, BoundsError, ShapeError
from ggmlb.core.lifetime import Freeable
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface.data import NEW, Bytes, Pieces, Source
from ggmlb.interface.observe import Access, Action, observers, reading, writing
from ggmlb.interface.transfer import move, tensor_copy

if TYPE_CHECKING:
    from ggmlb.interface.buffer_type import BufferType


@named("a buffer, as alloc_ctx_tensors makes one")
class Buffer(Freeable):
    """An allocation that holds tensors at byte offsets (ggml_backend_buffer).

    Its transfers are done when the call returns; those of a `Backend` are queued.

    Attributes:
        buft: Its buffer type.
        size: Bytes.
        is_read_only: Whether it is over a caller's read-only memory.
    """

    is_read_only = False

    def __init__(self, buft: BufferType, size: int) -> None:
        self.buft = buft
        self.size = size
        self._usage = BufferUsage.ANY

    # -- properties ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of its type (ggml_backend_buffer_name)."""
        return self.buft.name

    @property
    @abstractmethod
    def base(self) -> Any:
        """The memory as an object of the device's library; a flat uint8 array if `is_host`.

        Source: ggml_backend_buffer_get_base.
        """

    @property
    def usage(self) -> BufferUsage:
        """Purpose of the buffer, which guides the scheduler; settable, also by name.

        Raises:
            ArgumentError: There is no such usage.

        Source: ggml_backend_buffer_get_usage, ggml_backend_buffer_set_usage.
        """
        return self._usage

    @usage.setter
    def usage(self, usage: BufferUsage | str) -> None:
        self._usage = as_enum("buffer.usage", BufferUsage, usage)
        placement_clock.tick()  # plans do not store fused results in compute memory
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
    def is_planned(self) -> bool:
        """Whether it has no memory, because it was allocated within `planned_memory`."""
        return False

    @property
    def allocations(self) -> tuple[Buffer, ...]:
        """The underlying allocations, either the buffer itself or those of its parts."""
        return (self,)

    def slices(self, root: Tensor) -> tuple[Tensor, ...]:
        """Return `root`, a tensor that is no view, or its slice on each device if the buffer has several."""
        return (root,)

    @property
    def alignment(self) -> int:
        """Alignment of tensors [bytes] (ggml_backend_buffer_get_alignment)."""
        return self.buft.alignment

    @property
    def max_size(self) -> int:
        """Largest buffer of this type [bytes] (ggml_backend_buffer_get_max_size)."""
        return self.buft.max_size

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that the tensor needs in this memory (ggml_backend_buffer_get_alloc_size)."""
        return self.buft.alloc_size(tensor)

    def stored_layout(self, tensor: Tensor) -> tuple[DType, Ne]:
        """Type and byte strides with which this memory stores a tensor; by default the tensor's own."""
        return self.buft.stored_layout(tensor)

    def packing(self, tensor: Tensor) -> str:
        """Name of the layout in which this memory packs a tensor's blocks; empty for ggml's."""
        return self.buft.packing(tensor)

    @property
    def prepares_tensors(self) -> bool:
        """Whether `init_tensor` has an effect in this memory."""
        return type(self)._init_tensor is not Buffer._init_tensor

    # -- data ----------------------------------------------------------------------------------

    def set_tensor(
        self,
        tensor: Tensor,
        data: Source,
        offset: int = 0,
        size: int | None = None,
    ) -> None:
        """Write raw bytes into a tensor; `data` may be changed as soon as this returns.

        Args:
            tensor: A tensor in this buffer.
            data: Its raw bytes, of any contiguous type.
            offset: Where to begin in the tensor [bytes].
            size: Bytes of `data` to write; by default all.

        Raises:
            BoundsError: The bytes end beyond the tensor, or `data` is shorter than `size`.
            FreedError: The buffer was freed.

        Source: ggml_backend_tensor_set.
        """
        move("set_tensor", True, self, tensor, data, offset, self._set_tensor, None, size)

    def get_tensor(
        self, tensor: Tensor, offset: int = 0, size: int | None = None, out: Bytes | None = None
    ) -> Bytes:
        """Read raw bytes of a tensor from `offset` on, into `out` if given; return them.

        Args:
            tensor: A tensor in this buffer.
            offset: Where to begin in the tensor [bytes].
            size: Bytes to read; by default to the tensor's end, or the size of `out`.
            out: Array to fill and return, if given.

        Raises:
            ArgumentError: `out` is not a writable contiguous array.
            BoundsError: The bytes end beyond the tensor, or `out` has another size.
            FreedError: The buffer was freed.

        Source: ggml_backend_tensor_get.
        """
        data = NEW if out is None else out
        return move("get_tensor", False, self, tensor, data, offset, self._get_tensor, None, size)

    def memset_tensor(self, tensor: Tensor, value: int, offset: int = 0, size: int | None = None) -> None:
        """Set `size` bytes of a tensor to `value` (ggml_backend_tensor_memset).

        Raises:
            ArgumentError: `value` is not a byte.
            BoundsError: The bytes end beyond the tensor.
            FreedError: The buffer was freed.
        """
        offset, n = self.check_range(tensor, "memset_tensor", offset, size)
        _check_byte("memset_tensor", value)
        if n:
            self.check_writable("memset_tensor", tensor)
            if observers:
                start = tensor.offset + offset
                action = Action("memset_tensor", None, [Access(self, start, start + n, True, tensor)])
                return action.run(self._memset_tensor, tensor, value, offset, n)
            self._memset_tensor(tensor, value, offset, n)

    def set_tensor_2d(
        self,
        tensor: Tensor,
        data: Source,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        """Write `n_copies` pieces of `size` bytes, `stride_data` apart, to offsets `stride_tensor` apart.

        Raises:
            BoundsError: A piece ends beyond the tensor or the data.
            FreedError: The buffer was freed.

        Source: ggml_backend_tensor_set_2d.
        """
        pieces = Pieces(offset, size, n_copies, stride_tensor, stride_data)
        move("set_tensor_2d", True, self, tensor, data, pieces, self._set_tensor_2d)

    def get_tensor_2d(
        self,
        tensor: Tensor,
        data: Bytes,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        """Read `n_copies` pieces of `size` bytes, `stride_tensor` apart, into `data`, `stride_data` apart.

        Raises:
            ArgumentError: `data` is not a writable contiguous array.
            BoundsError: A piece ends beyond the tensor or the data.
            FreedError: The buffer was freed.

        Source: ggml_backend_tensor_get_2d.
        """
        pieces = Pieces(offset, size, n_copies, stride_tensor, stride_data)
        move("get_tensor_2d", False, self, tensor, data, pieces, self._get_tensor_2d)

    def cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        """Copy `src`, in any buffer, directly to `dst`, in this one, if possible; return whether it was.

        Returns:
            Whether it was done; if not, the caller copies through host memory.

        Source: ggml_backend_buffer_copy_tensor.
        """
        self.check_writable("cpy_tensor", dst)
        if observers:
            return Action("cpy_tensor", None, [reading(src), writing(dst)]).run(self._cpy_tensor, src, dst)
        return self._cpy_tensor(src, dst)

    def tensor_copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy `src` to `dst`, of the same layout, in any buffers (ggml_backend_tensor_copy)."""
        tensor_copy(src, dst)

    def init_tensor(self, tensor: Tensor) -> None:
        """Let this memory prepare a newly placed tensor, if it needs to (ggml_backend_buffer_init_tensor)."""
        self._init_tensor(tensor)

    def clear(self, value: int = 0) -> None:
        """Set every byte to `value` (ggml_backend_buffer_clear).

        Raises:
            ArgumentError: `value` is not a byte.
            FreedError: The buffer was freed.
        """
        _check_byte("clear", value)
        if self.size:
            self.check_writable("clear")
            if observers:
                return Action("clear", None, [Access(self, 0, self.size, True, None)]).run(self._clear, value)
            self._clear(value)

    def reset(self) -> None:
        """Undo `init_tensor` for all tensors (ggml_backend_buffer_reset)."""
        self._reset()

    def free(self) -> None:
        """Free the memory; its tensors must not be used any more (ggml_backend_buffer_free).

        Raises:
            FreedError: The buffer was freed before.
        """
        with Action("free", buffer=self):
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
        """Return `as_array(tensor)` once queued work is done, reported to observers as `call`."""
        if observers:
            return Action(call, None, [reading(tensor)]).run(self.as_array, tensor)
        return self.as_array(tensor)

    # -- checks --------------------------------------------------------------------------------

    def check_holds(self, tensor: Tensor, call: str) -> None:
        """Raise unless the tensor is in this buffer, with whole blocks in its rows; errors begin with `call`.

        Raises:
            ArgumentError: It is in another buffer, or in none.
            ShapeError: It is a transposed view of blocks.
            FreedError: The buffer was freed.
        """
        if self.is_freed:
            self.check_alive(call)
        if tensor.dtype.is_quantized and not tensor.has_whole_blocks():
            raise ShapeError(
                f"{call} on {tensor.describe()}: a transposed view splits {tensor.dtype} blocks; "
                "use its source, or transpose a copy of that in f32"
            )
        if tensor.buffer is not self:
            where = "no buffer yet" if tensor.buffer is None else f"another buffer, {tensor.buffer!r}"
            raise ArgumentError(
                f"{call} on {tensor.describe()}: the tensor is in {where}; call methods of the tensor, "
                "which find its buffer"
            )

    def check_writable(self, call: str, tensor: Tensor | None = None) -> None:
        """Raise if the buffer is read-only; the message names call and tensor.

        Raises:
            BackendError: The buffer is read-only.
        """
        if self.is_read_only:
            what = f"write to {tensor.describe()}" if tensor is not None else "write"
            raise BackendError(
                f"{call} cannot {what}: {self!r} is read-only host memory; copy the data into "
                "another buffer first"
            )

    def check_range(self, tensor: Tensor, call: str, offset: int, size: int | None) -> tuple[int, int]:
        """Check a byte range of a tensor; return offset and size as Python ints. Errors begin with `call`.

        Raises:
            ArgumentError: The tensor is in another buffer.
            BoundsError: The range ends beyond the tensor.
            FreedError: The buffer was freed.
        """
        self.check_holds(tensor, call)
        offset = index(offset)
        n = tensor.nbytes - offset if size is None else index(size)
        if offset < 0 or n < 0 or offset + n > tensor.nbytes:
            raise BoundsError(
                f"{call} on {tensor.describe()}: bytes {offset} to {offset + n} asked for, "
                f"but the tensor has {tensor.nbytes}"
            )
        return offset, n

    @property
    def _title(self) -> str:
        return f"this {self.name} buffer of {self.size:,} bytes"

    # -- hooks ---------------------------------------------------------------------------------

    @abstractmethod
    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        """Write `data` (flat, not empty) at `offset` in the tensor; done with `data` on return."""

    @abstractmethod
    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        """Fill `out` (flat, not empty) from `offset` in the tensor on."""

    @abstractmethod
    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        """Set `size` bytes from `offset` in the tensor on."""

    def _set_tensor_2d(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(data):
            self._set_tensor(tensor, piece, start)

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(out):
            self._get_tensor(tensor, piece, start)

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return False

    @abstractmethod
    def _clear(self, value: int) -> None:
        """Set all bytes."""

    def _init_tensor(self, tensor: Tensor) -> None:
        """Initialise a tensor."""

    def _as_array(
        self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        if self.is_host:
            return np.ndarray(shape, dtype, self.base, tensor.offset, strides)
        raise ArgumentError(
            f"as_array on {tensor.describe()}: no array library can view {self.name} memory in place; "
            "use to_numpy() for a copy"
        )

    def _reset(self) -> None:
        """Undo `_init_tensor` for all tensors."""

    def _set_usage(self, usage: BufferUsage) -> None:
        """React to a new usage."""

    def _free(self) -> None:
        """Release the memory, once queued work that uses it has finished."""

    # -- Python --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Buffer {self.name} {self.size:,} bytes, {self.usage.value}>"


class PartedBuffer(Buffer):
    """A buffer made of other buffers; it passes its `usage`, `clear`, `reset` and `free` on to them.

    Attributes:
        parts: The buffers it consists of.
    """

    def __init__(self, buft: BufferType, parts: Sequence[Buffer], size: int) -> None:
        self.parts = tuple(parts)
        super().__init__(buft, size)

    @property
    def is_planned(self) -> bool:
        """Whether a part was allocated within `planned_memory`."""
        return any(part.is_planned for part in self.parts)

    @property
    def allocations(self) -> tuple[Buffer, ...]:
        """The allocations of all parts."""
        return tuple(inner for part in self.parts for inner in part.allocations)

    @property
    def base(self) -> Any:
        """The `base` of each part."""
        return tuple(part.base for part in self.parts)

    def _set_usage(self, usage: BufferUsage) -> None:
        for part in self.parts:
            part.usage = usage

    def _clear(self, value: int) -> None:
        for part in self.parts:
            part.clear(value)

    def _reset(self) -> None:
        for part in self.parts:
            part.reset()

    def _free(self) -> None:
        for part in self.parts:
            if not part.is_freed:
                part.free()


class MultiBuffer(PartedBuffer):
    """Several buffers of one type used as one that is larger than `max_size`; each tensor is in one of them.

    Raises:
        ArgumentError: No parts were given.

    Source: ggml_backend_multi_buffer_alloc_buffer, ggml_backend_multi_buffer_set_usage.
    """

    def __init__(self, parts: Sequence[Buffer]) -> None:
        if not parts:
            raise ArgumentError("a MultiBuffer needs at least one buffer")
        super().__init__(parts[0].buft, parts, sum(p.size for p in parts))

    @property
    def base(self) -> Any:
        """The base of the first part."""
        return self.parts[0].base

    def _refuse(self, tensor: Tensor, *where: Any, **named: Any) -> NoReturn:
        raise ArgumentError(
            f"{tensor.describe()} is not in the MultiBuffer but in one of its parts; use tensor.buffer"
        )

    _set_tensor = _get_tensor = _memset_tensor = _refuse


def _check_byte(call: str, value: int) -> None:
    """Raise an ArgumentError unless the value is a byte."""
    if not 0 <= value <= 255:
        raise ArgumentError(f"{call}: the value is {value!r}; give a byte, 0 to 255")
