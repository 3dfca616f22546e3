"""Products by int8 tensor cores, on the PTX machine: beside the CPU backend, and beside dp4a."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ggmlb import Context, DType
from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.cublas import Gemm
from ggmlb.backends.cuda.kernels import RULES, Step, products
from ggmlb.backends.cuda.kernels.products import IN_SUB_BLOCKS, MMA_ROWS, tile
from ggmlb.backends.gpu import Launch, Target
from ggmlb.core.graph import Graph
from tests.support.ptx import Compiler, Memory, clang
from tests.support.ptx.machine import why_not
from tests.support.ptx.programs import (
    CARD,
    FEW,
    TURING,
    beside_cpu,
    close,
    experts_layer,
    fill,
    in_both_orders,
    on_cpu,
    steps_of,
)
from tests.support.ptx.runner import Runner, place

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ADA = replace(CARD, n_units=2, capability=89, shared=100 << 10)


def launched(steps: list[Step]) -> Launch:
    """Return the launch of the product."""
    (found,) = [s for s in steps if isinstance(s, Launch) and s.kernel.name.endswith("_mma")]
    return found


@pytest.mark.parametrize("dtype", sorted(IN_SUB_BLOCKS), ids=str)
@pytest.mark.parametrize(("m", "n", "target"), [(70, 20, CARD), (150, 70, FEW), (300, 64, ADA)], ids=str)
def test_every_type(dtype: DType, m: int, n: int, target: Target) -> None:
    """Tiles of few and of many rows, parts of a tile of both; rows that are whole tiles."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (768, m)), ctx.new_tensor(DType.F32, (768, n))
    defines = dict(launched(beside_cpu(ctx.mul_mat(w, x), ctx, target=target)).defines)
    assert int(defines["SETS_16"]) == (2 if int(defines["ROWS"]) >= 64 else 1)


@pytest.mark.parametrize("dtype", sorted(t for t in IN_SUB_BLOCKS if t.block_size == 32), ids=str)
@pytest.mark.parametrize("target", [CARD, FEW], ids=["16 rows", "more rows"])
@pytest.mark.parametrize("k", [96, 256 + 96])
def test_rows_that_end_within_a_tile(dtype: DType, k: int, target: Target) -> None:
    """Behind the end is what belongs to others: memory that the machine must not see read, and NaN."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (k, 113)), ctx.new_tensor(DType.F32, (k, 9))
    launched(beside_cpu(ctx.mul_mat(w, x), ctx, target=target))


@pytest.mark.parametrize("dtype", [DType.Q5_K, DType.Q6_K, DType.Q5_0], ids=str)
@pytest.mark.parametrize("compiler", [Compiler(80), Compiler(120), Compiler(90, "clang")], ids=str)
def test_other_architectures_and_compilers(compiler: Compiler, dtype: DType) -> None:
    """Whose texts unpack one sub-block or two at once."""
    if compiler.name == "clang" and clang.why_not() is not None:
        pytest.skip(str(clang.why_not()))
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (512, 40)), ctx.new_tensor(DType.F32, (512, 40))
    y = ctx.mul_mat(w, x)
    fill(ctx)
    Runner(Memory(compiler)).run(steps_of(y, replace(FEW, capability=compiler.capability)))
    got = y.to_numpy().copy()
    close(got, on_cpu(y))


@pytest.mark.parametrize("dtype", sorted(IN_SUB_BLOCKS), ids=str)
def test_it_multiplies_the_same_integers_as_dp4a(dtype: DType) -> None:
    """Of the same activations in 8 bits: sums are rounded otherwise, and mins to the 11 bits of TF32."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (1024, 40)), ctx.new_tensor(DType.F32, (1024, 30))
    y = ctx.mul_mat(w, x)
    fill(ctx)
    results = []
    for target in (CARD, TURING):
        steps = steps_of(y, target)
        Runner().run(steps)
        results.append(y.to_numpy().astype(np.float64))
        y.memset(0xFF, 0, y.nbytes)
    assert [s.kernel.name for s in steps if isinstance(s, Launch)] == ["quantize_q8", "mul_mat_q8"]
    got, want = results
    most = 1e-6 if dtype in products.WITH_MINS else 4e-9 if dtype in products.IN_HALVES else 1e-13
    assert ((got - want) ** 2).sum() / (want**2).sum() < most


