"""Conversion between the types that tensors have and the float32 that rules compute in.

BF16 is handled as the upper half of a float32, by integers, because NumPy does not know the type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ggmlb.backends.common.workspace import Array
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType

CAST = 8
"""The work of converting an element, in additions."""

Cast = Callable[[Array, Array], None]
"""`cast(dst, src)`."""

_F32, _BF16 = DType.F32, DType.BF16  # looked up once: they are compared with for each operand of a graph


class Casts:
    """Reads and writes tensor memory as float32; an array library may do some types better.

    `load` and `store` return `None` for float32 itself: the memory is used as it lies.
    """

    keeps_no_memory = True

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def can_load(self, dtype: DType) -> bool:
        """Whether values of the type can be read."""
        return not dtype.is_quantized or dtypes.can_dequantize(dtype)

    def can_store(self, dtype: DType) -> bool:
        """Whether values of the type can be written."""
        return not dtype.is_quantized or dtypes.can_quantize(dtype)

    def load(self, dtype: DType) -> Cast | None:
        """Return a function that fills float32 `dst` from `src`; of blocks, `src` is rows of bytes."""
        if dtype is _F32:
            return None
        if dtype is _BF16:
            return self.load_bf16
        if dtype.is_quantized:
            return _Dequantize(dtype)
        return self.copy

    def store(self, dtype: DType) -> Cast | None:
        """Return a function that fills `dst` from float32 `src`; of blocks, `dst` is rows of bytes."""
        if dtype is _F32:
            return None
        if dtype is _BF16:
            return self.store_bf16
        if dtype.is_quantized:
            return _Quantize(dtype)
        return self.copy

    def is_plain(self, *types: DType) -> bool:
        """Whether the library itself converts between these types."""
        return not any(t.is_quantized or t is _BF16 for t in types)

    def copy(self, dst: Array, src: Array) -> None:
        """Convert as C does: floats to integers towards zero."""
        self.xp.copyto(dst, src, casting="unsafe")

    def load_bf16(self, dst: Array, src: Array) -> None:
        """Place the 16 bits in the upper half of each float32."""
        bits = dst.view(np.uint32)
        self.xp.copyto(bits, src)
        self.xp.left_shift(bits, np.uint32(16), out=bits)

    def store_bf16(self, dst: Array, src: Array) -> None:
        """Round to nearest, ties to even; NaN stays NaN."""
        xp = self.xp
        bits = xp.ascontiguousarray(src).view(np.uint32)
        rounded = (bits >> np.uint32(16)) & np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        xp.copyto(rounded, np.uint32(0x7FC0), where=xp.isnan(src))
        xp.copyto(dst, rounded, casting="unsafe")


class _Dequantize:
    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def __call__(self, dst: Array, src: Array) -> None:
        dtypes.dequantize_into(dst, src, self.dtype)


class _Quantize:
    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def __call__(self, dst: Array, src: Array) -> None:
        dst[...] = dtypes.quantize(src, self.dtype)
