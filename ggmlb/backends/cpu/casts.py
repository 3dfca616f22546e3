"""Conversions between tensor types and float32, in which rules compute.

BF16 is handled as the upper half of a float32, by integers, because NumPy does not know the type; halves are
read by integers too, because NumPy does so slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ggmlb.backends.common.workspace import Array
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType

CAST = 8
"""The work of converting an element, in additions."""

Cast = Callable[[Array, Array], None]
"""`cast(dst, src)`."""

_F32, _F16, _BF16 = DType.F32, DType.F16, DType.BF16  # looked up once: asked for each operand of a graph
_SHIFTED = np.int32(-0x70002000)  # 0x8FFFE000: the sign, and exponent and mantissa in their places
_REBIAS = np.float32(2.0**112)


def loader(dtype: DType) -> Cast | None:
    """Return a function that fills float32 `dst` from `src`; of blocks, `src` is rows of bytes.

    `None` for float32 itself: the memory is used as it lies.
    """
    if dtype is _F32:
        return None
    if dtype is _F16:
        return load_f16
    if dtype is _BF16:
        return load_bf16
    return partial(dtypes.dequantize_into, dtype=dtype) if dtype.is_quantized else copy


def storer(dtype: DType) -> Cast | None:
    """Return a function that fills `dst` from float32 `src`; of blocks, `dst` is rows of bytes.

    `None` for float32 itself.
    """
    if dtype is _F32:
        return None
    if dtype is _BF16:
        return store_bf16
    return partial(_quantize, dtype=dtype) if dtype.is_quantized else copy


def is_plain(*types: DType) -> bool:
    """Whether NumPy itself converts between these types."""
    return not any(t.is_quantized or t is _BF16 for t in types)


def copy(dst: Array, src: Array) -> None:
    """Convert as C does: floats to integers towards zero."""
    np.copyto(dst, src, casting="unsafe")


def load_f16(dst: Array, src: Array) -> None:
    """Move the bits of each half into a float32, and correct the exponent by a product.

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
    """Place the 16 bits in the upper half of each float32."""
    bits = dst.view(np.uint32)
    np.copyto(bits, src)
    np.left_shift(bits, np.uint32(16), out=bits)


def store_bf16(dst: Array, src: Array) -> None:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(src).view(np.uint32)
    rounded = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    np.copyto(rounded, np.uint32(0x7FC0), where=np.isnan(src))
    np.copyto(dst, rounded, casting="unsafe")


def _quantize(dst: Array, src: Array, dtype: DType) -> None:
    dst[...] = dtypes.quantize(src, dtype)
