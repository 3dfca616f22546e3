"""The vector layer: each primitive against NumPy, on every instruction set that this processor runs."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from collections.abc import Callable

import ggmlb
from ggmlb.backends.llvm.codegen import host, simd
from ggmlb.backends.llvm.codegen.emit import F32, I8, Emitter, vec
from ggmlb.backends.llvm.codegen.library import Library, function, library, optimised, source_files
from ggmlb.backends.llvm.kernels import (
    activations,
    attention,
    byte_tiles,
    convert,
    driver,
    float_bands,
    float_tiles,
    interleaved_products,
    matvec,
    recurrent,
    select,
    tiles,
)
from ggmlb.backends.llvm.kernels.attention import HeadParams
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.backends.llvm.kernels.convert import WRITERS
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ArgumentError

Emit = Callable[..., None]

LEVELS = [level.name for level in host.levels_here()]

pytestmark = pytest.mark.parametrize("simd_name", LEVELS)


@pytest.fixture
def lib(simd_name: str) -> Library:
    return library(simd_name)


def call(lib: Library, emit: Emit, params: tuple[Any, ...], *arrays: Any) -> None:
    """Run a kernel on arrays."""
    args = np.array([a.ctypes.data for a in arrays], np.int64)
    function(lib.address(emit, params), 4)(args.ctypes.data, 0, 1, 0)


def dots(k: Emitter, lanes: int, offset: int | None) -> None:
    codes_at, x_at, y_at = k.ints(3)
    codes, x = (k.load(vec(I8, 4 * lanes), at) for at in (codes_at, x_at))
    dot = simd.Dot(k, lanes)
    k.store(dot(dot.start(x, offset), codes, x, offset), y_at)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(("offset", "most"), [(0, 63), (8, 15), (32, 63), (None, 127)])
def test_products_of_bytes(lib: Library, lanes: int, offset: int | None, most: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-127 if offset is None else 0, most, 4 * lanes, np.int8, endpoint=True)
    codes[:4], x = most, rng.integers(-127, 127, 4 * lanes, np.int8, endpoint=True)
    x[:4] = -127  # the greatest sums
    y = np.zeros(lanes, np.int32)
    call(lib, dots, (lanes, offset), codes, x, y)
    right = ((codes.astype(int) - (offset or 0)) * x).reshape(lanes, 4).sum(1)
    assert (y == right).all()


def mapped(k: Emitter, name: str, n: int) -> None:
    x_at, y_at = k.ints(2)
    values = k.load(vec(F32, n), x_at)
    fn = getattr(simd, name)
    found = fn(k, values)
    k.store(found[0] if name == "sin_cos" else found, y_at)


FUNCTIONS = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "sin_cos": np.sin,
    "sigmoid": None,
    "tanh": np.tanh,
}


def every_size() -> np.ndarray:
    """Numbers of every exponent that float32 has, both signs, and those around the ends of `exp`."""
    rng = np.random.default_rng(0)
    sizes = np.ldexp(1 + rng.random((8, 277)), np.arange(-149, 128)).ravel()
    ends = np.concatenate([np.linspace(85, 90, 200), np.linspace(100, 105, 50)])
    values = np.concatenate([sizes, ends, [0.0, np.finfo(np.float32).max, np.inf]])
    return np.concatenate([values, -values, [np.nan]]).astype(np.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numbers_of_every_size(lib: Library, name: str) -> None:
    n = lib.target.level.lanes
    x = every_size()
    x = np.resize(x, -(-x.size // n) * n)
    y = np.empty_like(x)
    for i in range(0, x.size, n):
        call(lib, mapped, (name, n), x[i:], y[i:])
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        fn = FUNCTIONS[name]
        right = (fn(wide) if fn is not None else 1 / (1 + np.exp(-wide))).astype(np.float32)
    np.testing.assert_allclose(y, right, rtol=4e-7, atol=2e-38)


def halves(k: Emitter, n: int) -> None:
    x_at, half_at, back_at, bfloat_at = k.ints(4)
    x = k.load(vec(F32, n), x_at)
    half = simd.to_half(k, x)
    k.store(half, half_at)
    k.store(simd.from_half(k, half), back_at)
    k.store(simd.to_bfloat(k, x), bfloat_at)


def test_halves(lib: Library) -> None:
    n = 8
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4096) * 2.0 ** rng.integers(-28, 18, 4096)).astype(np.float32)
    x[:9] = 0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 2**-25
    half, back, bfloat = np.empty(4096, np.uint16), np.empty(4096, np.float32), np.empty(4096, np.uint16)
    for i in range(0, x.size, n):
        call(lib, halves, (n,), *(a[i:] for a in (x, half, back, bfloat)))
    with np.errstate(over="ignore"):
        right = x.astype(np.float16)
    real = ~np.isnan(x)
    assert (half.view(np.float16)[real] == right[real]).all()
    assert (back[real] == right[real].astype(np.float32)).all()
    assert np.isnan(half.view(np.float16)[~real]).all()
    assert (bfloat.view(DType.BF16.numpy)[real] == x[real].astype(DType.BF16.numpy)).all()


def turned(k: Emitter, n: int) -> None:
    x_at, y_at, sums_at = k.ints(3)
    rows = [k.load(vec(F32, n), x_at + 4 * n * i) for i in range(n)]
    for i, row in enumerate(tiles.transposed(rows)):
        k.store(row, y_at + 4 * n * i)
    k.store(simd.folds(rows, operator.add), sums_at)


def test_transposing_and_sums_of_rows(lib: Library) -> None:
    n = lib.target.level.lanes
    x = np.random.default_rng(0).integers(0, 99, (n, n)).astype(np.float32)
    y, sums = np.empty_like(x), np.empty(n, np.float32)
    call(lib, turned, (n,), x, y, sums)
    assert (y == x.T).all()
    assert (sums == x.sum(1)).all()


def blocks(k: Emitter, dtype: str, n_bytes: int) -> None:
    at, codes_at, scales_at = k.ints(3)
    form = FORMATS[dtype]
    places = [at + i * form.nbytes for i in range(256 // form.block)]
    if n_bytes:
        runs = [v for i in range(4) for v in form.pair(k, places, i, n_bytes)]
    else:
        runs = [run for place in places for run in form.codes(k, place)]
    for i, run in enumerate(runs):
        k.store(run, codes_at + i * (n_bytes or 32))
    scales, minimums = form.scales(k, places)
    k.store(scales, scales_at)
    k.store(minimums if minimums is not None else scales * 0.0, scales_at + 64)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("n_bytes", [0, 32, 64])
def test_blocks(lib: Library, dtype: str, n_bytes: int) -> None:
    """Codes run by run, or in pairs, whose vectors have a half of each run in turn."""
    form, kind = FORMATS[dtype], DType[dtype.upper()]
    if n_bytes == 64 and lib.target.level.lanes < 16:
        pytest.skip("has no vectors of 64 bytes")
    if dtypes.can_quantize(kind):
        raw = np.asarray(dtypes.quantize(np.random.default_rng(0).normal(size=(1, 256)), kind)).view(np.uint8)
    else:
        raw = dtypes.random_blocks(kind, 256)
    codes, scales = np.empty(256, np.int8), np.zeros(32, np.float32)
    call(lib, blocks, (dtype, n_bytes), raw.reshape(-1), codes, scales)
    if n_bytes == 32:
        codes = codes.reshape(4, 2, 2, 16).swapaxes(1, 2).reshape(-1)
    n = 256 // form.group
    wide = codes.astype(int) - (form.offset or 0)
    values = wide.reshape(n, -1) * scales[:n, None] + scales[16 : 16 + n, None]
    right = np.asarray(dtypes.dequantize(raw.reshape(-1), kind)).reshape(-1)
    np.testing.assert_allclose(values.reshape(-1), right, rtol=2e-6, atol=1e-7)


def test_a_level_by_its_name(simd_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGMLB_SIMD", simd_name)
    assert library().target.level.name == simd_name
    monkeypatch.setenv("GGMLB_SIMD", simd_name + "x")
    with pytest.raises(ArgumentError, match=f"this processor runs.*{LEVELS[0]}"):
        library()


@pytest.mark.parametrize("dtype", WRITERS)
def test_blocks_are_written_as_ggml_does(lib: Library, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    x[0], x[1], x[2] = 0, -3, x[2] * 1e-20
    kind = DType[dtype.upper()]
    right = dtypes.quantize(x, kind).view(np.uint8).reshape(9, -1)
    found = np.zeros_like(right)
    rows = [64, 9, 1, 1, 1, found.ctypes.data, right.shape[1], 0, 0, x.ctypes.data, 256, 0, 0]
    args = np.array(rows, np.int64)
    function(lib.address(convert.copy, (dtype, "f32")), 4)(args.ctypes.data, 0, 1, 0)
    if dtype == "iq4_nl":  # where the scale is 0, codes do not matter
        right, found = (dtypes.dequantize(blocks, kind) for blocks in (right, found))
    assert (found == right).all()


def test_kernels_on_disk_are_of_all_sources(simd_name: str) -> None:
    """Every module of backends and blocks that an emitter can reach is in the digest that names the files."""
    root, files = Path(ggmlb.__file__).parents[1], source_files()
    assert {Path(emit.__file__) for emit in (simd, convert)} <= set(files)
    for path in files[:-1]:  # the last holds constants
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(
                r"ggmlb\.(backends|core\.quants)\.", node.module or ""
            ):
                at = root.joinpath(*node.module.split("."))
                used = [at / f"{a.name}.py" for a in node.names] if at.is_dir() else [at.with_suffix(".py")]
                assert set(used) <= set(files), f"{path.name} imports from {node.module}"


NEON = host.CompileTarget(
    next(level for level in host.LEVELS if level.name == "neon"), "generic", "+neon,+dotprod,+fullfp16",
    "aarch64-unknown-linux-gnu",
)  # fmt: skip

FLASH = HeadParams(64, 64, "f32", "q8_0", "f16", True, True, True)


@pytest.mark.parametrize(
    ("emit", "params", "instruction"),
    [
        (matvec.few, ("q4_k", 4, 1, "q8", 3), "sdot"),
        (matvec.few, ("iq4_nl", 4, 1, "q8", 3), "tbl"),
        (interleaved_products.few, ("q2_k", 1, "q8", 3), "sdot"),
        (byte_tiles.many, ("q6_k", "q8", False, 3, tiles.Epilogue()), "sdot"),
        (float_bands.floats, ("f32", "f32", 4), "fmla"),
        (float_tiles.many, ("f16", "f32", False, 6, tiles.Epilogue(True, "gelu")), "fmla"),
        (activations.quantize, ("f32", activations.ActivationLayout(wide=True)), "frintx"),
        (convert.copy, ("q8_0", "f32"), "frinta"),
        (convert.copy, ("iq4_nl", "f32"), "tbl"),
        (attention.few, (FLASH, 4, False), "fmla"),
        (attention.merge, (FLASH, 4), "fmla"),
        (select.sort, ("f16", True, False), "cmgt"),
        (recurrent.gated_delta_net, (False, 0), "fmla"),
        (driver.run, (), "stlr"),
        (driver.serve, (), "ldar"),
    ],
)
def test_neon_compiles(emit: Emit, params: tuple[Any, ...], instruction: str, simd_name: str) -> None:
    if simd_name != LEVELS[0]:
        pytest.skip("once is enough")
    machine = NEON.machine(jit=False)
    text = machine.emit_assembly(optimised(NEON, machine, emit, params, "kernel"))
    assert instruction in text
