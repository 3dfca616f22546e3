"""Gemm: matrix products in the terms of cuBLAS; and calls of cuBLAS by ctypes.

ggml's matrices are row-major and cuBLAS's column-major, so that cuBLAS reads each one transposed: `a`, ne
`[k, m]`, is a k x m matrix of columns; `b`, ne `[k, n]`, is k x n; and `d`, ne `[m, n]`, is m x n. Hence
d = a^T b, without a copy: `transa` is T, `transb` is N, and the leading dimensions are the rows' strides.

CuPy's own bindings refuse calls during stream capture. ctypes is enough for eight functions; nvmath-python
has its own handling of workspaces and streams, and a dozen dependencies.

Each stream has its own handle and workspace; otherwise, cuBLAS would allocate a workspace during capture or
share one between streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.strided import Mem
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError, BackendUnavailable

WORKSPACE_NBYTES: Final = 32 << 20
"""NVIDIA's recommended workspace for compute capability 9.0 and later, the largest [bytes]."""

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


MAX_CALLS = 2
"""Most separate calls for a batch without equal strides; beyond, one call with lists of pointers."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product, or a batch of them, as a cuBLAS call; accumulated in f32.

    Attributes:
        a: Rows of `k` elements: the weights.
        b: As `a`, of the same type.
        d: Rows of `m` elements, f32.
        m: Rows of `a`.
        n: Rows of `b`.
        k: Elements of a row.
        ld: Strides of rows of a, b, d [elements].
        stride: Strides of matrices of a, b, d [elements], if there are several.
        count: Number of matrices.
        places: Offsets of the matrices of a, b and d [bytes], for batches without equal strides; else empty.
        tf32: Whether factors of f32 are rounded to TF32, which has 10 bits of fraction.
    """

    a: Mem
    b: Mem
    d: Mem
    m: int
    n: int
    k: int
    ld: tuple[int, int, int]
    stride: tuple[int, int, int] = (0, 0, 0)
    count: int = 1
    places: tuple[tuple[int, int, int], ...] = ()
    tf32: bool = False

    @property
    def mems(self) -> tuple[Mem, ...]:
        """The kernel arguments of the product: matrices `a` and `b`, then the result `d`."""
        return self.a, self.b, self.d


def cannot_describe(*mems: Mem) -> str | None:
    """Return why cuBLAS cannot read the matrices in place (gaps in a row, uneven strides), or `None`."""
    for m in mems:
        size = m.dtype.type_size
        if m.nb[0] != size and m.ne[0] > 1:
            return f"elements of a row are {m.nb[0]} bytes apart"
        if m.ne[1] > 1 and (m.nb[1] < m.ne[0] * size or m.nb[1] % size):
            return f"rows are {m.nb[1]} bytes apart"
        if (m.ne[2] > 1 and m.nb[2] % size) or (m.ne[3] > 1 and m.nb[3] % size):
            return f"matrices are {m.nb[2]} and {m.nb[3]} bytes apart"
    return None


