"""Extra buffer types of ggml's CPU, which repack weights (`CPU_REPACK`, `AMX`, ...).

ggml repacks only whole weights, and cannot read them back. Here the permutation of bits within a group of
rows is measured by repacking test patterns, so that partial writes and reads work, too.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.weight_memory import PackedBuffer, misplaced, weight_in
from ggmlb.backends.ggml.buffer import GgmlBuffer, GgmlBufferType
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer
from ggmlb.interface.data import Bytes, Pieces
from ggmlb.interface.host import ALIGNMENT, HostBuffer, aligned_empty

if TYPE_CHECKING:
    from ggmlb.backends.ggml.device import GgmlDevice

MOST_ROWS: Final = 64
"""Largest number of rows in a group; models are loaded in slices of this many rows (`fill`)."""


class Order(NamedTuple):
    """The permutation of bits by which ggml repacks a group of rows.

    Attributes:
        bits: Index in the packed group of each bit of the rows.
        flips: Which of these bits are inverted.
    """

    bits: npt.NDArray[np.int32]
    flips: npt.NDArray[np.uint8]


class GgmlRepackedBufferType(GgmlBufferType):
    """Host memory that stores contiguous weights repacked, for matrix products."""

    def __init__(self, device: GgmlDevice, handle: int) -> None:
        super().__init__(device, handle)
        self._groups: dict[tuple[object, ...], int] = {}
        self._orders: dict[tuple[DType, int], Order] = {}
        self._empty: GgmlBuffer | None = None
        self._lock = threading.RLock()

    def suits(self, tensor: Tensor) -> bool:
        """Whether this buffer type repacks the tensor."""
        return self.group_rows(tensor) > 0

    def is_readable(self, tensor: Tensor) -> bool:
        """Whether the tensor can be read back: it is not repacked, or only by a permutation of bits."""
        try:
            return not self.suits(tensor) or bool(self._order(tensor))
        except BackendError:
            return False

    def packing(self, tensor: Tensor) -> str:
        """The buffer type's name if the tensor is repacked, else empty."""
        return self.name if self.suits(tensor.view_src or tensor) else ""

    def declines(self, node: Tensor) -> str | None:
        """Return why the node cannot use operands in this memory, or `None`; only matrix products can."""
        if not self.is_used:
            return None
        weight = weight_in(self, node)
        if weight is not None and not self._begins_a_group(weight):
            return f"src0 is in {self.name} memory, and is not a run of whole groups of a weight's rows"
        return misplaced(self, node)

    def group_rows(self, tensor: Tensor) -> int:
        """Number of rows that ggml repacks together; 0 if the tensor is stored unchanged.

        It is the least number of rows for which ggml and a test run accept a product, if the repacked weight
        takes no more memory.
        """
        asked = (tensor.dtype, tensor.ne, tensor.is_contiguous())
        with self._lock:
            if asked not in self._groups:
                self._groups[asked] = self._find_group(tensor)
            return self._groups[asked]

    def pack(self, rows: Bytes, dtype: DType, k: int) -> Bytes:
        """Repack whole groups of rows of `k` elements, as ggml does."""
        tensor = Tensor(dtype, (k, rows.size // dtype.row_size(k), 1, 1), name="rows")
        out = aligned_empty(rows.size)
        library, memory = self.device.library, self.device.library.room(1)
        library.pack(memory, 0, tensor, (self._nothing().handle, out.ctypes.data, 0))
        at = ctypes.addressof(memory)
        self._c["backend_buffer_init_tensor"](self._nothing().handle, at)
        self._c["backend_tensor_set"](at, np.ascontiguousarray(rows).ctypes.data, 0, rows.size)
        return out

    def unpack(self, packed: Bytes, tensor: Tensor) -> Bytes:
        """Restore whole groups of a weight's rows from their repacked bytes.

        Raises:
            BackendError: Repacking this type is more than a permutation of bits.
        """
        order = self._order(tensor)
        bits = np.unpackbits(packed.reshape(-1, order.bits.size // 8), axis=1)
        return np.packbits(bits[:, order.bits] ^ order.flips, axis=1).reshape(-1)

    def _order(self, tensor: Tensor) -> Order:
        """Return the permutation of a group of a weight's rows; raises as `unpack`."""
        kind = tensor.dtype, tensor.ne[0]
        with self._lock:
            if kind not in self._orders:
                self._orders[kind] = self._learn(*kind, self.group_rows(tensor))
            return self._orders[kind]

    def _buffer(self, nbytes: int, handle: int) -> GgmlBuffer:
        return GgmlRepackedBuffer(self, nbytes, handle)

    def _nothing(self) -> GgmlBuffer:
        """Return an empty buffer, for queries about tensors in this memory."""
        if self._empty is None:
            self._empty = cast("GgmlBuffer", self._alloc_buffer(ALIGNMENT))
        return self._empty

    def _find_group(self, tensor: Tensor) -> int:
        k, n_rows, *_ = tensor.ne
        if not tensor.is_contiguous() or tensor.is_empty or tensor.n_dims > 3:
            return 0
        if self.alloc_size(tensor) > tensor.nbytes or not self._takes(tensor):
            return 0
        n = 2
        while n < min(n_rows, MOST_ROWS) and not self._takes(Tensor(tensor.dtype, (k, n, 1, 1))):
            n *= 2
        return n if n_rows % n == 0 else 0

    def _takes(self, weight: Tensor) -> bool:
        """Whether the device computes products of such a weight in this memory."""
        ctx = Context()
        here = Tensor(weight.dtype, weight.ne, name="weight")
        here.buffer = self._nothing()
        column = ctx.new_tensor("f32", (weight.ne[0], 1))
        if weight.n_dims == 3:  # of experts
            node = ctx.mul_mat_id(here, column, ctx.new_tensor("i32", (1, 1)))
        else:
            node = ctx.mul_mat(here, column)
        return self.device.declines(node) is None

    def _begins_a_group(self, view: Tensor) -> bool:
        whole = view.view_src
        if whole is None or not (n_rows := self.group_rows(whole)):
            return True
        return (
            view.ne[0] == whole.ne[0]
            and self.group_rows(view) == n_rows
            and view.view_offs % (n_rows * whole.dtype.row_size(whole.ne[0])) == 0
        )

    def _learn(self, dtype: DType, k: int, n_rows: int) -> Order:
        """Measure the permutation of a group's bits: repack bit `i` of every bit's index, for each `i`."""
        n = 8 * n_rows * dtype.row_size(k)
        numbers = np.arange(n, dtype=np.int32)

        def packed(bits: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
            return np.unpackbits(self.pack(np.packbits(bits), dtype, k))

        flips = packed(np.zeros(n, np.uint8))
        source = np.zeros(n, np.int32)
        for i in range(n.bit_length()):
            source |= (packed((numbers >> i & 1).astype(np.uint8)) ^ flips).astype(np.int32) << i
        if np.array_equal(np.sort(source), numbers):
            order = Order(np.argsort(source).astype(np.int32), flips[np.argsort(source)])
            rows = np.random.default_rng(0).integers(0, 256, 3 * n // 8, np.uint8)
            bits = np.unpackbits(self.pack(rows, dtype, k).reshape(3, -1), axis=1)
            if np.array_equal(np.packbits(bits[:, order.bits] ^ order.flips), rows):
                return order
        raise BackendError(
            f"{self.name} cannot read a {dtype.name.lower()} weight back, nor write less than {n_rows} rows "
            "of it: repacking changes values; place the weight in another buffer type"
        )


class GgmlRepackedBuffer(PackedBuffer, HostBuffer, GgmlBuffer):
    """Weights in host memory, repacked at upload."""

    buft: GgmlRepackedBufferType
    _base: Bytes

    def __init__(self, buft: GgmlRepackedBufferType, size: int, handle: int) -> None:
        GgmlBuffer.__init__(self, buft, size, handle)
        if size:
            memory: Any = (ctypes.c_ubyte * size).from_address(self.address)
            self._base = np.frombuffer(memory, np.uint8)

    def group_nbytes(self, tensor: Tensor) -> int:
        """Size of a group of rows that are repacked together [bytes]."""
        return self.buft.group_rows(tensor) * tensor.dtype.row_size(tensor.ne[0])

    def _set_groups(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        self._base[start : start + data.size] = self.buft.pack(data, tensor.dtype, tensor.ne[0])

    def _get_groups(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        out[:] = self.buft.unpack(self._base[start : start + out.size], tensor)

    def _set_tensor_2d(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        Buffer._set_tensor_2d(self, tensor, data, pieces)

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        Buffer._get_tensor_2d(self, tensor, out, pieces)

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return False  # the bytes have to be converted

    def _free(self) -> None:
        GgmlBuffer._free(self)
