"""Values to quantise, the same on every machine, and what ggml makes of them.

`python tests/support/quants_data.py` writes `tests/unit/quants.npz` anew; it needs ggml-python.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from ggmlb.core.dtypes import DType, can_quantize

PATH = Path(__file__).parents[1] / "unit" / "quants.npz"

WRITABLE = [d for d in DType if d.is_quantized and can_quantize(d)]


def uniform(n: int, seed: int) -> np.ndarray:
    """Numbers from 0 to 1 in steps of 2^-32, by a hash of their indices."""
    x = np.arange(n, dtype=np.uint64) + np.uint64(seed << 32)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x ^= x >> np.uint64(31)
        x *= np.uint64(factor)
    return (x >> np.uint64(32)).astype(np.float64) / 2**32


def bell(n: int, seed: int) -> np.ndarray:
    """About normal, of variance 1."""
    return sum((uniform(n, 100 * seed + i) for i in range(12)), np.zeros(n)) - 6.0


def samples(n: int = 256) -> dict[str, np.ndarray]:
    """Float32 arrays of `n` values, by name."""
    x, u = bell(n, 1), uniform(n, 2)
    runs = np.repeat(bell(-(-n // 32), 3), 32)[:n]
    values = {
        "bell": x,
        "uniform": 2 * u - 1,
        "positive": np.abs(bell(n, 4)),
        "shifted": 3 + bell(n, 5) / 10,
        "negative": -0.5 - np.abs(bell(n, 6)),
        "outliers": bell(n, 7) ** 3,
        "sparse": np.where(u < 0.9, 0, x),
        "integers": np.floor(17 * u) - 8,
        "ternary": (np.floor(3 * u) - 1) * 0.37,
        "constant": runs,
        "zeros": np.zeros(n),
        "negative zeros": -np.zeros(n),
        "small": x * 1e-6,
        "tiny": x * 1e-20,
        "large": x * 1e4,
        "smooth": np.linspace(-1, 1, n),
    }
    return {name: v.astype(np.float32) for name, v in values.items()}


def quantize_by_ggml(values: np.ndarray, dtype: DType) -> np.ndarray:
    """What the reference quantiser of the installed ggml writes."""
    import ggml

    convert = ggml.ggml_get_type_traits(int(dtype)).contents.from_float_ref
    if not convert:  # of Q8_K only the CPU backend knows
        convert = ggml.ggml_get_type_traits_cpu(int(dtype)).contents.from_float
    return _convert(
        convert, values, np.zeros((*values.shape[:-1], dtype.row_size(values.shape[-1])), np.uint8)
    )


def dequantize_by_ggml(blocks: np.ndarray, dtype: DType) -> np.ndarray:
    """What the installed ggml reads."""
    import ggml

    convert = ggml.ggml_get_type_traits(int(dtype)).contents.to_float
    n = blocks.shape[-1] // dtype.type_size * dtype.block_size
    return _convert(convert, blocks, np.zeros((*blocks.shape[:-1], n), np.float32))


def knows(dtype: DType) -> bool:
    """Whether the installed ggml has the type."""
    import ggml

    return bool(int(dtype) < ggml.GGML_TYPE_COUNT)


def _convert(function: Any, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    source = np.ascontiguousarray(source)
    floats = source if source.dtype == np.float32 else target
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(source.ctypes.data, target.ctypes.data, floats.size)
    return target


if __name__ == "__main__":
    written: dict[str, Any] = {
        d.name: np.stack([quantize_by_ggml(v, d) for v in samples().values()]) for d in WRITABLE if knows(d)
    }
    np.savez_compressed(PATH, **written)
    print(f"{len(written)} types, {PATH.stat().st_size} bytes in {PATH}")
