"""Leafs that share the memory of arrays: implementation of `Context.from_array`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError, DTypeError, ShapeError
from ggmlb.core.tensor import Ne, Tensor, contiguous_nb
from ggmlb.interface import Buffer, registry

DL_CPU: Final = 1
"""DLPack's number for host memory (kDLCPU)."""

DL_UINT: Final = 1
DL_BFLOAT: Final = 4
"""DLPack's numbers for types (kDLUInt, kDLBfloat)."""

_pointer_of: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def tensor_of(array: Any, dtype: DType | None, copy: bool | None) -> Tensor:
    """Return a leaf that shares or copies an array's memory; see `Context.from_array`."""
    is_python = isinstance(array, (Sequence, int))
    array = _on_host(array)
    if array.ndim > 4:
        raise ShapeError(f"from_array: the array has {array.ndim} dimensions; tensors have at most 4")
    if dtype is None:
        dtype = _type_of(np.dtype(array.dtype), is_python)
    blocks = _BlockLayout(array, dtype) if dtype.is_quantized and array.dtype == np.uint8 else None
    why = _why_not_shared(array, dtype) if blocks is None else blocks.why_not_shared()
    if why is None and not copy:
        shared = _adopted(array)
        if shared is not None:
            ne, nb = _layout(array) if blocks is None else (blocks.ne, blocks.nb)
            return _placed(Tensor(dtype, ne, None if nb == contiguous_nb(dtype, ne) else nb), *shared)
        why = f"no device can use the memory of {_kind(array)}"
    if copy is False:
        raise ArgumentError(f"from_array with copy=False: {why}; omit copy to allow a copy")
    return _copied(array, dtype) if blocks is None else _copied_blocks(array, dtype, blocks.ne)


class _BlockLayout:
    """Extents and strides of a quantised tensor, given its blocks as an array of uint8.

    Attributes:
        ne: Extents in ggml order.
        nb: Byte strides.

    Raises:
        ShapeError: The array's rows are not whole blocks.
    """

    def __init__(self, array: Any, dtype: DType) -> None:
        row_size = array.shape[-1] if array.ndim else 0
        if not array.ndim or row_size % dtype.type_size:
            raise ShapeError(
                f"from_array: uint8 with dtype {dtype.name} means raw blocks, but rows of {row_size} bytes "
                f"are not whole blocks of {dtype.type_size} bytes; to quantise, convert values to float32"
            )
        ne, nb = _layout(array)
        self.ne = (row_size // dtype.type_size * dtype.block_size, *ne[1:])
        self.nb = (dtype.type_size, *nb[1:])
        self._array = array

    def why_not_shared(self) -> str | None:
        """Return why a tensor cannot share the array's memory, or `None`."""
        if self._array.strides[-1] != 1 and self._array.shape[-1] > 1:
            return "the bytes of a row are not contiguous"
        return _why_not_shared(self._array, None)


def _on_host(array: Any) -> Any:
    """Convert host arrays to NumPy, by DLPack if supported; return other arrays unchanged."""
    if isinstance(array, np.ma.MaskedArray):
        raise _masked(array)
    if isinstance(array, np.ndarray):
        return array
    if _is_on_cuda(array):
        return _OnCuda(array)
    if hasattr(array, "__dlpack_device__"):
        if array.__dlpack_device__()[0] != DL_CPU:
            return array
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError) as error:
            found = _bfloat16(array)
            if found is None:
                raise _no_access(array, error) from error
            return found
    if all(hasattr(array, name) for name in ("dtype", "shape", "strides")) and not hasattr(
        array, "__array__"
    ):
        return array  # a device's: pyopencl.array
    return np.asarray(array)


