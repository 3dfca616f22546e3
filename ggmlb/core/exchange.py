"""Array protocols of tensors, by which NumPy, CuPy, PyTorch and others read their memory.

None of them copies: they return the tensor's own memory as an array of the device's library
(`Buffer.as_array`). Device memory is never copied to the host implicitly; `to_numpy` copies explicitly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ArgumentError, DTypeError, Error

if TYPE_CHECKING:
    from ggmlb.interface import Buffer


class ArrayProtocols:
    """Mixin of `Tensor` with the protocols of array libraries."""

    __slots__ = ()

    if TYPE_CHECKING:
        dtype: DType

        def describe(self) -> str:
            """As `Tensor.describe`."""

        def placed(self, call: str) -> Buffer:
            """As `Tensor.placed`."""

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
        return self.placed("as_array").as_array(self)  # type: ignore[arg-type]

    def _values(self, call: str) -> Any:
        """As `as_array`, for a library that may read immediately; elements must be numbers."""
        if self.dtype.is_quantized:
            raise DTypeError(
                f"{call} of {self.describe()}: its memory holds blocks, not numbers; "
                "to_numpy() dequantises a copy, as_array() shows the bytes"
            )
        return self.placed(call).exported(self, call)  # type: ignore[arg-type]

    def _host_values(self, call: str) -> Any:
        buffer = self.placed(call)
        if not buffer.is_host:
            raise ArgumentError(
                f"{call} of {self.describe()}: it lies in {buffer.name} memory, which is not copied to the "
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
        """Return DLPack's type and number of the device that the memory is on; raises as `__dlpack__`."""
        device: tuple[int, int] = self._exportable().__dlpack_device__()
        return device

    def _exportable(self) -> Any:
        array = self._values("__dlpack__")
        if not hasattr(array, "__dlpack__"):
            raise ArgumentError(
                f"__dlpack__ of {self.describe()}: {type(array).__module__} has no DLPack; use to_numpy()"
            )
        return array


def spanned_bytes(array: Any) -> int:
    """Return the bytes from an array's first element to the end of its last; strides are not negative."""
    if 0 in array.shape:
        return 0
    steps: int = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return steps + int(array.dtype.itemsize)


def spanned(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """View the memory from an array's first element to the end of its last; its strides are not negative."""
    if not array.size:
        return np.empty(0, np.uint8)
    nbytes = spanned_bytes(array)
    first = np.atleast_1d(array)[(slice(0, 1),) * max(array.ndim, 1)].reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (nbytes,), (1,), writeable=array.flags.writeable)
