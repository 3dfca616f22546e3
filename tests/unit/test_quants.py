"""Quantised blocks: read as gguf reads them, written as ggml writes them, to the bit."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.core import quants
from ggmlb.core.dtypes import DType, can_quantize, dequantize, dequantize_into, quantize
from ggmlb.core.quants import grids
from ggmlb.core.quants.codec import Codec
from tests.support.quants_data import PATH, WRITABLE, samples

QUANTIZED = [d for d in DType if d.is_quantized]
GGUF_READS = [d for d in QUANTIZED if int(d) in {int(q) for q in gguf.quants._type_traits}]
GOLDEN = Path(__file__).parents[1] / "golden" / "programs"

NMSE = {
    "Q1_0": 0.36, "Q2_0": 0.51, "TQ1_0": 0.64, "TQ2_0": 0.64, "Q2_K": 0.088, "Q3_K": 0.023,
    "Q4_0": 7.3e-3, "Q4_1": 6.2e-3, "Q4_K": 5.1e-3, "IQ4_NL": 6.2e-3, "IQ4_XS": 5.9e-3, "MXFP4": 1.3e-2,
    "NVFP4": 9.3e-3, "Q5_0": 1.8e-3, "Q5_1": 1.5e-3, "Q5_K": 1.4e-3, "Q6_K": 3.2e-4,
    "Q8_0": 2.9e-5, "Q8_1": 2.9e-5, "Q8_K": 4.6e-5,
}  # fmt: skip
"""The most that writing bell-shaped values may lose: the mean squared error over the mean square."""


def blocks_of(dtype: DType, n: int, seed: int = 0) -> np.ndarray:
    """Random bytes; scales among them may be infinite or NaN."""
    return np.random.default_rng(seed).integers(0, 256, (n, dtype.type_size), np.uint8)


def test_every_quantised_type_has_a_codec() -> None:
    families = (import_module(f"{quants.__name__}.{m.name}") for m in iter_modules(quants.__path__))
    codecs = {name: value for f in families for name, value in vars(f).items() if isinstance(value, Codec)}
    assert {d.name: d.codec for d in QUANTIZED} == codecs
    assert {d.name for d in QUANTIZED if not can_quantize(d)} == {
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    }  # fmt: skip


# -- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", GGUF_READS, ids=str)
def test_reading_gives_what_gguf_reads(dtype: DType) -> None:
    blocks = blocks_of(dtype, 500)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, GGMLQuantizationType(int(dtype)))
    np.testing.assert_array_equal(dequantize(blocks, dtype), expected, strict=True)


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_grids_are_those_of_gguf(name: str) -> None:
    codec = getattr(gguf.quants, name)
    codec.init_grid()
    entries = codec.grid[0, 0].astype(np.int8)
    np.testing.assert_array_equal(grids.grid(name).view(np.int8).reshape(entries.shape), entries)


def half(block: np.ndarray, at: int) -> np.float32:
    return block[at : at + 2].view(np.float16)[0].astype(np.float32)


DEFINITIONS = {
    DType.Q1_0: lambda b: [half(b, 0) * (1 if b[2 + i // 8] >> i % 8 & 1 else -1) for i in range(128)],
    DType.Q2_0: lambda b: [half(b, 0) * (float(b[2 + i // 4] >> 2 * (i % 4) & 3) - 1) for i in range(64)],
    DType.Q8_1: lambda b: half(b, 0) * b[4:].view(np.int8),
    DType.Q8_K: lambda b: b[:4].view(np.float32) * b[4:260].view(np.int8),
}
"""The types that gguf does not read, element by element."""


def test_all_types_have_something_to_be_compared_with() -> None:
    assert {*GGUF_READS, *DEFINITIONS} >= set(QUANTIZED)


@pytest.mark.parametrize("dtype", DEFINITIONS, ids=str)
def test_reading_follows_the_definition(dtype: DType) -> None:
    blocks = blocks_of(dtype, 50)
    with np.errstate(all="ignore"):
        expected = np.array([DEFINITIONS[dtype](block) for block in blocks], np.float32)
    np.testing.assert_array_equal(dequantize(blocks, dtype), expected)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_reading_does_not_depend_on_how_blocks_are_grouped(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(dtype, 24)
    whole = dequantize(blocks, dtype)
    np.testing.assert_array_equal(dequantize(blocks.reshape(2, 3, -1), dtype).reshape(whole.shape), whole)
    np.testing.assert_array_equal(dequantize(blocks[::3], dtype), whole[::3])
    monkeypatch.setattr(quants, "_READ_VALUES", 5 * dtype.block_size)
    np.testing.assert_array_equal(dequantize(blocks, dtype), whole)


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_reading_fills_the_array_that_is_given(dtype: DType) -> None:
    values = samples(512)["integers"].reshape(2, 256)
    blocks = quantize(values, dtype) if can_quantize(dtype) else blocks_of(dtype, 2)
    out = np.full((4, 256), np.float32(7))
    dequantize_into(out[1:3], blocks, dtype)
    np.testing.assert_array_equal(out[1:3], dequantize(blocks, dtype))
    assert (out[[0, 3]] == 7).all()


def test_threads_may_read_and_write_side_by_side() -> None:
    values = np.stack(list(samples(4096).values()))
    for dtype in (DType.Q4_K, DType.Q6_K, DType.NVFP4, DType.Q8_0):
        blocks = quantize(values, dtype)
        expected = dequantize(blocks, dtype)
        out = np.empty_like(expected)
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(lambda row, d=dtype: quantize(row, d), values))
            list(pool.map(lambda o, b, d=dtype: dequantize_into(o, b, d), out, blocks))
        np.testing.assert_array_equal(written, blocks)
        np.testing.assert_array_equal(out, expected)


# -- writing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", np.load(PATH).files)
def test_writing_gives_what_ggml_writes(name: str) -> None:
    dtype = DType[name]
    values = samples()
    with np.load(PATH) as file:
        by_ggml = dict(zip(values, file[name], strict=True))
    for kind, row in values.items():
        expected = by_ggml[kind].reshape(-1, dtype.type_size)
        got = quantize(row, dtype).reshape(expected.shape)
        if dtype == DType.IQ4_NL:  # ggml leaves the codes of a block of zeros undefined
            zero = (expected[:, :2].view(np.float16) == 0)[:, 0]
            np.testing.assert_array_equal(got[zero, :2], expected[zero, :2], err_msg=kind)
            got, expected = got[~zero], expected[~zero]
        np.testing.assert_array_equal(got, expected, err_msg=kind)


def golden_copies() -> list[pytest.ParameterSet]:
    """The golden programs that convert float32 to a quantised type, by one `cpy`."""
    cases = [json.loads(line) for line in (GOLDEN / "set_rows_cpy.jsonl").read_text().splitlines()]
    return [
        pytest.param(case, id=case["outputs"][0]["type"])
        for case in cases
        if [s["fn"] for s in case["steps"]] == ["cpy"]
        and case["leafs"][0]["type"] == "f32"
        and case["outputs"][0]["type"].upper() in {d.name.upper() for d in WRITABLE}
    ]


@pytest.mark.parametrize("case", golden_copies())
def test_writing_gives_what_the_golden_programs_hold(case: dict) -> None:
    (source, _), (output,) = case["leafs"], case["outputs"]
    with np.load(GOLDEN / "set_rows_cpy.npz") as file:
        values = file[source["data"]].view(np.float32).reshape(source["ne"][::-1])
        expected = file[output["data"]]
    np.testing.assert_array_equal(quantize(values, DType.parse(output["type"])).reshape(-1), expected)


def test_every_type_that_is_written_is_compared_with_ggml() -> None:
    golden = {p.values[0]["outputs"][0]["type"].upper() for p in golden_copies()}
    assert {d.name.upper() for d in WRITABLE} <= golden | {n.upper() for n in np.load(PATH).files}


@pytest.mark.parametrize("dtype", WRITABLE, ids=str)
def test_writing_does_not_depend_on_how_blocks_are_grouped(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.concatenate(list(samples(512).values())).reshape(-1, dtype.block_size)
    whole = quantize(values, dtype)
    alone = np.stack([quantize(row, dtype) for row in values])
    np.testing.assert_array_equal(alone, whole)
    np.testing.assert_array_equal(quantize(values.astype(np.float64)[::-1], dtype), whole[::-1])
    monkeypatch.setattr(quants, "_WRITE_VALUES", 3 * dtype.block_size)
    np.testing.assert_array_equal(quantize(values, dtype), whole)


@pytest.mark.parametrize("dtype", WRITABLE, ids=str)
def test_writing_leaves_the_values_alone(dtype: DType) -> None:
    values = samples()["bell"]
    before = values.copy()
    quantize(values, dtype)
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize("dtype", WRITABLE, ids=str)
def test_what_is_lost_is_within_bounds(dtype: DType) -> None:
    values = samples(1 << 14)["bell"]
    error = np.square(dequantize(quantize(values, dtype), dtype) - values).mean() / np.square(values).mean()
    assert 0.9 * NMSE[dtype.name] < error < NMSE[dtype.name]


@given(dtype=st.sampled_from(WRITABLE), exponent=st.integers(-44, 38), seed=st.integers(0, 99))
def test_any_magnitude_is_written_and_read_without_a_warning(dtype: DType, exponent: int, seed: int) -> None:
    values = np.random.default_rng(seed).uniform(-1, 1, (2, 256)) * 10.0**exponent
    blocks = quantize(values.astype(np.float32), dtype)
    assert blocks.shape == (2, dtype.row_size(256))
    assert dequantize(blocks, dtype).shape == (2, 256)
