"""Direct cuBLAS calls, because CuPy refuses its own during stream capture.

It uses ctypes for nine functions with plain arguments. nvmath-python would add its own handling of
workspaces, streams and logging, and a dozen packages.

Each stream has its own handle and workspace; otherwise, the library would allocate a workspace during
capture or share one between streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.strided import Mem
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError, BackendUnavailable

if TYPE_CHECKING:
    from ggmlb.backends.cuda.gemm import Gemm

WORKSPACE_NBYTES: Final = 32 << 20
"""NVIDIA's recommended size for compute capability 9.0 and later, the largest [bytes]."""

_TYPES: Final = {DType.F32: 0, DType.F16: 2, DType.BF16: 14}  # cudaDataType_t
_N, _T = 0, 1
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77
_DEFAULT_ALGORITHM = -1
_NO_REDUCED_PRECISION_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
_STATUS: Final = {
    1: "the library is not initialised",
    3: "memory could not be allocated",
    7: "an argument is invalid",
    8: "the card lacks a feature",
    11: "memory could not be accessed",
    13: "the kernel failed",
    14: "an internal error",
    15: "not supported",
}

_I, _L, _P = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_SIGNATURES: Final[dict[str, list[Any]]] = {
    "cublasCreate_v2": [_P],
    "cublasDestroy_v2": [_P],
    "cublasSetStream_v2": [_P, _P],
    "cublasSetWorkspace_v2": [_P, _P, ctypes.c_size_t],
    "cublasSetMathMode": [_P, _I],
    "cublasGemmEx": [_P, _I, _I, _I, _I, _I, _P, _P, _I, _I, _P, _I, _I, _P, _P, _I, _I, _I, _I],
    "cublasGemmStridedBatchedEx": [
        _P, _I, _I, _I, _I, _I, _P, _P, _I, _I, _L, _P, _I, _I, _L, _P, _P, _I, _I, _L, _I, _I, _I,
    ],
    "cublasGemmBatchedEx": [_P, _I, _I, _I, _I, _I, _P, _P, _I, _I, _P, _I, _I, _P, _P, _I, _I, _I, _I, _I],
}  # fmt: skip


@cache
def library() -> Any:
    """Load the library from NVIDIA's wheels (as CuPy does) or from the system.

    Raises:
        BackendUnavailable: It is not installed.
    """
    names = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"]
    with suppress(ImportError, RuntimeError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        names = [str(load_nvidia_dynamic_lib("cublas").abs_path)]
    for name in names:
        try:
            return declare(ctypes.CDLL(name))
        except OSError as error:
            reason = error
    raise BackendUnavailable(f"cuBLAS cannot be loaded ({reason}): pip install 'ggmlb[cuda]' (or [cuda12])")


def declare(lib: Any) -> Any:
    """Declare the functions' parameter types; return the library."""
    for name, types in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = types
        function.restype = ctypes.c_int
    return lib


class CuBlas:
    """A cuBLAS handle with its workspace. Calls are queued on a given stream, also during its capture.

    The current device must be the handle's.

    Attributes:
        tf32: Whether products of f32 may round their operands to 10 bits of mantissa.
    """

    def __init__(self, lib: Any, workspace: int, nbytes: int, tf32: bool = False) -> None:
        """Create a handle.

        Args:
            lib: The result of `library()`.
            workspace: Address of device memory that outlives the handle, a multiple of 256.
            nbytes: Its size [bytes].
            tf32: See the attribute.
        """
        self.tf32 = tf32
        self._lib = lib
        self._workspace = workspace, nbytes
        self._stream: int | None = None
        handle = ctypes.c_void_p()
        self._handle = handle
        self._check("cublasCreate_v2", ctypes.byref(handle))
        self._check("cublasSetMathMode", handle, _NO_REDUCED_PRECISION_SUMS)

    def close(self) -> None:
        """Release the handle; its work must be done."""
        if self._handle:
            self._check("cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()

    def bind(
        self, gemm: Gemm, address: Callable[[Mem], int], upload: Callable[[npt.NDArray[np.uint64]], int]
    ) -> Callable[[int], None]:
        """Return the call that queues a product on a stream, with all arguments bound.

        Args:
            gemm: The product.
            address: Returns the device address of a mem.
            upload: Copies an array to device memory that lives as long as the call, and returns its
                address; used only for batches without equal strides.
        """
        a, b, d = (address(m) for m in gemm.mems)
        kind = _TYPES[gemm.a.dtype]
        fast = self.tf32 and gemm.a.dtype is DType.F32
        compute = _COMPUTE_32F_FAST_TF32 if fast else _COMPUTE_32F
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        alpha, beta = ctypes.byref(one), ctypes.byref(zero)
        shape = (_T, _N, gemm.m, gemm.n, gemm.k, alpha)
        lda, ldb, ldd = gemm.ld
        end = (compute, _DEFAULT_ALGORITHM)
        args: tuple[Any, ...]
        if gemm.places:
            table = np.array([[a + x, b + y, d + z] for x, y, z in gemm.places], np.uint64).T
            lists = upload(np.ascontiguousarray(table))
            a, b, d = (lists + i * table.shape[1] * 8 for i in range(3))
            name = "cublasGemmBatchedEx"
            args = (*shape, a, kind, lda, b, kind, ldb, beta, d, 0, ldd, gemm.count, *end)
        elif gemm.count > 1:
            sa, sb, sd = gemm.stride
            name = "cublasGemmStridedBatchedEx"
            args = (*shape, a, kind, lda, sa, b, kind, ldb, sb, beta, d, 0, ldd, sd, gemm.count, *end)
        else:
            name = "cublasGemmEx"
            args = (*shape, a, kind, lda, b, kind, ldb, beta, d, 0, ldd, *end)

        def call(stream: int) -> None:
            self._use(stream)
            self._check(name, self._handle, *args)

        return call

    def _use(self, stream: int) -> None:
        if stream != self._stream:
            self._check("cublasSetStream_v2", self._handle, stream)
            # Setting the stream resets the library's workspace.
            self._check("cublasSetWorkspace_v2", self._handle, *self._workspace)
            self._stream = stream

    def _check(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            raise BackendError(f"{name}: {_STATUS.get(status, 'status')} ({status})")