class _Capsule:
    """Object with a given DLPack capsule, for `numpy.from_dlpack`."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return DL_CPU, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule


def _bfloat16(array: Any) -> npt.NDArray[Any] | None:
    """Return an array of bfloat16, which NumPy does not import by DLPack; `None` for other types."""
    try:
        capsule = array.__dlpack__()
        tensor = _pointer_of(capsule, b"dltensor")
    except (BufferError, RuntimeError, ValueError):
        return None
    # DLTensor: data, device (two int32), ndim (int32), then the type: code, bits, lanes.
    code = ctypes.c_uint8.from_address(tensor + 20)
    bits = ctypes.c_uint8.from_address(tensor + 21)
    if (code.value, bits.value) != (DL_BFLOAT, 16):
        return None
    code.value = DL_UINT  # the capsule is new, so that nothing else reads its description
    return np.from_dlpack(_Capsule(capsule)).view(DType.BF16.numpy)


def _is_on_cuda(array: Any) -> bool:
    try:
        return hasattr(array, "__cuda_array_interface__")
    except RuntimeError as error:  # PyTorch's, of a tensor that requires its gradient
        raise _no_access(array, error) from error


def _no_access(array: Any, error: Exception) -> ArgumentError:
    return ArgumentError(f"from_array: {_kind(array)} gives no access to its memory: {error}")


class _OnCuda:
    """An array of any library on a CUDA device, as its `__cuda_array_interface__` describes it.

    Attributes:
        owner: The array, which is kept alive.
        read_only: Whether its memory may not be written.

    Raises:
        ArgumentError: It is masked.
    """

    def __init__(self, array: Any) -> None:
        self.owner = array
        interface = self.__cuda_array_interface__ = array.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise _masked(array)
        own = getattr(array, "dtype", None)  # bfloat16 has no code in the interface
        self.dtype = own if isinstance(own, np.dtype) else np.dtype(interface["typestr"])
        self.shape = tuple(interface["shape"])
        self.ndim = len(self.shape)
        steps = [self.dtype.itemsize * math.prod(self.shape[i + 1 :]) for i in range(self.ndim)]
        self.strides = tuple(interface.get("strides") or steps)
        self.read_only = bool(interface["data"][1])


def _masked(array: Any) -> ArgumentError:
    return ArgumentError(f"from_array: {_kind(array)} is masked; give an array without a mask")


def _type_of(dtype: np.dtype[Any], is_python: bool) -> DType:
    """Return the type of an array's leaf; NumPy's defaults become the types that most ops take."""
    if dtype == np.float64:
        return DType.F32
    if is_python and dtype == np.int64:
        return DType.I32
    try:
        return DType.parse(dtype)
    except DTypeError:
        raise DTypeError(
            f"from_array: ggml has no type for {dtype}; give dtype=, or convert the array first"
        ) from None


def _why_not_shared(array: Any, dtype: DType | None) -> str | None:
    """Return why a tensor cannot share an array's memory, or `None`; `dtype` is by default the array's."""
    if dtype is not None and (dtype.is_quantized or np.dtype(array.dtype) != dtype.numpy):
        return f"{array.dtype} must be converted to {dtype}, unless dtype says otherwise"
    if isinstance(array, _OnCuda) and array.read_only:
        return f"the memory of {_kind(array)} is read-only, but tensors on a device are writable"
    if any(s < 0 or (s == 0 and n > 1) for n, s in zip(array.shape, array.strides, strict=True)):
        return f"tensors have no strides like {tuple(array.strides)}, negative or 0"
    return None


def _adopted(array: Any) -> tuple[Buffer, int] | None:
    """Let a device adopt an array's memory; the CPU is tried first, before other backends are loaded."""
    if isinstance(array, np.ndarray):
        return registry.host_device().adopt(array)
    others = (d for d in registry.devices() if d.type is not DeviceType.CPU)
    return next((shared for d in others if (shared := d.adopt(array)) is not None), None)


def _layout(array: Any) -> tuple[Ne, Ne]:
    """Return the extents and strides of an array in ggml's order, padded to four."""
    ne: list[int] = [1, 1, 1, 1]
    nb: list[int] = []
    ne[: array.ndim] = array.shape[::-1]
    strides = array.strides[::-1]
    for i, n in enumerate(ne):
        packed = nb[-1] * ne[i - 1] if nb else array.dtype.itemsize
        nb.append(packed if n == 1 else strides[i])  # NumPy leaves the strides of ones undefined
    return (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3])


def _copied(array: Any, dtype: DType) -> Tensor:
    """Copy an array's values to newly allocated host memory."""
    values = _fetched(array)
    ne, _ = _layout(values)
    tensor = Tensor(dtype, ne)
    _placed(tensor, registry.cpu_buffer_type().alloc_buffer(tensor.nbytes), 0)
    tensor.set_array(values)
    return tensor


def _copied_blocks(array: Any, dtype: DType, ne: Ne) -> Tensor:
    tensor = Tensor(dtype, ne)
    _placed(tensor, registry.cpu_buffer_type().alloc_buffer(tensor.nbytes), 0)
    tensor.set(np.ascontiguousarray(_fetched(array)))
    return tensor


def _fetched(array: Any) -> npt.NDArray[Any]:
    """Copy a device's array to the host by its own method (`get` of CuPy and PyOpenCL)."""
    if isinstance(array, np.ndarray):
        return array
    owner = _owner(array)
    if not hasattr(owner, "get"):
        raise ArgumentError(f"from_array: {_kind(array)} is on a device; copy it to the host first")
    fetched: npt.NDArray[Any] = owner.get()
    return fetched


def _placed(tensor: Tensor, buffer: Buffer, offset: int) -> Tensor:
    tensor.buffer, tensor.offset = buffer, offset
    return tensor


def _owner(array: Any) -> Any:
    return array.owner if isinstance(array, _OnCuda) else array


def _kind(array: Any) -> str:
    kind = type(_owner(array))
    return f"{kind.__module__}.{kind.__qualname__}"
