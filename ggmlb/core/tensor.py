"""Tensor: the description of an array and, once it is placed in a buffer, access to its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.core import dtypes
from ggmlb.core.arguments import checked, named, real_numbers
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, as_enum
from ggmlb.core.errors import ArgumentError, DTypeError, Error, GraphError, NotAllocatedError, ShapeError
from ggmlb.core.operators import Operators
from ggmlb.core.placement import Params

if TYPE_CHECKING:
    from weakref import ref

    from ggmlb.core.context import Context
    from ggmlb.interface import Buffer

Ne = tuple[int, int, int, int]
"""Four extents or byte strides in ggml order, innermost first."""


class Layout:
    """Type, extents and strides of a tensor; tensors that have these in common share one object.

    Attributes:
        dtype, ne, nb, nbytes: As the tensor's.
        is_plain: Whether the strides are those of a contiguous tensor.
    """

    __slots__ = ("dtype", "is_plain", "nb", "nbytes", "ne")

    def __init__(self, dtype: DType, ne: Ne, nb: Ne | None) -> None:
        self.dtype, self.ne = dtype, ne
        self.nb: Ne = contiguous_nb(dtype, ne) if nb is None else nb
        is_whole = ne[0] % dtype.block_size == 0
        self.is_plain = nb is None or (is_whole and nb == contiguous_nb(dtype, ne))
        self.nbytes = extent_nbytes(dtype, ne, self.nb)

    def __reduce__(self) -> tuple[Any, ...]:
        return layout_of, (self.dtype, self.ne, self.nb)


MAX_LAYOUTS = 1 << 16
"""Maximum number of cached layouts; a full cache is cleared, after which equal layouts may be two objects."""

_layouts: dict[tuple[Any, ...], Layout] = {}


def layout_of(dtype: DType, ne: Ne, nb: Ne | None = None) -> Layout:
    """Return the layout of a type, extents and strides (default: contiguous).

    Raises:
        ShapeError: `ne[0]` of a contiguous layout is not a whole number of blocks.
    """
    if len(_layouts) >= MAX_LAYOUTS:
        _layouts.clear()
    made = Layout(dtype, ne, nb)
    found = _layouts.setdefault((dtype, ne, made.nb), made)
    if nb is None:
        _layouts[dtype, ne] = found
    return found


@named("a tensor, as from_array or new_tensor makes one")
class Tensor(Operators):
    """An array of up to four dimensions, or the op that will compute one (ggml_tensor).

    A tensor is only a description until it is placed in a buffer, by an allocator or a scheduler.
    Its shape, strides and type never change; tensors compare by identity.

    Attributes:
        dtype: The element or block type.
        ne: Elements per dimension in ggml order, innermost first; always four.
        nb: Byte strides per dimension, in the same order.
        layout: The three together.
        op: The op that computes it; `Op.NONE` for a leaf.
        params: The op's parameters by name. Plans notice changes.
        src: The operands; `None` where an optional one is absent.
        view_src: The tensor whose memory this one shares (never itself a view), or `None`.
        view_offs: Byte offset in `view_src`.
        buffer: The buffer that holds the data; `None` until placed.
        offset: Byte offset in `buffer`.
        flags: Or-ed `TensorFlag` values.
        name: For messages and drawings; need not be unique.
        nbytes: Bytes from the first element to the end of the last (ggml_nbytes).
        maker: Weak reference to the context that made it; `None` if none did.
    """

    __slots__ = (
        "__weakref__",
        "buffer",
        "dtype",
        "flags",
        "layout",
        "maker",
        "name",
        "nb",
        "nbytes",
        "ne",
        "offset",
        "op",
        "params",
        "src",
        "view_offs",
        "view_src",
    )

    def __init__(
        self,
        dtype: DType | int | str,
        ne: Ne,
        nb: Ne | None = None,
        *,
        op: Op | str = Op.NONE,
        src: tuple[Tensor | None, ...] = (),
        params: Mapping[str, Any] | None = None,
        view_src: Tensor | None = None,
        view_offs: int = 0,
        name: str = "",
    ) -> None:
        if type(dtype) is not DType:
            dtype = DType.parse(dtype)
        if type(op) is not Op:
            op = as_enum("Tensor", Op, op)
        key = (dtype, ne) if nb is None else (dtype, ne, nb)
        layout = _layouts.get(key) or layout_of(dtype, ne, nb)
        self.layout = layout
        self.dtype = dtype
        self.ne = ne
        self.nb = layout.nb
        self.nbytes = layout.nbytes
        self.op = op
        self.src = src
        self.params: dict[str, Any] = Params(params) if params else Params()
        self.view_src = view_src
        self.view_offs = view_offs
        self.name = name
        self.flags = 0
        self.buffer: Buffer | None = None
        self.offset = 0
        self.maker: ref[Context] | None = None
        if view_src is not None:
            if view_src.view_src is not None:
                self.view_offs += view_src.view_offs
                self.view_src = view_src = view_src.view_src
            if view_src.buffer is not None:
                self.buffer = view_src.buffer
                self.offset = view_src.offset + self.view_offs

    # -- shape ---------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The NumPy shape, `ne` reversed, without the trailing ones of `ne`; at least one dimension."""
        n = self.n_dims
        return self.ne[n - 1 :: -1] if n < 4 else self.ne[::-1]

    @property
    def n_dims(self) -> int:
        """Dimensions up to the last that is not 1; at least 1 (ggml_n_dims)."""
        for i in (3, 2, 1):
            if self.ne[i] > 1 or self.ne[i] == 0:
                return i + 1
        return 1

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The operands, without absent optional ones."""
        return tuple([s for s in self.src if s is not None])

    def operand(self, i: int) -> Tensor:
        """Return operand `i`, which the op requires.

        Raises:
            GraphError: The operand is absent.
        """
        found = self.src[i]
        if found is None:
            raise GraphError(f"{self.describe()} lacks operand {i}; create nodes by methods of Context")
        return found

    def optional(self, i: int) -> Tensor | None:
        """Return operand `i`, which is optional; `None` if it is absent."""
        return self.src[i] if i < len(self.src) else None

    @property
    def n_elements(self) -> int:
        """Number of elements (ggml_nelements)."""
        return math.prod(self.ne)

    @property
    def n_rows(self) -> int:
        """Number of rows: the product of all extents but the innermost (ggml_nrows)."""
        return math.prod(self.ne[1:])

    @property
    def is_empty(self) -> bool:
        """Whether any extent is 0 (ggml_is_empty)."""
        return 0 in self.ne

    def is_contiguous(self, from_dim: int = 0) -> bool:
        """Whether the elements are in order without gaps, ignoring dimensions below `from_dim`.

        Source: ggml_is_contiguous_0, _1 and _2: with `from_dim=1` rows may have gaps between them, etc.
        """
        if self.layout.is_plain:
            return True
        expected = self.dtype.type_size
        if self.ne[0] != self.dtype.block_size and self.nb[0] != expected:
            return False
        expected *= self.ne[0] // self.dtype.block_size
        for i in (1, 2, 3):
            if i > from_dim:
                if self.ne[i] != 1 and self.nb[i] != expected:
                    return False
                expected *= self.ne[i]
            else:
                expected = self.ne[i] * self.nb[i]
        return True

    def is_contiguous_rows(self) -> bool:
        """Whether the elements of each row lie side by side (ggml_is_contiguous_rows)."""
        return self.ne[0] == self.dtype.block_size or self.nb[0] == self.dtype.type_size

    def has_whole_blocks(self) -> bool:
        """Whether each row consists of whole blocks; not in a view that moves dimension 0 of a block type."""
        moved = self.op is Op.TRANSPOSE or (self.op is Op.PERMUTE and self.params["axes"][0] != 0)
        return self.nb[0] == self.dtype.type_size and (not moved or self.layout.is_plain)

    def is_contiguous_channels(self) -> bool:
        """Whether dimension 2 is the innermost in memory (ggml_is_contiguous_channels)."""
        return self.nb[0] > self.nb[2] and self.nb[1] > self.nb[0] and self.nb[2] == self.dtype.type_size

    def is_transposed(self) -> bool:
        """Whether the first stride is larger than the second (ggml_is_transposed)."""
        return self.nb[0] > self.nb[1]

    def is_permuted(self) -> bool:
        """Whether the strides are not in ascending order (ggml_is_permuted)."""
        return self.nb[0] > self.nb[1] or self.nb[1] > self.nb[2] or self.nb[2] > self.nb[3]

    def reading(self, src: tuple[Tensor | None, ...], view_src: Tensor | None) -> Tensor:
        """Return a copy of this node with operands `src` and base `view_src`; memory, `params` are shared."""
        clone: Tensor = object.__new__(Tensor)
        clone.dtype = self.dtype
        clone.ne = self.ne
        clone.nb = self.nb
        clone.nbytes = self.nbytes
        clone.layout = self.layout
        clone.op = self.op
        clone.src = src
        clone.params = self.params
        clone.view_src = view_src
        clone.view_offs = self.view_offs
        clone.buffer = self.buffer
        clone.offset = self.offset
        clone.flags = self.flags
        clone.name = self.name
        clone.maker = self.maker
        return clone

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """State for copies: all but the context, since a copy belongs to none."""
        slots = [name for name in self.__slots__ if name != "__weakref__"]
        return None, {name: None if name == "maker" else getattr(self, name) for name in slots}

    @property
    def context(self) -> Context | None:
        """The context that created it, and creates the results of operators; `None` if garbage-collected."""
        return None if self.maker is None else self.maker()

    # -- data ----------------------------------------------------------------------------------

    @checked
    def set(self, data: npt.ArrayLike | bytes | memoryview, offset: int = 0) -> None:
        """Write raw bytes at a byte `offset` in the tensor (ggml_backend_tensor_set).

        Raises:
            NotAllocatedError: The tensor is in no buffer.
            BoundsError: The bytes end beyond the tensor.
        """
        self.placed("set").set_tensor(self, data, offset)

    @checked
    def get(self, offset: int = 0, size: int | None = None) -> npt.NDArray[np.uint8]:
        """Return a copy of `size` raw bytes from a byte `offset` on (ggml_backend_tensor_get).

        Raises:
            NotAllocatedError: The tensor is in no buffer.
            BoundsError: The bytes end beyond the tensor.
        """
        return self.placed("get").get_tensor(self, offset, size)

    @checked
    def memset(self, value: int, offset: int = 0, size: int | None = None) -> None:
        """Set `size` bytes from `offset` on to `value` (ggml_backend_tensor_memset).

        Raises:
            NotAllocatedError: The tensor is in no buffer.
            BoundsError: The bytes end beyond the tensor.
        """
        self.placed("memset").memset_tensor(self, value, offset, size)

    @checked
    def set_array(self, array: npt.ArrayLike, dtype: DType | str | None = None) -> None:
        """Write a NumPy array of `shape`, ignoring extents of 1; values are converted or quantised.

        Args:
            array: The values; or blocks, uint8 of shape `(..., row_size)`.
            dtype: The type of the blocks. Those of the tensor's own type are written unchanged, others
                converted. `None` for values.

        Raises:
            NotAllocatedError: The tensor is in no buffer.
            ShapeError: The array has another shape.
            DTypeError: The tensor's type cannot be written, the array holds no real numbers, or none of
                `dtype`, or the tensor's integers do not have one of them.
            ArgumentError: The array is masked.
        """
        self.placed("set_array")
        array = real_numbers(array, f"set_array on {self.describe()}")
        full = self.ne[::-1]
        if dtype is not None:
            array = self._blocks(array, DType.parse(dtype))
            if array.dtype == np.uint8:
                self._set_blocks(array)
                return
        if array.shape != self.shape and (
            array.size != self.n_elements or _squeezed(array.shape) != _squeezed(full)
        ):
            are_blocks = array.dtype == np.uint8 and array.size == self.nbytes and self.dtype.is_quantized
            raise ShapeError(
                f"set_array on {self.describe()}: the array has shape {array.shape}; "
                f"give one of shape {self.shape} (ne reversed)"
                + (f"; set_array(blocks, dtype={self.dtype.name!r}) writes blocks" if are_blocks else "")
            )
        with np.errstate(invalid="ignore" if self.dtype.numpy.kind == "i" else None):
            blocks = dtypes.quantize(array.reshape(full), self.dtype)
        if self.dtype.numpy.kind == "i" and array.dtype != self.dtype.numpy:
            differ = blocks.view(self.dtype.numpy).reshape(full) != array.reshape(full)
            if differ.any():
                raise DTypeError(
                    f"set_array on {self.describe()}: {array.reshape(full)[differ][0]} cannot be stored as "
                    f"{self.dtype}; round and clip the values, or use a float type"
                )
        self._set_blocks(blocks)

    def _blocks(self, array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
        """Return blocks of a type as bytes if it is the tensor's own, as values otherwise."""
        call = f"set_array on {self.describe()} with dtype {dtype.name}"
        item = np.dtype(np.uint8) if dtype.is_quantized else dtype.numpy
        if array.dtype != item:
            raise DTypeError(f"{call}: the array holds {array.dtype}; give {item}, or omit dtype for values")
        if not dtype.is_quantized:
            return array
        row_size = self.ne[0] // dtype.block_size * dtype.type_size
        shape = (*self.ne[:0:-1], row_size)
        if self.ne[0] % dtype.block_size or (
            array.size != math.prod(shape) or _squeezed(array.shape) != _squeezed(shape)
        ):
            raise ShapeError(
                f"{call}: the array has shape {array.shape}; give blocks of shape "
                f"{(*self.shape[:-1], row_size)}, for {self.ne[0]} elements a row"
            )
        blocks = array.reshape(shape)
        return blocks if dtype is self.dtype else dtypes.dequantize(blocks, dtype)

    def _set_blocks(self, blocks: npt.NDArray[np.uint8]) -> None:
        """Write the bytes of all elements in order."""
        if self.is_contiguous():
            self.set(blocks)
            return
        memory = self.get()
        self._strided(memory)[...] = blocks.view(self._item_dtype()).reshape(self._item_shape())
        self.set(memory)

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the values as a new NumPy array of `shape`; quantised types become float32.

        Raises:
            NotAllocatedError: The tensor is in no buffer.
            DTypeError: The tensor's type cannot be read.
        """
        items = self.packed()
        if self.dtype.is_quantized:
            rows = items.reshape(*self.ne[:0:-1], self.dtype.row_size(self.ne[0]))
            return dtypes.dequantize(rows, self.dtype).reshape(self.shape)
        return items.view(self.dtype.numpy).reshape(self.shape)

    def packed(self) -> npt.NDArray[np.uint8]:
        """Return a copy of the raw bytes of all elements in order, without stride gaps.

        Raises:
            NotAllocatedError: The tensor is in no buffer.
        """
        memory = self.get()
        if self.is_contiguous():
            return memory[: self.n_rows * self.dtype.row_size(self.ne[0])]
        return np.ascontiguousarray(self._strided(memory)).view(np.uint8).reshape(-1)

    @checked
    def copy_to(self, dst: Tensor) -> None:
        """Copy the data to `dst`, of the same type and layout, on any device (ggml_backend_tensor_copy)."""
        self.placed("copy_to").tensor_copy(self, dst)

    def placed(self, call: str) -> Buffer:
        """Return the buffer that holds the data; if there is none, raise an error that begins with `call`.

        Raises:
            NotAllocatedError: The tensor is in no buffer; the message names the call.
        """
        if self.buffer is None:
            raise NotAllocatedError(
                f"{call} on {self.describe()}: the tensor is in no buffer yet; place it with "
                "alloc_ctx_tensors, a TensorAllocator, or Scheduler.alloc_graph of a graph that holds it"
            )
        return self.buffer

    def _item_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of one block: the element itself, or opaque bytes."""
        return np.dtype((np.void, self.dtype.type_size)) if self.dtype.is_quantized else self.dtype.numpy

    def _item_shape(self) -> tuple[int, ...]:
        """The shape in blocks, NumPy order."""
        return (*self.ne[:0:-1], self.ne[0] // self.dtype.block_size)

    def _strided(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """View raw memory with the tensor's strides, in blocks."""
        return np.ndarray(self._item_shape(), self._item_dtype(), memory.data, 0, self.nb[::-1])

    # -- array protocols -----------------------------------------------------------------------
    # NumPy, CuPy, PyTorch and others read the tensor's own memory by these, as an array of the device's
    # library. Device memory is never copied to the host implicitly; `to_numpy` copies explicitly.

    def as_array(self) -> Any:
        """Return the tensor's memory as an array of the device's library, without a copy.

        A NumPy array where the memory is the host's, a CuPy array on CUDA, a `pyopencl.array.Array` on
        OpenCL; of `shape` (`ne` reversed) and with the tensor's strides. A quantised tensor is returned
        as rows of bytes. Synchronize before reading: queued work may still write to it.

        Raises:
            NotAllocatedError: The tensor is in no buffer.
            ArgumentError: The memory has no array library, or stores the tensor in another layout.
            FreedError: The buffer was freed.
        """
        return self.placed("as_array").as_array(self)

    def _values(self, call: str) -> Any:
        """As `as_array`, for a library that may read immediately; elements must be numbers."""
        if self.dtype.is_quantized:
            raise DTypeError(
                f"{call} of {self.describe()}: a quantised tensor holds blocks, not numbers; "
                "use to_numpy() for dequantised values, as_array() for raw bytes"
            )
        return self.placed(call).exported(self, call)

    def _host_values(self, call: str) -> Any:
        buffer = self.placed(call)
        if not buffer.is_host:
            raise ArgumentError(
                f"{call} of {self.describe()}: it is in {buffer.name} memory, which is not copied to the "
                "host implicitly; use to_numpy() for a copy, as_array() for an array on the device"
            )
        return self._values(call)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the memory as a NumPy array (`numpy.asarray(tensor)`), copied only if requested or needed.

        Raises:
            ArgumentError: The memory is not the host's.
            DTypeError: The type is quantised.
            ValueError: Another dtype is asked for, and no copy (NumPy's rule).
        """
        view: npt.NDArray[Any] = self._host_values("__array__")
        if dtype is not None and view.dtype != dtype:
            if copy is False:
                raise ValueError(f"{self.describe()} cannot be seen as {dtype} without a copy")
            return view.astype(dtype)
        return view.copy() if copy else view

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's older protocol; raises AttributeError where `numpy.asarray` would fail."""
        try:
            view = self._host_values("__array_interface__")
        except Error as error:
            raise AttributeError(str(error)) from error
        interface: dict[str, Any] = view.__array_interface__
        # An object instead of an address, so that the reader keeps the memory alive.
        return {**interface, "data": spanned(view), "offset": 0}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The protocol of CuPy, Numba and PyTorch; raises AttributeError if the memory is not on CUDA."""
        try:
            interface: dict[str, Any] = self._values("__cuda_array_interface__").__cuda_array_interface__
        except Error as error:
            raise AttributeError(str(error)) from error
        return interface

    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule of the memory (`torch.from_dlpack(tensor)`); options as DLPack says.

        Raises:
            ArgumentError: The device's array library has no DLPack.
            DTypeError: The type is quantised, or the library does not export it (NumPy: BF16).
        """
        array = self._exportable()
        try:
            return array.__dlpack__(**options)
        except BufferError as error:
            raise DTypeError(f"__dlpack__ of {self.describe()}: {error}; convert it first") from error

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type and number of the device that the memory is on; errors as in `__dlpack__`."""
        device: tuple[int, int] = self._exportable().__dlpack_device__()
        return device

    def _exportable(self) -> Any:
        array = self._values("__dlpack__")
        if not hasattr(array, "__dlpack__"):
            raise ArgumentError(
                f"__dlpack__ of {self.describe()}: {type(array).__module__} has no DLPack; use to_numpy()"
            )
        return array

    # -- text ----------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return a short description for messages, such as `"MUL_MAT f32[512, 32] (node 'kq')"`."""
        extents = ", ".join(map(str, self.ne[: self.n_dims]))
        kind = "leaf" if self.op is Op.NONE else "node"
        name = f" ({kind} {self.name!r})" if self.name else ""
        return f"{self.op_desc()} {self.dtype.name.lower()}[{extents}]{name}"

    def op_desc(self) -> str:
        """Return the op's name, or the function's for a unary or GLU node (ggml_op_desc)."""
        if self.op is Op.UNARY or self.op is Op.GLU:
            desc: str = self.params["op"].name
            return desc
        return "tensor" if self.op is Op.NONE else self.op.value

    def __repr__(self) -> str:
        where = "unplaced" if self.buffer is None else f"{self.buffer.buft.name}+{self.offset}"
        return f"<Tensor {self.describe()} {where}>"


def contiguous_nb(dtype: DType, ne: Ne) -> Ne:
    """Return the byte strides of a contiguous tensor.

    Raises:
        ShapeError: `ne[0]` is not a whole number of blocks.
    """
    nb1 = ne[0] * dtype.type_size if dtype.block_size == 1 else dtype.row_size(ne[0])
    nb2 = nb1 * ne[1]
    return (dtype.type_size, nb1, nb2, nb2 * ne[2])


def extent_nbytes(dtype: DType, ne: Ne, nb: Ne) -> int:
    """Return the bytes from the first element to the end of the last (ggml_nbytes)."""
    if 0 in ne:
        return 0
    if dtype.block_size == 1:
        size = dtype.type_size + (ne[0] - 1) * nb[0]
    else:
        size = ne[0] * nb[0] // dtype.block_size
    return size + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether type, extents and strides are equal (ggml_are_same_layout)."""
    return a.layout is b.layout or (a.dtype == b.dtype and a.ne == b.ne and a.nb == b.nb)


def can_repeat(a: Tensor, b: Tensor) -> bool:
    """Whether every extent of `a` divides that of `b` (ggml_can_repeat)."""
    a0, a1, a2, a3 = a.ne
    b0, b1, b2, b3 = b.ne
    if a0 and a1 and a2 and a3:
        return b0 % a0 == 0 and b1 % a1 == 0 and b2 % a2 == 0 and b3 % a3 == 0
    return b.is_empty


def spanned_bytes(array: Any) -> int:
    """Return the bytes from an array's first element to the end of its last; no stride may be negative."""
    if 0 in array.shape:
        return 0
    steps: int = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return steps + int(array.dtype.itemsize)


def spanned(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """View the memory that `spanned_bytes` counts as flat uint8."""
    if not array.size:
        return np.empty(0, np.uint8)
    nbytes = spanned_bytes(array)
    first = np.atleast_1d(array)[(slice(0, 1),) * max(array.ndim, 1)].reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (nbytes,), (1,), writeable=array.flags.writeable)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
