"""CUDA's own kernels, executed on the host: against ggml's golden values, and against the portable kernels.

Their text is the one that a card gets (see tests/support/ptx). That shows right arithmetic, indices
and barriers; no GPU takes part.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from ggmlb import Context, DType
from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.cuda.cublas import Gemm
from ggmlb.backends.cuda.driver import grid
from ggmlb.backends.cuda.kernels import PACKAGE, Step
from ggmlb.backends.cuda.kernels.products import IN_SUB_BLOCKS
from ggmlb.backends.cuda.lowering import CudaLowering
from ggmlb.backends.gpu import RULES, Launch, Target
from ggmlb.backends.gpu.kinds import BoundItems
from ggmlb.backends.gpu.plan import place_pieces
from ggmlb.backends.gpu.source import kernels
from ggmlb.testing.programs import Built, Case
from tests.support.golden import CASES as GOLDEN
from tests.support.ptx import Compiler, Memory
from tests.support.ptx.machine import why_not
from tests.support.ptx.programs import (
    ATTENTION,
    CARD,
    FEW,
    TURING,
    attention,
    beside_cpu,
    computed,
    experts_layer,
    side_by_side,
    steps_of,
)
from tests.support.ptx.runner import Runner, place

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

OWN = set(kernels(PACKAGE))
FAMILIES = ("mul_mat", "mul_mat_id", "flash_attn")
ALIKE = ("-n1", "-bcast")
CASES = {case.id: case for case in GOLDEN}


def lowered(built: Built) -> list[Step]:
    return [step for node in built.graph.nodes for step in steps_of(node)]


def is_own(step: Step) -> bool:
    return isinstance(step, Gemm) or step.kernel.name in OWN


@pytest.mark.parametrize(
    ("family", "capability"),
    [*((family, 90) for family in FAMILIES), ("mul_mat_id", 75), ("flash_attn", 75), ("flash_attn", 120)],
)
def test_golden_programs(family: str, capability: int) -> None:
    """The cases in which CUDA's own kernels, or cuBLAS, have a part; some of those that differ by type."""
    cases = [case for case in CASES.values() if case.family == family and not case.id.endswith(ALIKE)]
    run_golden(cases, 10, capability)


@pytest.mark.slow
def test_golden_products_of_every_type() -> None:
    run_golden([case for case in CASES.values() if case.id.endswith(ALIKE)], 30, 90)


def run_golden(cases: list[Case], at_least: int, capability: int) -> None:
    n, memory = 0, Memory(Compiler(capability))
    for case in cases:
        built = case.build()
        if any(map(RULES.declines, built.graph.nodes)) or not any(map(is_own, lowered(built))):
            continue
        computed(case, memory, own=True)
        n += 1
    assert n >= at_least


def test_every_kernel_is_reached_from_the_golden_programs() -> None:
    # By products of more columns than these programs have; by several products.
    reached = {"dequantize", "glu_added", "mul_mat_mma", "mul_mat_experts_mma", "add_splits"}
    reached |= {"mul_mats_q8", "mul_mats_vec16"}
    for case in CASES.values():
        built = case.build()
        if case.family in FAMILIES and not any(RULES.declines(node) for node in built.graph.nodes):
            reached |= {s.kernel.name for s in lowered(built) if isinstance(s, Launch)}
    assert reached >= OWN


