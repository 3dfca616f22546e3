"""Quantised blocks: how fast they are read and written.

Each figure is the best of some runs by one thread, in millions of values per second of processor time, on
256 rows of 4096 values, and on 16 rows where writing is a search. gguf reads and writes with NumPy as we do;
ggml is its reference in C (`to_float`, `from_float_ref`). A dash: it cannot, or is not installed.

    python benchmarks/quants.py [--types Q4_0,Q4_K] [--rounds N]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import time
from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from report import Table, save
from turns import best_s

from ggmlb.core.dtypes import DType, can_quantize, dequantize_into, quantize

N_COLUMNS = 4096
SEARCHES = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}

Pair = tuple[Callable[[], object] | None, Callable[[], object] | None]


def speed(call: Callable[[], object] | None, n_values: int, rounds: int) -> float | None:
    """Millions of values per second of this thread's time."""
    if call is None:
        return None
    return n_values / best_s(call, rounds, time.thread_time) / 1e6


def by_gguf(dtype: DType, blocks: np.ndarray, values: np.ndarray) -> Pair:
    numbers = {int(q) for q in gguf.quants._type_traits}
    if int(dtype) not in numbers:
        return None, None
    qtype = GGMLQuantizationType(int(dtype))
    writes = "quantize_blocks" in vars(gguf.quants._type_traits[qtype])
    return (
        lambda: gguf.quants.dequantize(blocks, qtype),
        (lambda: gguf.quants.quantize(values, qtype)) if writes else None,
    )


def by_ggml(dtype: DType, blocks: np.ndarray, values: np.ndarray) -> Pair:
    if importlib.util.find_spec("ggml") is None:
        return None, None
    import ggml

    if int(dtype) >= ggml.GGML_TYPE_COUNT:
        return None, None
    traits = ggml.ggml_get_type_traits(int(dtype)).contents
    out, packed = np.empty((len(blocks), N_COLUMNS), np.float32), np.empty_like(blocks)

    def call(
        function: ctypes._CFuncPtr, source: np.ndarray, target: np.ndarray, n: int
    ) -> Callable[[], object]:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        return lambda: function(source.ctypes.data, target.ctypes.data, n)

    return (
        call(traits.to_float, blocks, out, out.size) if traits.to_float else None,
        call(traits.from_float_ref, values, packed, values.size)
        if can_quantize(dtype) and traits.from_float_ref
        else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--types", help="names, separated by commas; default all")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    names = args.types.split(",") if args.types else [d.name for d in DType if d.is_quantized]
    table = Table(
        "type", *(f"{way}: {who}" for way in ("read", "write") for who in ("ggmlb", "gguf", "ggml"))
    )
    for name in names:
        dtype = DType[name]
        values = np.random.default_rng(0).standard_normal((256, N_COLUMNS), np.float32)
        few = values[:16] if name in SEARCHES else values
        blocks = np.random.default_rng(0).integers(0, 100, (256, dtype.row_size(N_COLUMNS)), np.uint8)
        if can_quantize(dtype):
            blocks = np.tile(quantize(values[:16], dtype), (16, 1))
        out = np.empty_like(values)
        ours: Pair = (
            lambda out=out, blocks=blocks, dtype=dtype: dequantize_into(out, blocks, dtype),
            (lambda few=few, dtype=dtype: quantize(few, dtype)) if can_quantize(dtype) else None,
        )
        reads, writes = zip(ours, by_gguf(dtype, blocks, few), by_ggml(dtype, blocks, few), strict=True)
        speeds = [speed(call, values.size, args.rounds) for call in reads]
        speeds += [speed(call, few.size, args.rounds) for call in writes]
        table.row(name, *("-" if s is None else f"{s:.3g}" if s < 100 else f"{s:.0f}" for s in speeds))
    if not args.types:
        save("quants", __doc__ or "", table, packages=("numpy", "gguf", "ggml-python"))


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
