"""Tensor types: their numbers and traits are ggml's. What blocks mean is tested in `test_quants`."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest

from ggmlb import DType, DTypeError, ShapeError
from ggmlb.core.dtypes import dequantize, dequantize_into, quantize

PLAIN = [d for d in DType if not d.is_quantized]
QUANTIZED = [d for d in DType if d.is_quantized]

STATED = {
    DType.MXFP4: (32, 17),
    DType.NVFP4: (64, 36),
    DType.Q1_0: (128, 18),
    DType.Q2_0: (64, 18),
    DType.Q8_1: (32, 36),
}
"""Types that gguf may not know yet, and Q8_1, whose size there is that of an old ggml."""


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_numbers_and_traits_are_those_of_gguf(dtype: DType) -> None:
    known = {int(q): q for q in gguf.GGMLQuantizationType}
    traits = (dtype.block_size, dtype.type_size)
    assert traits == STATED.get(dtype, traits)
    if dtype in STATED and (dtype is DType.Q8_1 or int(dtype) not in known):
        return
    assert known[int(dtype)].name == dtype.name
    assert traits == gguf.GGML_QUANT_SIZES[known[int(dtype)]]


def test_no_type_of_gguf_is_missing() -> None:
    assert {q.name for q in gguf.GGMLQuantizationType} <= set(DType.__members__)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (DType.Q4_K, DType.Q4_K),
        ("q4_k", DType.Q4_K),
        ("Q8_0", DType.Q8_0),
        ("bf16", DType.BF16),
        (2, DType.Q4_0),
        (np.int64(30), DType.BF16),
        ("float32", DType.F32),
        (np.float16, DType.F16),
        (np.dtype("<i8"), DType.I64),
        (ml_dtypes.bfloat16, DType.BF16),
        (float, DType.F64),
    ],
)
def test_parse(value: object, dtype: DType) -> None:
    assert DType.parse(value) is dtype


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("q40", "no tensor type 'q40'; did you mean 'Q4_0'"),
        ("F99", "no tensor type 'F99'; known: F32, "),
        (None, "no tensor type 'None'"),
        (4, "no tensor type has the number 4"),  # Q4_2, which ggml removed
        (-1, "no tensor type has the number -1"),
        (np.complex64, "no tensor type"),
        (">f4", "no tensor type"),
    ],
)
def test_parse_refuses(value: object, why: str) -> None:
    with pytest.raises(DTypeError, match=why):
        DType.parse(value)


def test_row_size() -> None:
    assert DType.F32.row_size(7) == 28
    assert DType.Q4_0.row_size(64) == 36
    assert DType.Q4_0.row_size(0) == 0
    with pytest.raises(ShapeError, match=r"33 elements is not a whole number of Q4_0 blocks.*multiple of 32"):
        DType.Q4_0.row_size(33)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_plain_types_have_a_numpy_dtype(dtype: DType) -> None:
    assert dtype.numpy.itemsize == dtype.type_size
    assert DType.parse(dtype.numpy) is dtype
    values = np.array([[0, 1, 2], [3, 4, 5]], np.float32)
    blocks = quantize(values, dtype)
    assert blocks.dtype == np.uint8
    assert blocks.shape == (2, dtype.row_size(3))
    np.testing.assert_array_equal(dequantize(blocks, dtype), values)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantised_types_are_bytes(dtype: DType) -> None:
    assert dtype.numpy == np.uint8


def test_quantising_refuses() -> None:
    with pytest.raises(ShapeError, match="33 elements"):
        quantize(np.zeros((2, 33)), DType.Q4_0)
    with pytest.raises(
        DTypeError, match=r"IQ2_XS cannot be written without an importance matrix; use .*Q8_K"
    ):
        quantize(np.zeros((2, 256)), DType.IQ2_XS)


def test_reading_refuses() -> None:
    with pytest.raises(ShapeError, match=r"a row of 35 bytes.*Q8_0 blocks.*multiple of 34 bytes"):
        dequantize(np.zeros((2, 35), np.uint8), DType.Q8_0)
    with pytest.raises(ShapeError, match=r"blocks of shape \(2, 34\).*an array of shape \(32, 2\)"):
        dequantize_into(np.zeros((32, 2), np.float32), np.zeros((2, 34), np.uint8), DType.Q8_0)
    with pytest.raises(ShapeError, match=r"contiguous arrays; this one has strides \(4, 8\)"):
        dequantize_into(np.zeros((32, 2), np.float32).T, np.zeros((2, 34), np.uint8), DType.Q8_0)