@pytest.mark.parametrize("dtype", sorted(IN_SUB_BLOCKS), ids=str)
def test_long_rows_in_pieces(dtype: DType) -> None:
    """Several tiles a row, the last one not full, shared by warps; rows that are no multiple of 16 bytes."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256 * 9, 7)), ctx.new_tensor(DType.F32, (256 * 9, 3))
    (quantize, product) = beside_cpu(ctx.mul_mat(w, x), ctx)
    assert isinstance(quantize, Launch)
    assert isinstance(product, Launch)
    assert (quantize.kernel.name, product.kernel.name) == ("quantize_q8", "mul_mat_q8")
    assert dict(product.defines)["SPLIT"] == "4"


def test_activations_in_8_bits() -> None:
    """Numbers, steps and sums as activations_q8.h says, exactly."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q4_0, (288, 1)), ctx.new_tensor(DType.F32, (288, 3))
    (quantize, _) = beside_cpu(ctx.mul_mat(w, x), ctx)
    assert isinstance(quantize, Launch)
    runner = Runner()
    runner.run([quantize])
    numbers, facts = (runner.memory.array(mem).reshape(3, -1) for mem in quantize.args[1:])  # type: ignore[arg-type]
    steps, sums = facts.view(np.float32)[:, ::2], facts.view(np.int16).reshape(3, -1, 4)[:, :, 2:]
    for piece in range(9):
        part = x.to_numpy()[:, 32 * piece : 32 * piece + 32]
        most = np.abs(part).max(axis=1, keepdims=True)
        want = np.rint(part * (np.float32(127) / most)).astype(np.int8).reshape(3, 2, 16)
        for half in range(2):
            at = 256 * (piece // 8) + 128 * half + 16 * (piece % 8)
            np.testing.assert_array_equal(numbers[:, at : at + 16].view(np.int8), want[:, half])
        np.testing.assert_array_equal(sums[:, piece], want.sum(axis=2))
        np.testing.assert_allclose(steps[:, piece], most[:, 0] / 127, rtol=1e-6)


@pytest.mark.parametrize(("k", "names"), [(8192, []), (8192 + 256, ["quantize_q8"])])
def test_a_product_makes_8_bits_of_one_row_by_itself(k: int, names: list[str]) -> None:
    """If shared memory has room for it; its groups take set after set of the weights' rows."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q8_0, (k, 70)), ctx.new_tensor(DType.F32, (k, 1))
    (*_, product) = steps = beside_cpu(ctx.mul_mat(w, x), ctx, target=FEW)
    assert [s.kernel.name for s in steps if isinstance(s, Launch)] == [*names, "mul_mat_q8"]
    assert isinstance(product, Launch)
    assert grid(product, lambda: 4) == (4, 1, 1)
    assert product.groups == grid(product, lambda: 9) == (5, 1, 1)


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.F16], ids=str)
def test_a_warp_takes_tile_after_tile(dtype: DType) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256 * 13, 20)), ctx.new_tensor(DType.F32, (256 * 13, 1))
    *_, product = beside_cpu(ctx.mul_mat(w, x), ctx, target=Target(False, 1, 128))
    assert isinstance(product, Launch)
    assert dict(product.defines)["SPLIT"] == "2"


@pytest.mark.parametrize("rows", [1, 40, 4096])
def test_rows_are_shared_out(rows: int) -> None:
    """Whether a warp has rows to itself, or shares them."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q4_0, (1056, rows)), ctx.new_tensor(DType.F32, (1056, 1))
    y = ctx.mul_mat(w, x)
    place(ctx)
    rng = np.random.default_rng(3)
    for t in (w, x):
        t.set_array(rng.standard_normal(t.shape, np.float32))
    steps = steps_of(y, Target(False, 2, 128))
    assert dict(steps[-1].defines)["SPLIT"] == {1: "2", 40: "2", 4096: "1"}[rows]  # type: ignore[union-attr]
    Runner().run(steps)
    want = x.to_numpy() @ w.to_numpy().T
    np.testing.assert_allclose(y.to_numpy(), want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("n", [1, 5])
def test_vectors(dtype: DType, n: int) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (1320, 13, 2)), ctx.new_tensor(DType.F32, (1320, n, 4))
    (step,) = beside_cpu(ctx.mul_mat(w, x), ctx)
    assert isinstance(step, Launch)
    assert step.kernel.name == "mul_mat_vec16"


@pytest.mark.parametrize("dtype", sorted(IN_SUB_BLOCKS), ids=str)
def test_experts_read_their_weights_once_for_eight_tokens(dtype: DType) -> None:
    """An expert without tokens, and one with more than its groups take at a time."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (512, 21, 5)), ctx.new_tensor(DType.F32, (512, 1, 18))
    ids = ctx.new_tensor(DType.I32, (2, 18))
    chosen = np.random.default_rng(1).choice([0, 1, 4], (18, 2))
    chosen[:, 0] = 3
    steps = beside_cpu(ctx.mul_mat_id(w, x, ids), ctx, lambda: ids.set_array(chosen))
    assert [s.kernel.name for s in steps if isinstance(s, Launch)] == [
        "sort_pairs", "quantize_q8", "mul_mat_experts_q8",
    ]  # fmt: skip
    assert steps[-1].groups[1:] == (2, 5)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.F16, DType.F32], ids=str)
@pytest.mark.parametrize(("n", "biased"), [(1, False), (1, True), (9, False), (9, True)])
def test_a_layer_of_experts(dtype: DType, n: int, biased: bool) -> None:
    steps = experts_layer(dtype, n, 4, biased=biased)
    names = [s.kernel.name if isinstance(s, Launch) else "gemm" for s in steps]
    assert names.count("route") == names.count("sum_slots") == 1
    if n == 1:
        by = "mul_mat_id_q8" if dtype.is_quantized else "mul_mat_id_vec16"
        assert names[-3:] == [by, by, "sum_slots"], "gate and up are one launch"
    else:
        by = "mul_mat_experts_q8" if dtype.is_quantized else "mul_mat_id_tile"
        assert names.count(by) == (2 if dtype.is_quantized else 3)


@pytest.mark.parametrize("dtype", [*sorted(IN_SUB_BLOCKS), DType.BF16], ids=str)
def test_products_of_one_operand(dtype: DType) -> None:
    (step,) = side_by_side(dtype, 1, (20, 9, 3), bias=True, k=512)
    assert isinstance(step, Launch)
    assert step.kernel.name == ("mul_mats_q8" if dtype.is_quantized else "mul_mats_vec16")


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.Q6_K, DType.F16], ids=str)
@pytest.mark.parametrize(("target", "n"), [(TURING, 40), (CARD, 256)], ids=str)
def test_many_columns_go_to_cublas(target: Target, n: int, dtype: DType) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256, 19, 2)), ctx.new_tensor(DType.F32, (256, n, 4))
    steps = beside_cpu(ctx.mul_mat(w, x), ctx, target=target)
    assert isinstance(steps[-1], Gemm)
    assert steps[-1].a.dtype is DType.F16
    assert len(steps) == (3 if dtype.is_quantized else 2)


@pytest.mark.parametrize("apart", [False, True])
def test_weights_become_halves_row_by_row_where_there_are_gaps(apart: bool) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q5_K, (512, 5, 3)), ctx.new_tensor(DType.F32, (512, 40, 5 if apart else 3))
    (first, *_) = beside_cpu(ctx.mul_mat(ctx.permute(w, 0, 2, 1, 3) if apart else w, x), ctx, target=TURING)
    assert isinstance(first, Launch)
    assert (first.kernel.name, dict(first.defines)["ONE_ROW"]) == ("dequantize", str(int(not apart)))
    assert first.groups == ((1, 15, 1) if apart else (4, 1, 1))


@pytest.mark.parametrize("kv", [DType.F16, DType.BF16, DType.Q8_0], ids=str)
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention(shape: str, kv: DType) -> None:
    if ATTENTION[shape][1] % kv.block_size:
        pytest.skip("rows are whole blocks")
    names = [s.kernel.name for s in attention(shape, kv) if isinstance(s, Launch)]
    in_parts = "decode" in shape or "splits" in shape
    assert names == (["flash_mma", "flash_combine"] if in_parts else ["flash_mma"])


def test_values_of_bf16_beyond_the_range_of_f16() -> None:
    """Keys of one type, values of the other; weights are rounded to bf16 with them."""
    ctx = Context()
    q, k = ctx.new_tensor(DType.F32, (64, 3, 2)), ctx.new_tensor(DType.F16, (64, 70, 1))
    v = ctx.new_tensor(DType.BF16, (64, 70, 1))
    large = np.random.default_rng(4).standard_normal(v.shape, np.float32) * np.float32(1e30)
    y = ctx.flash_attn_ext(q, k, v, None, 0.125)
    steps = beside_cpu(ctx.scale(y, 1e-30), ctx, lambda: v.set_array(large))
    assert isinstance(steps[0], Launch)
    assert steps[0].kernel.name == "flash_mma"


@pytest.mark.parametrize(
    ("n_q", "heads", "n_kv", "words"),
    [(150, 1, 300, 2), (3, 4, 300, 2), (70, 2, 1600, 3), (3, 4, 2048, 3), (20, 1, 1301, 1)],
)
def test_tiles_that_nobody_sees_are_passed_over(n_q: int, heads: int, n_kv: int, words: int) -> None:
    """A causal mask, over more keys than there are: the last are hidden from all queries."""
    ctx = Context()
    q, k, v = (
        ctx.new_tensor(DType.F32, (64, n_q, heads)),
        *(ctx.new_tensor(DType.F16, (64, n_kv)) for _ in "kv"),
    )
    mask = ctx.new_tensor(DType.F16, (n_kv, n_q))
    y = ctx.flash_attn_ext(q, k, v, mask, 0.125)

    def hide() -> None:
        seen = np.arange(n_kv) <= np.arange(n_q)[:, None] + 40
        mask.set_array(np.where(seen, 0.0, -np.inf))

    steps = beside_cpu(y, ctx, hide)
    assert dict(steps[0].defines)["MASK"] == str(words)  # type: ignore[union-attr]


def test_keys_are_dealt_out_to_groups() -> None:
    ctx = Context()
    q, k, v = (ctx.new_tensor(DType.F16, (128, n, 2)) for n in (1, 1000, 1000))
    (part, whole) = beside_cpu(ctx.flash_attn_ext(ctx.cast(q, DType.F32), k, v), ctx)[-2:]
    assert isinstance(part, Launch)
    assert isinstance(whole, Launch)
    assert part.groups == (1, 8, 2)
    assert whole.groups == (1, 2, 1)


def test_precise_products_stay_in_f32() -> None:
    ctx = Context()
    w, x = ctx.new_tensor(DType.F16, (64, 19)), ctx.new_tensor(DType.F32, (64, 40))
    y = ctx.mul_mat(w, x)
    ctx.mul_mat_set_prec(y, 10)
    steps = beside_cpu(y, ctx)
    assert isinstance(steps[-1], Gemm)
    assert steps[-1].a.dtype is DType.F32


def test_products_with_the_same_input_share_its_preparation() -> None:
    ctx = Context()
    q, k, v = (ctx.new_tensor(DType.Q4_0, (64, 8), name) for name in "qkv")
    x = ctx.new_tensor(DType.F32, (64, 2), "x")
    changed = ctx.scale_inplace(x, 2.0)
    nodes = [ctx.mul_mat(q, x), ctx.mul_mat(k, x), changed, ctx.mul_mat(v, x)]
    place(ctx)
    bound = BoundItems(nodes, Kinds(), CudaLowering(CARD))
    kernels = iter([request.kernel.name for request, _ in bound.steps])
    names = [list(islice(kernels, n)) for n in bound.n_steps]
    assert names == [["quantize_q8", "mul_mat_q8"], ["mul_mat_q8"], ["map"], ["quantize_q8", "mul_mat_q8"]]


def test_scratch_is_shared_between_steps_apart() -> None:
    assert place_pieces(((1000, 0, 1), (500, 1, 2), (1000, 2, 3))) == (1536, (0, 1024, 0))
    assert place_pieces(()) == (0, ())
