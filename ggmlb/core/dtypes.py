"""Tensor types (`enum ggml_type`), their traits, and conversion to and from float32.

`ggmlb.core.quants` holds the block formats.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb.core import quants
from ggmlb.core.arguments import checked, real_numbers
from ggmlb.core.errors import DTypeError, ShapeError, did_you_mean
from ggmlb.core.quants import fp4, grids, kquants, nonlinear, simple, ternary
from ggmlb.core.quants.codec import Codec


class DType(IntEnum):
    """A ggml tensor type, with the number of elements and bytes of its blocks.

    Attributes:
        block_size: Elements per block (1 for plain types).
        type_size: Bytes per block.
        is_quantized: Whether elements share blocks (ggml_is_quantized).
        codec: How blocks are laid out, read and written; quantised types only have it.
    """

    block_size: int
    type_size: int
    is_quantized: bool
    codec: Codec

    def __new__(cls, value: int, block_size: int, record: Codec | int) -> DType:
        """Create a member from ggml's number, its block size, and its codec or size [bytes]."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.block_size = block_size
        member.is_quantized = isinstance(record, Codec)
        if isinstance(record, Codec):
            member.codec, record = record, record.layout.itemsize
        member.type_size = record
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, simple.Q4_0
    Q4_1 = 3, 32, simple.Q4_1
    Q5_0 = 6, 32, simple.Q5_0
    Q5_1 = 7, 32, simple.Q5_1
    Q8_0 = 8, 32, simple.Q8_0
    Q8_1 = 9, 32, simple.Q8_1
    Q2_K = 10, 256, kquants.Q2_K
    Q3_K = 11, 256, kquants.Q3_K
    Q4_K = 12, 256, kquants.Q4_K
    Q5_K = 13, 256, kquants.Q5_K
    Q6_K = 14, 256, kquants.Q6_K
    Q8_K = 15, 256, simple.Q8_K
    IQ2_XXS = 16, 256, grids.IQ2_XXS
    IQ2_XS = 17, 256, grids.IQ2_XS
    IQ3_XXS = 18, 256, grids.IQ3_XXS
    IQ1_S = 19, 256, grids.IQ1_S
    IQ4_NL = 20, 32, nonlinear.IQ4_NL
    IQ3_S = 21, 256, grids.IQ3_S
    IQ2_S = 22, 256, grids.IQ2_S
    IQ4_XS = 23, 256, nonlinear.IQ4_XS
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, grids.IQ1_M
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, ternary.TQ1_0
    TQ2_0 = 35, 256, ternary.TQ2_0
    MXFP4 = 39, 32, fp4.MXFP4
    NVFP4 = 40, 64, fp4.NVFP4
    Q1_0 = 41, 128, simple.Q1_0
    Q2_0 = 42, 64, simple.Q2_0

    def __str__(self) -> str:
        """The name as ggml and messages write it: `"f32"`."""
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype of a plain type; `uint8` (raw block bytes) for a quantised one."""
        return _numpy_dtype(self)

    def row_size(self, ne0: int) -> int:
        """Return the bytes of a row of `ne0` elements (ggml_row_size).

        Raises:
            ShapeError: `ne0` is not a whole number of blocks.
        """
        if ne0 % self.block_size:
            raise ShapeError(
                f"a row of {ne0} elements is not a whole number of {self.name} blocks; "
                f"make ne[0] a multiple of {self.block_size}"
            )
        return ne0 // self.block_size * self.type_size

    @classmethod
    def parse(cls, value: DType | int | str | npt.DTypeLike | None) -> DType:
        """Return the type for a member, its number, its name in any case, or a NumPy dtype.

        Raises:
            DTypeError: No tensor type has that name, number or NumPy dtype.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in _BY_NAME:
            return _BY_NAME[value.upper()]
        if isinstance(value, (bool, Enum)):
            raise DTypeError(f"{value!r} is no tensor type; give a member of ggmlb.DType, or its name")
        if isinstance(value, (int, np.integer)):
            if value in _BY_NUMBER:
                return _BY_NUMBER[int(value)]
            raise DTypeError(
                f"no tensor type has the number {value}; give a member of ggmlb.DType, or its name"
            )
        wanted = _as_numpy(value)
        for member in cls:
            if not member.is_quantized and wanted is not None and member.numpy == wanted:
                return member
        name = value if isinstance(value, str) else repr(value)
        raise DTypeError(f"no tensor type {name!r}{did_you_mean(name.upper(), _BY_NAME)}")


_BY_NAME = dict(DType.__members__)
_BY_NUMBER = {int(member): member for member in DType}


@cache
def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype == DType.BF16:
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype("u1" if dtype.is_quantized else f"{dtype.name[0].lower()}{dtype.type_size}")


def _as_numpy(value: npt.DTypeLike | None) -> np.dtype[Any] | None:
    """The NumPy dtype that `value` names; `None` if it names none (NumPy reads `None` as float64)."""
    if value is None:
        return None
    try:
        return np.dtype(value)
    except (TypeError, ValueError):
        return None