def test_sums_that_are_integers_stay_exact() -> None:
    """One activation of a column counts: scales are powers of two, and no rounding may be left."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q8_0, (512, 64)), ctx.new_tensor(DType.F32, (512, 16))
    y = ctx.mul_mat(w, x)
    place(ctx)
    weights = np.random.default_rng(1).integers(-127, 128, (64, 512)).astype(np.float32)
    weights[:, ::32] = 127.0  # the scale of each block is one
    w.set_array(weights)
    ones = np.zeros((16, 512), np.float32)
    ones[np.arange(16), 31 * np.arange(16) + 3] = 127.0
    x.set_array(ones)
    Runner().run(steps_of(y, CARD))
    np.testing.assert_array_equal(y.to_numpy(), ones @ weights.T)


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_K], ids=str)
def test_matrices_of_activations_share_weights(dtype: DType) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256, 19, 2)), ctx.new_tensor(DType.F32, (256, 11, 4, 2))
    assert launched(beside_cpu(ctx.mul_mat(w, x), ctx)).groups[2] == 8


@pytest.mark.parametrize("k", [512, 8192 + 256])
@pytest.mark.parametrize("residual", [False, True])
def test_a_bias_is_added(residual: bool, k: int) -> None:
    """By the kernel itself, or by the one that adds the sums of parts of long rows."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q5_K, (k, 40)), ctx.new_tensor(DType.F32, (k, 17))
    y = ctx.add(ctx.mul_mat(w, x), ctx.new_tensor(DType.F32, (40, 17) if residual else (40,)))
    (group,) = fuse(Graph().build_forward_expand(y), lambda group: RULES.find(group, CARD) is not None)
    assert isinstance(group, Group)
    fill(ctx)
    steps = steps_of(group)
    close(in_both_orders(steps, y), on_cpu(y))
    splits = int(dict(launched(steps).defines)["SPLITS"])
    assert (splits > 1) == (k > 512) == any(s.kernel.name == "add_splits" for s in steps)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.Q6_K], ids=str)
def test_blocks_share_long_rows(dtype: DType) -> None:
    """Of all matrices of activations; the last part is shorter."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256 * 43, 30, 2)), ctx.new_tensor(DType.F32, (256 * 43, 12, 2, 2))
    steps = beside_cpu(ctx.mul_mat(w, x), ctx)
    assert [s.kernel.name for s in steps if isinstance(s, Launch)] == [
        "quantize_q8", "mul_mat_mma", "add_splits",
    ]  # fmt: skip
    assert launched(steps).groups == (8, 2, 4)


@pytest.mark.parametrize("dtype", sorted(IN_SUB_BLOCKS), ids=str)
@pytest.mark.parametrize(
    ("m", "tokens", "target"), [(70, 60, CARD), (150, 170, FEW), (300, 60, ADA)], ids=str
)
def test_experts(dtype: DType, m: int, tokens: int, target: Target) -> None:
    """An expert without tokens, and one with more than its blocks take at a time."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (768, m, 4)), ctx.new_tensor(DType.F32, (768, 1, tokens))
    ids = ctx.new_tensor(DType.I32, (2, tokens))
    chosen = np.random.default_rng(1).choice([0, 3], (tokens, 2))
    chosen[:-7, 0] = 3
    steps = beside_cpu(ctx.mul_mat_id(w, x, ids), ctx, lambda: ids.set_array(chosen), target)
    assert [s.kernel.name for s in steps if isinstance(s, Launch)] == [
        "sort_pairs", "quantize_q8", "mul_mat_experts_mma",
    ]  # fmt: skip
    found = launched(steps)
    columns = int(dict(found.defines)["COLUMNS"])
    assert found.groups[2] == 4
    assert found.groups[0] * columns < (chosen == 3).sum()