def gemms(a: Mem, b: Mem, d: Mem, tf32: bool = False) -> list[Gemm]:
    """Return the cuBLAS calls for ggml's mul_mat: matrix (i2, i3) of b times matrix (i2/r2, i3/r3) of a.

    Args:
        a: ne `[k, m, ne2, ne3]`.
        b: ne `[k, n, r2*ne2, r3*ne3]`, of the same type.
        d: ne `[m, n, r2*ne2, r3*ne3]`, f32.
        tf32: Whether factors of f32 are rounded to TF32.
    """
    b, d = _stacked(a, b, d)
    (k, m, a2, _), (_, n, b2, b3) = a.ne, b.ne
    r2, r3 = b2 // a2, b3 // a.ne[3]
    size, out = a.dtype.type_size, d.dtype.type_size
    ld = _leading(a, k), _leading(b, k), _leading(d, m)

    def strided(starts: tuple[int, int, int], strides: tuple[int, int, int], count: int) -> Gemm:
        x, y, z = (t.window(t.ne, t.nb, start) for t, start in zip((a, b, d), starts, strict=True))
        s = strides[0] // size, strides[1] // size, strides[2] // out
        return Gemm(x, y, z, m, n, k, ld, s if count > 1 else (0, 0, 0), count, tf32=tf32)

    if r2 == r3 == 1 and all(t.ne[2] == 1 or t.ne[3] == 1 or t.nb[3] == b2 * t.nb[2] for t in (a, b, d)):
        i = 3 if b2 == 1 else 2
        return [strided((0, 0, 0), (a.nb[i], b.nb[i], d.nb[i]), b2 * b3)]
    if r2 * b3 <= MAX_CALLS:
        return [
            strided(
                (i3 // r3 * a.nb[3], i3 * b.nb[3] + j * b.nb[2], i3 * d.nb[3] + j * d.nb[2]),
                (a.nb[2], r2 * b.nb[2], r2 * d.nb[2]),
                a2,
            )
            for i3 in range(b3)
            for j in range(r2)
        ]
    places = tuple(
        (i2 // r2 * a.nb[2] + i3 // r3 * a.nb[3], i2 * b.nb[2] + i3 * b.nb[3], i2 * d.nb[2] + i3 * d.nb[3])
        for i3 in range(b3)
        for i2 in range(b2)
    )
    return [Gemm(a, b, d, m, n, k, ld, count=len(places), places=places, tf32=tf32)]


def _stacked(a: Mem, b: Mem, d: Mem) -> tuple[Mem, Mem]:
    """Merge the matrices of b and d that are multiplied by one matrix of a, if their rows are contiguous."""
    r2, r3 = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    if r2 > 1 and all(t.nb[2] == t.ne[1] * t.nb[1] for t in (b, d)):
        b, d = (
            t.window((t.ne[0], t.ne[1] * r2, t.ne[2] // r2, t.ne[3]), (*t.nb[:2], r2 * t.nb[2], t.nb[3]))
            for t in (b, d)
        )
    if r3 > 1 and b.ne[2] == 1 and all(t.nb[3] == t.ne[1] * t.nb[1] for t in (b, d)):
        b, d = (
            t.window((t.ne[0], t.ne[1] * r3, 1, t.ne[3] // r3), (*t.nb[:3], r3 * t.nb[3])) for t in (b, d)
        )
    return b, d


def _leading(t: Mem, n: int) -> int:
    """Return the leading dimension; a single row's stride is ignored."""
    return max(n, t.nb[1] // t.dtype.type_size) if t.ne[1] > 1 else n


@cache
def library() -> Any:
    """Load cuBLAS from NVIDIA's wheels (as CuPy does) or from the system.

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
    """Declare the parameter types of cuBLAS's functions in `lib`; return `lib`."""
    for name, types in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = types
        function.restype = ctypes.c_int
    return lib


class CuBlas:
    """A cuBLAS handle with its workspace. Calls are queued on a given stream, also during its capture.

    The current device must be the handle's.
    """

    def __init__(self, lib: Any, workspace: int, nbytes: int) -> None:
        """Create a handle.

        Args:
            lib: The result of `library()`.
            workspace: Address of device memory that outlives the handle, a multiple of 256.
            nbytes: Its size [bytes].
        """
        self._lib = lib
        self._workspace = workspace, nbytes
        self._stream: int | None = None
        handle = ctypes.c_void_p()
        self._handle = handle
        self._check("cublasCreate_v2", ctypes.byref(handle))
        self._check("cublasSetMathMode", handle, _NO_REDUCED_PRECISION_SUMS)

    def close(self) -> None:
        """Release the cuBLAS handle; its queued work must be done."""
        if self._handle:
            self._check("cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()

    def bind(
        self, gemm: Gemm, addresses: Sequence[int], upload: Callable[[npt.NDArray[np.uint64]], int]
    ) -> Callable[[int], None]:
        """Return a function that queues the product on a stream; `upload` copies arrays to device memory.

        Args:
            gemm: The product.
            addresses: The device addresses of its mems.
            upload: Copies an array to device memory that lives as long as the call, and returns its
                address; used only for batches without equal strides.
        """
        a, b, d = addresses
        kind = _TYPES[gemm.a.dtype]
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        alpha, beta = ctypes.byref(one), ctypes.byref(zero)
        shape = (_T, _N, gemm.m, gemm.n, gemm.k, alpha)
        lda, ldb, ldd = gemm.ld
        end = (_COMPUTE_32F_FAST_TF32 if gemm.tf32 else _COMPUTE_32F, _DEFAULT_ALGORITHM)
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
            raise BackendError(f"cuBLAS failed in {name}: {_STATUS.get(status, 'status')} ({status})")
