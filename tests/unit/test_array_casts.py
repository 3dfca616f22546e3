from __future__ import annotations

import ml_dtypes
import numpy as np

from ggmlb.backends.cpu import kernels
from ggmlb.core.dtypes import DType

HALVES = np.arange(1 << 16, dtype=np.uint16)


def same_bits(a, b):
    """Equal to the bit, but for which NaN a NaN is."""
    nan = np.isnan(a) & np.isnan(b)
    return np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan])


def test_every_half_is_read_exactly():
    for halves in (HALVES, HALVES[np.isfinite(HALVES.view(np.float16))]):
        out = np.empty(halves.shape, np.float32)
        with np.errstate(all="ignore"):
            kernels.loader(DType.F16)(out, halves.view(np.float16))
        assert same_bits(out, halves.view(np.float16).astype(np.float32))


def test_every_bf16_is_read_exactly():
    out = np.empty(HALVES.shape, np.float32)
    kernels.loader(DType.BF16)(out, HALVES)
    assert same_bits(out, HALVES.view(ml_dtypes.bfloat16).astype(np.float32))


def test_bf16_is_rounded_to_nearest_even():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    ties = (np.arange(1 << 12, dtype=np.uint32) << 16) | 0x8000
    special = np.array([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF, 0], np.uint32)
    values = np.concatenate((bits, ties, special)).view(np.float32)
    out = np.empty(values.shape, np.uint16)
    kernels.storer(DType.BF16)(out, values)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    assert same_bits(out.view(ml_dtypes.bfloat16).astype(np.float32), expected.astype(np.float32))


def test_numbers_become_integers_as_in_c():
    out = np.empty(4, np.int32)
    kernels.storer(DType.I32)(out, np.array([1.9, -1.9, 0.5, 7], np.float32))
    assert out.tolist() == [1, -1, 0, 7]