@checked
def can_quantize(dtype: DType | int | str) -> bool:
    """Whether `quantize` writes the type: all but IQ1, IQ2 and IQ3, as ggml's CPU backend does."""
    dtype = DType.parse(dtype)
    return not dtype.is_quantized or dtype.codec.write is not None


def random_blocks(dtype: DType | str, n: int) -> npt.NDArray[np.uint8]:
    """Return blocks of `n` elements of a quantised type: random bits, with a scale for values of about 1.

    For types without a writer, whose scale is the first field.

    Returns:
        Shape `(n_blocks, type_size)`.
    """
    dtype = DType.parse(dtype)
    n //= dtype.block_size
    blocks = np.random.default_rng((int(dtype), n)).integers(0, 256, (n, dtype.type_size), np.uint8)
    if dtype is DType.IQ1_M:  # the scale is spread over the high bits of the last four words
        words = blocks[:, -8:].view("<u2")
        bits = int(np.float16(0.1).view(np.uint16))
        words[...] = words & 0x0FFF | [(bits >> 4 * i & 0xF) << 12 for i in range(4)]
    else:
        blocks[:, :2] = np.array([0.1], "<f2").view(np.uint8)
    return blocks


@checked
def dequantize(blocks: npt.NDArray[np.uint8], dtype: DType | int | str) -> npt.NDArray[np.float32]:
    """Return float32 values of rows of blocks.

    Args:
        blocks: Raw bytes, shape `(..., row_size)` in NumPy order.
        dtype: The type of the blocks; a plain type is viewed and converted.

    Raises:
        DTypeError: There is no such type, or the blocks are no bytes.
        ShapeError: A row is not whole blocks.
    """
    dtype = DType.parse(dtype)
    if not isinstance(blocks, np.ndarray) or blocks.dtype != np.uint8 or not blocks.ndim:
        raise DTypeError(
            "dequantize: blocks must be an array of uint8 with rows; view(numpy.uint8) gives one"
        )
    n_blocks, rest = divmod(blocks.shape[-1], dtype.type_size)
    if rest:
        raise ShapeError(
            f"a row of {blocks.shape[-1]} bytes is not a whole number of {dtype.name} blocks; "
            f"give rows of a multiple of {dtype.type_size} bytes"
        )
    values = np.empty((*blocks.shape[:-1], n_blocks * dtype.block_size), np.float32)
    dequantize_into(values, blocks, dtype)
    return values


def dequantize_into(
    out: npt.NDArray[np.float32], blocks: npt.NDArray[np.uint8], dtype: DType | int | str
) -> None:
    """Dequantise rows of blocks into `out`, using little extra memory.

    Thread-safe: no scratch is shared, and NumPy releases the GIL.

    Args:
        out: C-contiguous, shape `(..., ne0)` in NumPy order.
        blocks: Raw bytes, shape `(..., row_size)`; copied first unless C-contiguous.
        dtype: The type of the blocks; a plain type is viewed and converted.

    Raises:
        DTypeError: There is no such type.
        ShapeError: The shapes do not fit each other, or `out` is not C-contiguous.
    """
    dtype = DType.parse(dtype)
    if out.shape != (*blocks.shape[:-1], blocks.shape[-1] // dtype.type_size * dtype.block_size):
        raise ShapeError(
            f"{dtype.name} blocks of shape {blocks.shape} do not fit an array of shape {out.shape}; "
            f"a row of {dtype.block_size} values is {dtype.type_size} bytes"
        )
    if not out.flags.c_contiguous:
        raise ShapeError(f"dequantize_into fills contiguous arrays; this one has strides {out.strides}")
    rows = np.ascontiguousarray(blocks)
    if dtype.is_quantized:
        quants.read(dtype.codec, out, rows)
    else:
        np.copyto(out, rows.view(dtype.numpy), casting="unsafe")


@checked
def quantize(values: npt.ArrayLike, dtype: DType | int | str) -> npt.NDArray[np.uint8]:
    """Return the raw bytes, shape `(..., row_size)`, of float values quantised row by row.

    The blocks are those of ggml's reference quantisers (`quantize_row_*_ref`).

    Args:
        values: Shape `(..., ne0)` in NumPy order, any real type.
        dtype: The type to write; a plain type is converted.

    Raises:
        DTypeError: There is no such type, it cannot be written, or the values are no real numbers.
        ShapeError: `ne0` is not a whole number of blocks, or the values are a single number.
    """
    dtype = DType.parse(dtype)
    array = real_numbers(values, "quantize")
    if not array.ndim:
        raise ShapeError(
            "quantize: the values are a single number; give rows, as an array of one dimension or more"
        )
    array = np.ascontiguousarray(array, dtype=np.float32 if dtype.is_quantized else None)
    if not dtype.is_quantized:
        return np.ascontiguousarray(array.astype(dtype.numpy, copy=False)).view(np.uint8)
    row_size = dtype.row_size(array.shape[-1])
    if not can_quantize(dtype):
        writable = ", ".join(d.name for d in DType if d.is_quantized and can_quantize(d))
        raise DTypeError(f"{dtype.name} cannot be written without an importance matrix; use {writable}")
    blocks = np.empty((*array.shape[:-1], row_size), np.uint8)
    quants.write(dtype.codec, blocks, array)
    return blocks
