"""Tensor types: their numbers and traits are ggml's, and quantised blocks are read and written."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb import DType, DTypeError, ShapeError
from ggmlb.dtypes import can_dequantize, can_quantize, dequantize, quantize

PLAIN = [d for d in DType if not d.is_quantized]
QUANTIZED = [d for d in DType if d.is_quantized]
WRITABLE = [d for d in QUANTIZED if can_quantize(d)]

NOT_AS_GGUF = {DType.Q1_0: (128, 18), DType.Q2_0: (64, 18), DType.Q8_1: (32, 36)}
"""Types that gguf may not know yet, and one whose size there is that of an old ggml."""


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_numbers_and_traits_are_those_of_gguf(dtype: DType) -> None:
    known = {int(q): q for q in gguf.GGMLQuantizationType}
    traits = (dtype.block_size, dtype.type_size)
    if dtype in NOT_AS_GGUF:
        assert traits == NOT_AS_GGUF[dtype]
    else:
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


def test_what_gguf_reads_and_writes() -> None:
    """The list may only grow: a type that falls out of it is a loss to users."""
    written = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"}
    read = written | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"}
    read |= {"IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
    assert written <= {d.name for d in WRITABLE}
    assert read <= {d.name for d in QUANTIZED if can_dequantize(d)}


@given(
    dtype=st.sampled_from(WRITABLE),
    rows=st.integers(0, 3),
    n_blocks=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantising_twice_changes_nothing(dtype: DType, rows: int, n_blocks: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, n_blocks * dtype.block_size), np.float32)
    blocks = quantize(values, dtype)
    assert blocks.shape == (rows, dtype.row_size(values.shape[1]))
    once = dequantize(blocks, dtype)
    assert once.shape == values.shape
    assert once.dtype == np.float32
    again = dequantize(quantize(once, dtype), dtype)
    np.testing.assert_allclose(again, once, rtol=0.02, atol=0.02 * np.abs(values).max(initial=0))


def test_quantising_refuses() -> None:
    with pytest.raises(ShapeError, match="33 elements"):
        quantize(np.zeros((2, 33)), DType.Q4_0)
    with pytest.raises(DTypeError, match="Q8_K blocks cannot be written"):
        quantize(np.zeros((2, 256)), DType.Q8_K)
    with pytest.raises(DTypeError, match="Q8_K blocks cannot be read"):
        dequantize(np.zeros((2, DType.Q8_K.type_size), np.uint8), DType.Q8_K)
