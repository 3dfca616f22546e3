"""Blocks that a device writes are the reference's, to the byte, of every type that it can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, Status, alloc_ctx_tensors, device_by_name
from ggmlb.core import dtypes
from ggmlb.interface import Backend

NE0, BLOCK = 96, 32
SOURCES = (DType.F32, DType.F16, DType.BF16)
WRITTEN = tuple(DType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"))


def _sprinkled(random: np.random.Generator, values: np.ndarray, *what: float) -> np.ndarray:
    values = values.copy()
    places = random.random(values.shape) < 0.05
    values[places] = random.choice(what, int(places.sum()))
    return values


def data(random: np.random.Generator) -> np.ndarray:
    """Rows of random numbers, of few levels (so that largest ones and halves of steps tie), of odd ones."""
    shape = (200, NE0)
    normal = random.standard_normal(shape)
    levels = random.integers(-9, 10, shape) // random.integers(1, 9, (shape[0], 1)) * 0.25
    signs = random.choice([-3.0, 3.0], shape)
    sizes = normal * 10.0 ** random.uniform(-44, 4, (shape[0], 1))
    odd = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40)
    rows = [
        normal,
        levels,
        signs,
        sizes,
        *(_sprinkled(random, normal, value) for value in odd),
        *(_sprinkled(random, levels, value) for value in odd),
        _sprinkled(random, normal, *odd),
        *(np.full(shape, value)[:3] for value in odd),
    ]
    return np.concatenate(rows).astype(np.float32)


@pytest.fixture(
    scope="module",
    params=[
        ("CPU", {}),
        ("LLVM", {}),
        ("OpenCL0", {"work_split": "cpu"}),
        ("OpenCL0", {"work_split": "gpu"}),
    ],
    ids=lambda param: "-".join([param[0], *param[1].values()]),
)
def stream(request: pytest.FixtureRequest) -> Iterator[Backend]:
    name, params = request.param
    with device_by_name(name).init_backend(params) as backend:
        yield backend


@pytest.mark.parametrize("src", SOURCES, ids=str)
@pytest.mark.parametrize("dst", WRITTEN, ids=str)
def test_blocks_are_the_references(stream: Backend, src: DType, dst: DType) -> None:
    values = data(np.random.default_rng(0))
    ctx = Context()
    a, d = (ctx.new_tensor(dtype, (NE0, len(values))) for dtype in (src, dst))
    y = ctx.cpy(a, d)
    with alloc_ctx_tensors(ctx, stream), np.errstate(all="ignore"):
        a.set_array(values)
        assert stream.graph_compute(Graph().build_forward_expand(y)) is Status.SUCCESS
        found, read = d.get().reshape(-1, dst.type_size), a.to_numpy().astype(np.float32)
        right = dtypes.quantize(read, dst).view(np.uint8).reshape(found.shape)
    found, right = (_without_undefined(blocks, dst) for blocks in (found, right))
    wrong = np.nonzero((found != right).any(1))[0]
    blocks = read.reshape(-1, BLOCK)
    assert not wrong.size, f"{wrong.size} of {len(found)} blocks, first {wrong[0]}: {blocks[wrong[0]]}"


def _without_undefined(blocks: np.ndarray, dtype: DType) -> Any:
    """One NaN for all; no codes for blocks of IQ4_NL whose scale is 0, where ggml leaves them undefined."""
    blocks = blocks.copy()
    for at in (0, 2) if dtype in (DType.Q4_1, DType.Q5_1) else (0,):
        scales = blocks[:, at : at + 2].view(np.float16)
        scales[np.isnan(scales)] = np.nan
        if dtype is DType.IQ4_NL:
            blocks[(scales == 0)[:, 0], 2:] = 0
    return blocks