@pytest.mark.parametrize("slots", [1, 3])
def test_experts_of_each_slot(slots: int) -> None:
    """Activations for each slot, rows that end within a tile; pairs without an expert are skipped."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q4_1, (96, 40, 3)), ctx.new_tensor(DType.F32, (96, slots, 30))
    ids = ctx.new_tensor(DType.I32, (3, 30))
    y = ctx.mul_mat_id(w, x, ids)
    fill(ctx)
    chosen = np.random.default_rng(2).integers(0, 3, (30, 3), np.int32)
    ids.set_array(chosen)
    want = on_cpu(y).copy()
    chosen[7, 1], chosen[20, 2] = -1, 3
    ids.set_array(chosen)
    y.memset(0, 0, y.nbytes)
    steps = steps_of(y)
    launched(steps)
    Runner().run(steps)
    want[7, 1] = want[20, 2] = 0.0
    close(y.to_numpy(), want)


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_of_experts_with_many_tokens(biased: bool) -> None:
    names = [s.kernel.name for s in experts_layer(DType.Q8_0, 40, 4, biased=biased) if isinstance(s, Launch)]
    assert names.count("mul_mat_experts_mma") == 3, "biases are part of the products"


def test_experts_of_few_tokens_go_to_dp4a() -> None:
    """Up to the columns of one pass of it; before Ampere always."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q4_K, (256, 32, 4)), ctx.new_tensor(DType.F32, (256, 1, 64))

    def name(target: Target, tokens: int) -> str:
        node = ctx.mul_mat_id(
            w, ctx.view_3d(x, 256, 1, tokens, 1024, 1024), ctx.new_tensor(DType.I32, (2, tokens))
        )
        found = steps_of(node, target)[-1]
        assert isinstance(found, Launch)
        return found.kernel.name

    place(ctx)
    assert [name(CARD, n) for n in (16, 17)] == ["mul_mat_experts_q8", "mul_mat_experts_mma"]
    assert name(TURING, 64) == "mul_mat_experts_q8"


def test_what_computes_a_product_hangs_on_the_card_and_the_columns() -> None:
    ctx = Context()
    w, f = (ctx.new_tensor(dtype, (512, 64)) for dtype in (DType.Q4_K, DType.F16))

    def way(target: Target, n: int, a: object = w) -> str:
        return products._way(target, a, n).name  # type: ignore[arg-type]

    for capability, most in (
        (80, 1023),
        (86, None),
        (89, None),
        (90, 255),
        (100, 127),
        (103, 47),
        (120, None),
    ):
        target = replace(CARD, capability=capability)
        assert [way(target, n) for n in (1, 8, 9, most or 4096)] == ["FEW", "FEW", "MMA", "MMA"]
        if most is not None:
            assert way(target, most + 1) == "BLAS"
            assert way(replace(target, blas=False), most + 1) == "MMA"
        assert [way(target, n, f) for n in (8, 9)] == ["FEW", "BLAS"]
    assert [way(TURING, n) for n in (32, 33)] == ["FEW", "BLAS"]


@pytest.mark.parametrize("dtype", sorted(IN_SUB_BLOCKS), ids=str)
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_tiles_fit_a_multiprocessor(capability: int, dtype: DType) -> None:
    shared = {80: 164, 89: 100, 90: 228}[capability] << 10
    target, ctx = replace(CARD, capability=capability, shared=shared), Context()
    for m in (64, 1024, 4096, 14336, 128256):
        a = Mem.of(ctx.new_tensor(dtype, (4096, m)))
        for n in (9, 16, 33, 64, 100, 512):
            found = tile(target, a, n)
            assert (found.shared + 1024) * found.blocks <= shared
            assert found.stages >= 2
            assert found.columns % 16 == 0
            assert found.columns * -(-n // found.columns) < n + 16 * -(-n // found.columns)
        for n_pairs in (300, 1000, 4096, 30000):
            found = tile(target, a, n_pairs, n_experts=32)
            assert (found.shared + 8 * found.columns + 1024) * found.blocks <= shared
            assert found.stages >= 2
            assert found.splits == 1
    assert tile(target, Mem.of(ctx.new_tensor(dtype, (4096, 1024))), 16).rows == MMA_ROWS[-1]


def test_no_library_is_needed() -> None:
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q4_0, (256, 19)), ctx.new_tensor(DType.F32, (256, 300))
    steps = beside_cpu(ctx.mul_mat(w, x), ctx, target=replace(CARD, blas=False))
    assert not any(isinstance(s, Gemm) for s in steps)
    assert launched(steps).groups[0] == 5
