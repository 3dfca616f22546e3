"""Conversions that NumPy does slowly, by integer arithmetic that it does fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.cpu.array.casts import Cast, Casts
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array

_F16 = DType.F16  # looked up once
_HALF_INF = 0x7C00
_SHIFTED = np.int32(-0x70002000)  # 0x8FFFE000: the sign, and exponent and mantissa in their places
_REBIAS = np.float32(2.0**112)


class CpuCasts(Casts):
    """As the reference, with a faster reading of F16."""

    def load(self, dtype: DType) -> Cast | None:
        """Return a function that fills float32 `dst` from `src`."""
        return self.load_f16 if dtype is _F16 else super().load(dtype)

    def load_f16(self, dst: Array, src: Array) -> None:
        """Move the bits of each half into a float32, and correct the exponent by a product.

        The sign extends over the upper bits when a half becomes an `int32`, and is masked down to one.
        Subnormal halves come out right; infinities and NaN would not, and are left to NumPy.
        """
        halves = src.view(np.int16)
        bits = dst.view(np.int32)
        np.copyto(bits, halves)
        np.left_shift(bits, np.int32(13), out=bits)
        np.bitwise_and(bits, _SHIFTED, out=bits)
        np.multiply(dst, _REBIAS, out=dst)
        if dst.size and max(dst.max(), -dst.min()) >= 65536:
            np.copyto(dst, src)
