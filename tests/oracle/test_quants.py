"""Blocks are read and written as the installed ggml (ggml-python) does: `make test-oracle`."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("ggml") is None:
    pytest.skip("ggml-python is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

from ggmlb.core.dtypes import DType, dequantize, quantize
from tests.support.quants_data import WRITABLE, dequantize_by_ggml, knows, quantize_by_ggml

pytestmark = pytest.mark.oracle

KNOWN = [d for d in DType if d.is_quantized and knows(d)]
SIMPLE = [DType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")]
WITHOUT_READER = {DType.Q8_1, DType.Q8_K}

N_ROWS = 16


def normal(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((N_ROWS, 1024))


def zeros(rng: np.random.Generator) -> np.ndarray:
    """Zeros of both signs."""
    return rng.choice([0, -0.0], (N_ROWS, 1024))


DISTRIBUTIONS = {
    "normal": normal,
    "uniform": lambda rng: rng.uniform(-1, 1, (N_ROWS, 1024)),
    "shifted": lambda rng: normal(rng) * 0.1 + rng.normal(0, 3, (N_ROWS, 1)),
    "one-sided": lambda rng: np.abs(normal(rng)) * rng.choice([-1, 1], (N_ROWS, 1)),
    "outliers": lambda rng: normal(rng) ** 3 * np.exp(normal(rng)),
    "sparse": lambda rng: np.where(
        rng.random((N_ROWS, 1024)) < rng.random((N_ROWS, 1)), normal(rng), zeros(rng)
    ),
    "few levels": lambda rng: rng.integers(-9, 10, (N_ROWS, 1024)) // rng.integers(1, 9, (N_ROWS, 1)) * 0.3,
    "runs": lambda rng: np.repeat(rng.standard_normal((N_ROWS, 128)), 8, axis=1),
    "rows of any size": lambda rng: normal(rng) * 10 ** rng.uniform(-6, 3.5, (N_ROWS, 1)),
    "runs of any size": lambda rng: (
        normal(rng) * np.repeat(10 ** rng.uniform(-9, 3, (N_ROWS, 64)), 16, axis=1)
    ),
}


@pytest.mark.parametrize("dtype", [d for d in WRITABLE if knows(d)], ids=str)
@given(kind=st.sampled_from(sorted(DISTRIBUTIONS)), seed=st.integers(0, 2**32 - 1))
def test_it_writes_what_ggml_writes(dtype: DType, kind: str, seed: int) -> None:
    values = DISTRIBUTIONS[kind](np.random.default_rng(seed)).astype(np.float32)
    expected = quantize_by_ggml(values, dtype).reshape(-1, dtype.type_size)
    got = quantize(values, dtype).reshape(expected.shape)
    if dtype == DType.IQ4_NL:  # ggml leaves the codes of a block of zeros undefined
        zero = (expected[:, :2].view(np.float16) == 0)[:, 0]
        got[zero, 2:] = expected[zero, 2:]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", SIMPLE, ids=str)
@given(seed=st.integers(0, 2**32 - 1))
def test_it_writes_what_ggml_writes_of_odd_numbers(dtype: DType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    odd = [np.inf, -np.inf, 0.0, -0.0, 1e-40]
    if dtype != DType.Q8_0:  # of which ggml forgets the largest value before each NaN
        odd.append(np.nan)
    values = normal(rng).astype(np.float32)
    places = rng.random(values.shape) < rng.choice([0.01, 0.1])
    values[places] = rng.choice(odd[: rng.integers(1, len(odd) + 1)], int(places.sum()))
    expected = quantize_by_ggml(values, dtype).reshape(-1, dtype.type_size)
    with np.errstate(all="ignore"):
        got = quantize(values, dtype).reshape(expected.shape)
    for blocks in (expected, got):
        for at in (0, 2) if dtype in (DType.Q4_1, DType.Q5_1) else (0,):
            scales = blocks[:, at : at + 2].view(np.float16)
            scales[np.isnan(scales)] = np.nan  # one for all
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [d for d in KNOWN if d not in WITHOUT_READER], ids=str)
@given(seed=st.integers(0, 2**32 - 1))
def test_it_reads_what_ggml_reads(dtype: DType, seed: int) -> None:
    blocks = np.random.default_rng(seed).integers(0, 256, (64, dtype.type_size), np.uint8)
    np.testing.assert_array_equal(dequantize(blocks, dtype), dequantize_by_ggml(blocks, dtype), strict=True)
