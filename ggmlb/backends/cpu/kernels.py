"""Functions on arrays that several rules emit: conversions, sums of rows, rows by index.

Rules compute in float32. BF16 is handled as the upper half of a float32, by integers, because NumPy does not
know the type; halves are read by integers too, because NumPy does so slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from ggmlb.backends.common.workspace import Array
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError

CAST = 8
"""Cost of converting an element, in additions."""

Cast = Callable[[Array, Array], None]
"""`cast(dst, src)`."""

_SHIFTED = np.int32(-0x70002000)  # 0x8FFFE000: the sign, and exponent and mantissa in their places
_REBIAS = np.float32(2.0**112)


def loader(dtype: DType) -> Cast | None:
    """Return the conversion `cast(dst, src)` from a type to float32; quantised `src` is rows of bytes.

    `None` for float32 itself, which needs none.
    """
    if dtype is DType.F32:
        return None
    if dtype is DType.F16:
        return load_f16
    if dtype is DType.BF16:
        return load_bf16
    return partial(dtypes.dequantize_into, dtype=dtype) if dtype.is_quantized else copy


def storer(dtype: DType) -> Cast | None:
    """Return the conversion `cast(dst, src)` from float32 to a type; quantised `dst` is rows of bytes.

    `None` for float32 itself, which needs none.
    """
    if dtype is DType.F32:
        return None
    if dtype is DType.BF16:
        return store_bf16
    return partial(_quantize, dtype=dtype) if dtype.is_quantized else copy


def is_plain(*types: DType) -> bool:
    """Whether NumPy itself converts between these types: not for quantised types and bf16."""
    return not any(t.is_quantized or t is DType.BF16 for t in types)


def copy(dst: Array, src: Array) -> None:
    """Copy `src` to `dst`, converting as C does: floats to integers towards zero."""
    np.copyto(dst, src, casting="unsafe")


def load_f16(dst: Array, src: Array) -> None:
    """Convert f16 to float32: shift the bits, and correct the exponent by a multiplication.

    The sign extends over the upper bits when a half becomes an `int32`, and is masked down to one.
    Subnormal halves come out right; infinities and NaN would not, and are left to NumPy.
    """
    bits = dst.view(np.int32)
    np.copyto(bits, src.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, _SHIFTED, out=bits)
    np.multiply(dst, _REBIAS, out=dst)
    if dst.size and max(dst.max(), -dst.min()) >= 65536:
        np.copyto(dst, src)


def load_bf16(dst: Array, src: Array) -> None:
    """Convert bf16 to float32, whose upper 16 bits it is."""
    bits = dst.view(np.uint32)
    np.copyto(bits, src)
    np.left_shift(bits, np.uint32(16), out=bits)


def store_bf16(dst: Array, src: Array) -> None:
    """Convert float32 to bf16; rounds to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(src).view(np.uint32)
    rounded = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    np.copyto(rounded, np.uint32(0x7FC0), where=np.isnan(src))
    np.copyto(dst, rounded, casting="unsafe")


def _quantize(dst: Array, src: Array, dtype: DType) -> None:
    dst[...] = dtypes.quantize(src, dtype)


# -- sums of rows ---------------------------------------------------------------------------------


def row_sum(x: Array) -> Array:
    """Return the sums along the last axis, which is kept with extent 1.

    As products with ones by BLAS: half the time of `numpy.sum` where rows are short.
    """
    return row_dot(x, _ones(x.shape[-1]))


def row_dot(x: Array, y: Array) -> Array:
    """Return the dot products along the last axis, which is kept with extent 1; by BLAS."""
    return np.vecdot(x, y)[..., np.newaxis]


@cache
def _ones(n: int) -> Array:
    return np.ones(n, np.float32)


# -- rows by index --------------------------------------------------------------------------------


def check_index(index: Array, n: int) -> None:
    """Raise BackendError for a row number that is not in `range(n)`."""
    if index.size and not (index.min() >= 0 and index.max() < n):
        raise BackendError(
            f"row numbers from {index.min()} to {index.max()} for a tensor of {n} rows; "
            f"indices must be from 0 to {n - 1}"
        )


def take(y: Array, x: Array, index: Array, axis: int) -> None:
    """Fill `y[.., i, ..] = x[.., index[i], ..]` along `axis`; the caller has checked the indices."""
    np.take(x, index, axis=axis, out=y, mode="clip")  # without a temporary


def take_rows(y: Array, x: Array, index: Array) -> None:
    """Fill `y[.., i] = x[.., index[.., i]]` with rows of `x`, in each matrix of a batch."""
    check_index(index, x.shape[2])
    if x.shape[:2] != (1, 1):
        y[...] = x[(*_batch(*x.shape[:2]), index)]
    elif x.flags.c_contiguous and y.flags.c_contiguous:
        np.take(x[0, 0], index[0, 0], axis=0, out=y[0, 0], mode="clip")
    else:
        y[0, 0] = x[0, 0][index[0, 0]]


def put_rows(y: Array, x: Array, index: Array) -> None:
    """Write rows `y[.., index[.., i]] = x[.., i]` in each matrix of a batch, over which `index` repeats."""
    check_index(index, y.shape[2])
    if x.shape[:2] == (1, 1):
        y[0, 0][index[0, 0]] = x[0, 0]
    else:
        i3, i2 = _batch(*x.shape[:2])
        index = index[i3[..., 0] % index.shape[0], i2[..., 0] % index.shape[1]]
        y[i3, i2, index] = x


def add_rows(y: Array, x: Array, index: Array) -> None:
    """Add the rows of matrix `x` to rows of matrix `y`: `y[index[i]] += x[i]`; indices may repeat.

    Adds the first of each repeated row, then the second, ...: `add.at` takes ten times as long.
    """
    check_index(index, len(y))
    order = index.argsort(kind="stable")
    rows = index[order]
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    counts = np.diff(starts, append=rows.size)
    for i in range(counts.max(initial=0)):
        here = starts[counts > i] + i
        y[rows[here]] += x[order[here]]


def _batch(n3: int, n2: int) -> tuple[Array, Array]:
    """Return indices of all matrices of a batch, to combine with row indices."""
    return np.arange(n3)[:, None, None], np.arange(n2)[None, :, None]
