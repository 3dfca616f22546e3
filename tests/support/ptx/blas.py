"""cuBLAS on the host: functions with cuBLAS' own signatures and contract, over NumPy.

Matrices are columns of `ld` elements. What the real library would refuse, or would compute from memory that
does not belong to the matrix, is refused here: leading dimensions that are too small, a call before a
workspace was set for the stream.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ggmlb.backends.cuda import cublas

TYPES: dict[int, Any] = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
INVALID, NOT_INITIALISED = 7, 1

Place = tuple[int, int, int]
"""Address, type, leading dimension."""


def matrix(address: int, kind: int, n_rows: int, n_columns: int, ld: int) -> np.ndarray[Any, Any]:
    """View a matrix stored by columns."""
    dtype = np.dtype(TYPES[kind])
    size = (ld * (n_columns - 1) + n_rows) * dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
    strides = (dtype.itemsize, ld * dtype.itemsize)
    return np.lib.stride_tricks.as_strided(flat, (n_rows, n_columns), strides)


class HostBlas:
    """The library; an attribute for each function, which takes what ctypes would hand to the real one.

    Attributes:
        calls: The functions called.
        with_workspace: The handles whose workspace was set after their stream.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.with_workspace: set[int] = set()
        self._handles: set[int] = set()
        self._next = itertools.count(0xB1A5)
        for name, types in cublas._SIGNATURES.items():
            self._prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, self._prototype(self._guarded(name, getattr(self, f"_{name}"))))

    def _guarded(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.calls.append(name)
            return function(*args)

        return call

    @property
    def handles(self) -> int:
        """How many are open."""
        return len(self._handles)

    def _cublasCreate_v2(self, handle: int) -> int:
        made = next(self._next)
        self._handles.add(made)
        ctypes.c_void_p.from_address(handle).value = made
        return 0

    def _cublasDestroy_v2(self, handle: int) -> int:
        self._handles.remove(handle)
        return 0

    def _cublasSetStream_v2(self, handle: int, stream: int) -> int:
        self.with_workspace.discard(handle)
        return 0

    def _cublasSetWorkspace_v2(self, handle: int, workspace: int | None, nbytes: int) -> int:
        if (workspace or 0) % 256 == 0:
            self.with_workspace.add(handle)
        return 0

    def _cublasSetMathMode(self, handle: int, mode: int) -> int:
        return 0

    def _one(
        self,
        handle: int,
        shape: tuple[int, ...],
        alpha: int,
        beta: int,
        a: Place,
        b: Place,
        c: Place,
        compute: int,
    ) -> int:
        ta, tb, m, n, k = shape
        if handle not in self._handles & self.with_workspace:
            return NOT_INITIALISED
        (pa, ka, lda), (pb, kb, ldb), (pc, kc, ldc) = a, b, c
        rows_a, rows_b = (k if ta else m), (n if tb else k)
        if lda < rows_a or ldb < rows_b or ldc < m or min(m, n, k) < 1 or ka != kb or compute not in (68, 77):
            return INVALID
        x = matrix(pa, ka, rows_a, m if ta else k, lda).astype(np.float32)
        y = matrix(pb, kb, rows_b, k if tb else n, ldb).astype(np.float32)
        if compute == 77:
            x, y = ((v.view(np.uint32) & 0xFFFFE000).view(np.float32) for v in (x, y))
        z = matrix(pc, kc, m, n, ldc)
        up, down = (ctypes.c_float.from_address(p).value for p in (alpha, beta))
        product = up * ((x.T if ta else x) @ (y.T if tb else y))
        z[...] = product if down == 0 else product + down * z
        return 0

    def _cublasGemmEx(self, handle, ta, tb, m, n, k, alpha, a, ka, lda, b, kb, ldb, beta, c, kc, ldc, compute, algo):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
        return self._one(
            handle, (ta, tb, m, n, k), alpha, beta, (a, ka, lda), (b, kb, ldb), (c, kc, ldc), compute
        )

    def _cublasGemmStridedBatchedEx(self, handle, ta, tb, m, n, k, alpha, a, ka, lda, sa, b, kb, ldb, sb, beta, c, kc, ldc, sc, count, compute, algo):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
        sizes = [np.dtype(TYPES[kind]).itemsize for kind in (ka, kb, kc)]
        for i in range(count):
            pa, pb, pc = (p + i * s * w for p, s, w in zip((a, b, c), (sa, sb, sc), sizes, strict=True))
            status = self._one(
                handle, (ta, tb, m, n, k), alpha, beta, (pa, ka, lda), (pb, kb, ldb), (pc, kc, ldc), compute
            )
            if status:
                return status
        return 0

    def _cublasGemmBatchedEx(self, handle, ta, tb, m, n, k, alpha, a, ka, lda, b, kb, ldb, beta, c, kc, ldc, count, compute, algo):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
        lists = [(ctypes.c_uint64 * count).from_address(p) for p in (a, b, c)]
        for pa, pb, pc in zip(*lists, strict=True):
            status = self._one(
                handle, (ta, tb, m, n, k), alpha, beta, (pa, ka, lda), (pb, kb, ldb), (pc, kc, ldc), compute
            )
            if status:
                return status
        return 0
