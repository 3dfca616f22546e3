"""Buffer: an allocation of memory, and the transfers to and from the tensors in it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.enums import BufferUsage
from ggmlb.errors import ArgumentError, BoundsError, readable_size
from ggmlb.interface.data import Bytes, Pieces, Source, as_bytes, first_bytes, writable_bytes
from ggmlb.interface.observe import QUIET, Access, Action, observers, reading, writing
from ggmlb.lifetime import Freeable
from ggmlb.placement import placement_clock

if TYPE_CHECKING:
    from ggmlb.dtypes import DType
    from ggmlb.interface.buffer_type import BufferType
    from ggmlb.tensor import Ne, Tensor


class Buffer(Freeable):
    """An allocation, in which tensors lie at byte offsets (ggml_backend_buffer).

    Attributes:
        buft: Its buffer type.
        size: Bytes.
        usage: What it holds; setting it tells the scheduler (ggml_backend_buffer_set_usage).
    """

    def __init__(self, buft: BufferType, size: int) -> None:
        self.buft = buft
        self.size = size
        self.usage = BufferUsage.ANY

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
    def is_host(self) -> bool:
        """Whether `base` is a NumPy array over the memory itself (ggml_backend_buffer_is_host)."""
        return self.buft.is_host

    @property
    def host_memory(self) -> Bytes | None:
        """The memory as a flat uint8 array, where the host can reach it; `None` where it cannot."""
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
        """Type and byte strides of the tensor's elements here: its own, unless the memory converts them."""
        return tensor.dtype, tensor.nb

    def packing(self, tensor: Tensor) -> str:
        """Name of the order in which the memory keeps the bytes of a tensor's blocks; empty for ggml's own.

        Kernels know a type in another order by its name with this behind it.
        """
        return ""

    @property
    def prepares_tensors(self) -> bool:
        """Whether `init_tensor` does anything here."""
        return type(self)._init_tensor is not Buffer._init_tensor

    # -- data ----------------------------------------------------------------------------------

    def init_tensor(self, tensor: Tensor) -> None:
        """Prepare a tensor just placed here (ggml_backend_buffer_init_tensor)."""
        self.check_alive("init_tensor")
        self._init_tensor(tensor)

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
            size: How much of `data` to write [bytes]; all of it by default.

        Raises:
            BoundsError: The bytes end beyond the tensor, or `data` is shorter than `size`.
            FreedError: The buffer was freed.

        Source: ggml_backend_tensor_set.
        """
        raw = first_bytes("set_tensor", tensor, data, size)
        self.check_range(tensor, "set_tensor", offset, raw.size)
        if n := raw.size:
            with Action("set_tensor", None, [writing(tensor, offset, n)]) if observers else QUIET:
                self._set_tensor(tensor, raw, offset)

    def get_tensor(self, tensor: Tensor, offset: int = 0, size: int | None = None) -> Bytes:
        """Return a copy of raw bytes of a tensor.

        Args:
            tensor: A tensor in this buffer.
            offset: Where to begin in the tensor [bytes].
            size: How much to read [bytes]; to the tensor's end by default.

        Raises:
            BoundsError: The bytes end beyond the tensor.
            FreedError: The buffer was freed.

        Source: ggml_backend_tensor_get.
        """
        n = self.check_range(tensor, "get_tensor", offset, size)
        out = np.empty(n, np.uint8)
        if n:
            with Action("get_tensor", None, [reading(tensor, offset, n)]) if observers else QUIET:
                self._get_tensor(tensor, out, offset)
        return out

    def memset_tensor(self, tensor: Tensor, value: int, offset: int = 0, size: int | None = None) -> None:
        """Set `size` bytes of a tensor to `value` (ggml_backend_tensor_memset).

        Raises:
            ArgumentError: `value` is not a byte.
            BoundsError: The bytes end beyond the tensor.
            FreedError: The buffer was freed.
        """
        n = self.check_range(tensor, "memset_tensor", offset, size)
        _check_byte("memset_tensor", value)
        if n:
            with Action("memset_tensor", None, [writing(tensor, offset, n)]) if observers else QUIET:
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
        """Write `n_copies` pieces of `size` bytes, `stride_data` apart, to places `stride_tensor` apart.

        Raises:
            BoundsError: A piece ends beyond the tensor or the data.
            FreedError: The buffer was freed.

        Source: ggml_backend_tensor_set_2d.
        """
        raw, pieces = as_bytes(data), Pieces(offset, size, n_copies, stride_tensor, stride_data)
        if self.check_pieces(tensor, "set_tensor_2d", pieces, raw.size):
            written = [writing(tensor, start, size) for start in pieces.starts()] if observers else []
            with Action("set_tensor_2d", None, written) if observers else QUIET:
                self._set_tensor_2d(tensor, raw, pieces)

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
        raw = writable_bytes("get_tensor_2d", data)
        pieces = Pieces(offset, size, n_copies, stride_tensor, stride_data)
        if self.check_pieces(tensor, "get_tensor_2d", pieces, raw.size):
            read = [reading(tensor, start, size) for start in pieces.starts()] if observers else []
            with Action("get_tensor_2d", None, read) if observers else QUIET:
                self._get_tensor_2d(tensor, raw, pieces)

    def cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        """Copy `src`, in any buffer, to `dst` in this one, if the device can do so directly.

        Returns:
            Whether it was done; if not, the caller copies through host memory.

        Source: ggml_backend_buffer_copy_tensor.
        """
        self.check_alive("cpy_tensor")
        if not observers:
            return self._cpy_tensor(src, dst)
        with Action("cpy_tensor", None, [reading(src), writing(dst)]) as action:
            action.done = self._cpy_tensor(src, dst)
        return action.done

    def clear(self, value: int = 0) -> None:
        """Set every byte to `value` (ggml_backend_buffer_clear).

        Raises:
            ArgumentError: `value` is not a byte.
            FreedError: The buffer was freed.
        """
        self.check_alive("clear")
        _check_byte("clear", value)
        if self.size:
            everything = [Access(self, 0, self.size, is_write=True, tensor=None)] if observers else []
            with Action("clear", None, everything) if observers else QUIET:
                self._clear(value)

    def reset(self) -> None:
        """Forget what `init_tensor` prepared (ggml_backend_buffer_reset)."""
        self.check_alive("reset")
        self._reset()

    def free(self) -> None:
        """Give the memory back; its tensors must not be used any more (ggml_backend_buffer_free).

        Raises:
            FreedError: The buffer was freed before.
        """
        self.check_alive("free")
        with Action("free", buffer=self) if observers else QUIET:
            self.is_freed = True
            placement_clock.tick()  # plans that use the memory must notice
            self._free()

    def as_array(self, tensor: Tensor) -> Any:
        """Return the memory of a tensor that lies here as an array of the device's library; no copy.

        A quantised tensor is seen as rows of bytes. See `Tensor.as_array`.

        Raises:
            ArgumentError: The memory has no array library, or stores the tensor in another layout.
            FreedError: The buffer was freed.
        """
        self.check_alive("as_array")
        if self.stored_layout(tensor) != (tensor.dtype, tensor.nb):
            raise ArgumentError(
                f"as_array on {tensor.describe()}: {self.name} memory keeps it in another type or layout; "
                "use to_numpy() for a copy"
            )
        n = tensor.n_dims
        shape, strides = tensor.ne[:n][::-1], tensor.nb[:n][::-1]
        if tensor.dtype.is_quantized:
            shape, strides = (*shape[:-1], tensor.dtype.row_size(tensor.ne[0])), (*strides[:-1], 1)
            return self._as_array(tensor, np.dtype(np.uint8), shape, strides)
        return self._as_array(tensor, tensor.dtype.numpy, shape, strides)

    def exported(self, tensor: Tensor, call: str) -> Any:
        """As `as_array`, for an array protocol of that name: who asks by one reads at once."""
        if observers:
            self.check_alive(call)
            with Action(call, None, [reading(tensor)]):
                return self.as_array(tensor)
        return self.as_array(tensor)

    # -- checks --------------------------------------------------------------------------------

    def check_range(self, tensor: Tensor, call: str, offset: int, size: int | None) -> int:
        """Return the number of bytes meant, after checking that they lie in the tensor.

        Raises:
            BoundsError: They do not.
            FreedError: The buffer was freed.
        """
        self.check_alive(call)
        n = tensor.nbytes - offset if size is None else size
        if offset < 0 or n < 0 or offset + n > tensor.nbytes:
            raise BoundsError(
                f"{call} on {tensor.describe()}: bytes {offset} to {offset + n} asked for, "
                f"but the tensor has {tensor.nbytes}"
            )
        return n

    def check_pieces(self, tensor: Tensor, call: str, pieces: Pieces, n_data: int) -> bool:
        """Check a strided transfer against the ends of the tensor, and of data of `n_data` bytes.

        Returns:
            Whether there is anything to move.

        Raises:
            BoundsError: A piece ends beyond one of them.
            FreedError: The buffer was freed.
        """
        self.check_alive(call)
        if min(pieces) < 0:
            raise BoundsError(
                f"{call} on {tensor.describe()}: offset, size, count and strides must not be negative"
            )
        if not pieces.n:
            return False
        self.check_range(tensor, call, pieces.offset, (pieces.n - 1) * pieces.stride_tensor + pieces.size)
        needed = (pieces.n - 1) * pieces.stride_data + pieces.size
        if needed > n_data:
            raise BoundsError(
                f"{call} on {tensor.describe()}: the data has {n_data} bytes, {needed} are needed"
            )
        return pieces.size > 0

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

    @abstractmethod
    def _clear(self, value: int) -> None:
        """Set all bytes."""

    def _set_tensor_2d(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(data):
            self._set_tensor(tensor, piece, start)

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(out):
            self._get_tensor(tensor, piece, start)

    def _init_tensor(self, tensor: Tensor) -> None:
        """Prepare a tensor."""

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return False

    def _as_array(
        self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        if self.is_host:
            return np.ndarray(shape, dtype, self.base, tensor.offset, strides)
        raise ArgumentError(f"as_array on {tensor.describe()}: {self.name} memory has no array library")

    def _reset(self) -> None:
        """Forget prepared tensors."""

    def _free(self) -> None:
        """Release the memory; work that still uses it must be able to finish."""

    # -- Python --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "freed" if self.is_freed else self.usage.value
        return f"<Buffer {self.name} {self.size:,} bytes, {state}>"

    def _repr_html_(self) -> str:
        """Its facts, for a notebook."""
        from ggmlb.html import card

        facts = {
            "size": f"{readable_size(self.size)} ({self.size:,} bytes)",
            "holds": self.usage.value,
            "host memory": "yes, NumPy sees it" if self.is_host else "no",
            "alignment": f"{self.alignment} bytes",
            "device": self.buft.device.name,
        }
        return card(f"Buffer in {self.name} memory{' (freed)' if self.is_freed else ''}", facts)


def _check_byte(call: str, value: int) -> None:
    if not 0 <= value <= 255:
        raise ArgumentError(f"{call}: the value is {value}; give a byte, 0 to 255")
