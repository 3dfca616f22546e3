"""CUDA's own kernels, executed on the host: against ggml's golden values, and against the portable kernels.

Their text is the one that a card gets (see tests/support/cuda_emulator). That shows right arithmetic, indices
and barriers; no GPU takes part.
"""

from __future__ import annotations

import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cuda_emulator import BACKWARD, FORWARD, EmulationError, Memory, build, compiler
from cuda_emulator.runner import Runner, place
from golden import CASES as GOLDEN

from ggmlb import Context, DType, Graph, init_by_name
from ggmlb.backends.cuda.gemm import Gemm
from ggmlb.backends.cuda.kernels import PACKAGE, Lowering
from ggmlb.backends.cuda.kernels import place as place_scratch
from ggmlb.backends.cuda.kernels.products import IN_PIECES
from ggmlb.kernels import Kernel, Launch, Mem, Param, Scratch, Target, declines, kernels
from ggmlb.kernels.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ggmlb.backends.cuda.kernels import Step
    from ggmlb.tensor import Tensor
    from ggmlb.testing.programs import Built, Case

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: g++, c++ or $CXX")

CARD = Target(False, 132, 128)
OWN = set(kernels(PACKAGE))
FAMILIES = ("mul_mat", "mul_mat_id", "flash_attn")
ALIKE = ("-n1", "-bcast")
CASES = {case.id: case for case in GOLDEN}


def lowered(built: Built) -> list[Step]:
    lw = Lowering(CARD, 90)
    return [step for node in built.graph.nodes for step in lw.lower(node)]


def is_own(step: Step) -> bool:
    return isinstance(step, Gemm) or step.kernel.name in OWN


def compile_all(steps: list[Step]) -> None:
    with ThreadPoolExecutor(2) as pool:
        launches = {(s.kernel, s.defines, s.wg) for s in steps if isinstance(s, Launch)}
        list(pool.map(lambda key: build(*key), launches))


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_programs(family: str) -> None:
    """The cases in which CUDA's own kernels, or cuBLAS, have a part; some of those that differ by type."""
    run_golden([case for case in CASES.values() if case.family == family and not case.id.endswith(ALIKE)], 10)


@pytest.mark.slow
def test_golden_products_of_every_type() -> None:
    run_golden([case for case in CASES.values() if case.id.endswith(ALIKE)], 30)


def run_golden(cases: list[Case], at_least: int) -> None:
    chosen: list[tuple[str, Built, list[Step]]] = []
    for case in cases:
        built = case.build()
        if any(declines(node) for node in built.graph.nodes):
            continue
        place(built.ctx)
        steps = lowered(built)
        if any(map(is_own, steps)):
            chosen.append((case.id, built, steps))
    assert len(chosen) >= at_least
    compile_all([step for _, _, steps in chosen for step in steps])
    wrong = []
    for name, built, steps in chosen:
        built.upload()
        Runner().run(steps)
        wrong += [f"{name}: {v.reason}" for v in built.compare().values() if not v.ok]
    assert not wrong, "\n".join(wrong)


def test_every_kernel_is_reached_from_the_golden_programs() -> None:
    reached = {"dequantize", "glu_added"}  # by products of more columns than these programs have
    for case in CASES.values():
        built = case.build()
        if case.family in FAMILIES and not any(declines(node) for node in built.graph.nodes):
            reached |= {s.kernel.name for s in lowered(built) if isinstance(s, Launch)}
    assert reached >= OWN


def run_beside_cpu(
    y: Tensor, ctx: Context, prepare: Callable[[], None] | None = None, target: Target = CARD
) -> list[Step]:
    """Compare a node on the emulator, threads in either order, with the CPU backend; return the steps."""
    place(ctx)
    rng = np.random.default_rng(2)
    for t in ctx.tensors:
        if t.view_src is None and t.op.name == "NONE" and t.dtype is not DType.I32:
            t.set_array(rng.standard_normal(t.shape, np.float32))
    if prepare is not None:
        prepare()
    steps: list[Step] = []
    lw = Lowering(target, 90)
    for node in Graph().build_forward_expand(y).nodes:
        steps += lw.lower(node)
    Runner().run(steps, order=BACKWARD)
    got = y.to_numpy().copy()
    Runner().run(steps)
    np.testing.assert_array_equal(y.to_numpy(), got, "the order of threads makes a difference")
    y.memset(0, 0, y.nbytes)
    with init_by_name("CPU") as cpu:
        cpu.graph_compute(Graph().build_forward_expand(y))
    want = y.to_numpy()
    error = float(((got - want) ** 2).sum() / (want**2).sum())
    assert error < 5e-4, error
    return steps


@pytest.mark.parametrize("dtype", sorted(IN_PIECES), ids=str)
def test_long_rows_in_pieces(dtype: DType) -> None:
    """Several tiles a row, the last one not full, shared by warps; rows that are no multiple of 16 bytes."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256 * 9, 7)), ctx.new_tensor(DType.F32, (256 * 9, 3))
    (quantize, product) = run_beside_cpu(ctx.mul_mat(w, x), ctx)
    assert isinstance(quantize, Launch)
    assert isinstance(product, Launch)
    assert (quantize.kernel.name, product.kernel.name) == ("quantize_q8", "mul_mat_q8")
    assert dict(product.defines)["SPLIT"] == "4"


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.F16], ids=str)
def test_a_warp_takes_tile_after_tile(dtype: DType) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256 * 13, 20)), ctx.new_tensor(DType.F32, (256 * 13, 1))
    *_, product = run_beside_cpu(ctx.mul_mat(w, x), ctx, target=Target(False, 1, 128))
    assert isinstance(product, Launch)
    assert dict(product.defines)["SPLIT"] == "2"


@pytest.mark.parametrize("rows", [1, 40, 4096])
def test_rows_are_shared_out(rows: int) -> None:
    """Whether a warp has rows to itself, or shares them."""
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q4_0, (1056, rows)), ctx.new_tensor(DType.F32, (1056, 1))
    lw = Lowering(Target(False, 2, 128), 90)
    y = ctx.mul_mat(w, x)
    place(ctx)
    rng = np.random.default_rng(3)
    for t in (w, x):
        t.set_array(rng.standard_normal(t.shape, np.float32))
    steps = lw.lower(y)
    assert dict(steps[-1].defines)["SPLIT"] == {1: "2", 40: "2", 4096: "1"}[rows]  # type: ignore[union-attr]
    Runner().run(steps)
    want = x.to_numpy() @ w.to_numpy().T
    np.testing.assert_allclose(y.to_numpy(), want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("n", [1, 5])
def test_vectors(dtype: DType, n: int) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (1320, 13, 2)), ctx.new_tensor(DType.F32, (1320, n, 4))
    (step,) = run_beside_cpu(ctx.mul_mat(w, x), ctx)
    assert isinstance(step, Launch)
    assert step.kernel.name == "mul_mat_vec16"


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.Q6_K, DType.F16], ids=str)
def test_many_columns_go_to_cublas(dtype: DType) -> None:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (256, 19, 2)), ctx.new_tensor(DType.F32, (256, 40, 4))
    steps = run_beside_cpu(ctx.mul_mat(w, x), ctx)
    assert isinstance(steps[-1], Gemm)
    assert steps[-1].a.dtype is DType.F16
    assert len(steps) == (3 if dtype.is_quantized else 2)


# d_k, d_v, queries, keys, heads, heads of keys, batches
ATTENTION = {
    "decode, shared keys": (128, 128, 1, 700, 8, 2, 1),
    "decode, batches": (64, 64, 2, 130, 4, 4, 2),
    "decode, big heads": (256, 256, 1, 200, 4, 1, 1),
    "decode, other sizes": (96, 80, 3, 90, 2, 1, 1),
    "prefill": (128, 128, 70, 150, 2, 1, 1),
    "prefill, shared keys": (64, 64, 37, 100, 6, 2, 2),
    "prefill, big heads": (256, 256, 40, 50, 1, 1, 1),
}


@pytest.mark.parametrize("kv", [DType.F16, DType.Q8_0], ids=str)
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention(shape: str, kv: DType) -> None:
    """With a mask that hides some keys, and all of them from one query; a soft cap, slopes and sinks."""
    d_k, d_v, n_q, n_kv, heads, kv_heads, batches = ATTENTION[shape]
    if d_v % kv.block_size:
        pytest.skip("rows are whole blocks")
    ctx = Context()
    q = ctx.new_tensor(DType.F32, (d_k, n_q, heads, batches))
    k = ctx.new_tensor(kv, (d_k, n_kv, kv_heads, batches))
    v = ctx.new_tensor(kv, (d_v, n_kv, kv_heads, batches))
    mask = ctx.new_tensor(DType.F16, (n_kv, n_q, 1, 1))
    rich = kv is DType.F16
    y = ctx.flash_attn_ext(q, k, v, mask, d_k**-0.5, 8.0 if rich else 0.0, 20.0 if rich else 0.0)
    if rich:
        ctx.flash_attn_ext_add_sinks(y, ctx.new_tensor(DType.F32, (heads,)))

    def hide() -> None:
        hidden = np.random.default_rng(5).random((n_q, n_kv)) < 0.3
        hidden[-1] = n_q > 1
        mask.set_array(np.where(hidden, -np.inf, 0.0))

    steps = run_beside_cpu(y, ctx, hide)
    names = [s.kernel.name for s in steps if isinstance(s, Launch)]
    assert names == (["flash_mma", "flash_combine"] if "decode" in shape else ["flash_mma"])


@pytest.mark.parametrize(("n_q", "heads"), [(150, 1), (3, 4)])
def test_tiles_that_nobody_sees_are_passed_over(n_q: int, heads: int) -> None:
    """A causal mask."""
    ctx = Context()
    q, k, v = (
        ctx.new_tensor(DType.F32, (64, n_q, heads)),
        *(ctx.new_tensor(DType.F16, (64, 300)) for _ in "kv"),
    )
    mask = ctx.new_tensor(DType.F16, (300, n_q))
    y = ctx.flash_attn_ext(q, k, v, mask, 0.125)

    def hide() -> None:
        seen = np.arange(300) <= np.arange(n_q)[:, None] + 40
        mask.set_array(np.where(seen, 0.0, -np.inf))

    run_beside_cpu(y, ctx, hide)


def test_keys_are_dealt_out_to_groups() -> None:
    ctx = Context()
    q, k, v = (ctx.new_tensor(DType.F16, (128, n, 2)) for n in (1, 1000, 1000))
    (part, whole) = run_beside_cpu(ctx.flash_attn_ext(ctx.cast(q, DType.F32), k, v), ctx)[-2:]
    assert isinstance(part, Launch)
    assert isinstance(whole, Launch)
    assert part.groups == (1, 8, 2)
    assert whole.groups == (1, 2, 1)


def test_precise_products_stay_in_f32() -> None:
    ctx = Context()
    w, x = ctx.new_tensor(DType.F16, (64, 19)), ctx.new_tensor(DType.F32, (64, 40))
    y = ctx.mul_mat(w, x)
    ctx.mul_mat_set_prec(y, 10)
    steps = run_beside_cpu(y, ctx)
    assert isinstance(steps[-1], Gemm)
    assert steps[-1].a.dtype is DType.F32


def test_products_with_the_same_input_share_its_preparation() -> None:
    ctx = Context()
    q, k, v = (ctx.new_tensor(DType.Q4_0, (64, 8), name) for name in "qkv")
    x = ctx.new_tensor(DType.F32, (64, 2), "x")
    changed = ctx.scale_inplace(x, 2.0)
    nodes = [ctx.mul_mat(q, x), ctx.mul_mat(k, x), changed, ctx.mul_mat(v, x)]
    place(ctx)
    lw = Lowering(CARD, 90)
    names = [[s.kernel.name for s in lw.lower(node) if isinstance(s, Launch)] for node in nodes]
    assert names == [["quantize_q8", "mul_mat_q8"], ["mul_mat_q8"], ["map"], ["quantize_q8", "mul_mat_q8"]]


def test_scratch_is_shared_between_steps_apart() -> None:
    a, b, c = Scratch(1000), Scratch(500), Scratch(1000)
    mems = [s.mem(DType.I8, (s.nbytes, 1, 1, 1)) for s in (a, b, c)]
    total, offsets = place_scratch([[mems[0]], [mems[0], mems[1]], [mems[1], mems[2]], [mems[2], 3]])
    assert offsets[a] == offsets[c] == 0
    assert offsets[b] == 1024
    assert total == 1536
    assert place_scratch([[1, 2.0]]) == (0, {})


# -- the emulator: what must be found is found --------------------------------------------------

FAULTS = {
    "barrier": ("if (LOCAL_ID < 5) BARRIER(); else WG_REDUCE_ADD(1.0f, s);", "others never reach"),
    "outside": ("ST(d, d_ne0, 0, 0, 0, 1.0f);", "outside of all tensors"),
    "misaligned": ("*(GLOBAL uint4 *)(d_buf + d_off + 4) = make_uint4(0, 0, 0, 0);", "misaligned access"),
    "shared": ("s[LOCAL_ID + d_ne0] = 1.0f;", "index out of bounds"),
}  # fmt: skip


def planted(body: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Launch, Tensor]:
    """Return the launch of a kernel with such a body, and the tensor of 64 f32 that it writes."""
    texts = sys.modules["ggmlb.kernels.source"]
    text = (
        f'#include "tensors.h"\nKERNEL planted(OUT(d))\n{{\n    LOCAL_ARRAY(float, s, WG);\n    {body}\n}}\n'
    )
    monkeypatch.setattr(
        texts, "_text", lambda p, f, real=texts._text: text if f == "planted.knl" else real(p, f)
    )
    ctx = Context()
    d = ctx.new_tensor(DType.F32, (64,))
    place(ctx)
    kernel = Kernel("planted", "planted", (Param("tensor", "d"),))
    return launch(kernel, [Mem.of(d)], (1, 1, 1), 64, TEXT=zlib.crc32(body.encode())), d


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, reason = FAULTS[fault]
    found, _ = planted(body, monkeypatch)
    with pytest.raises(EmulationError, match=reason):
        Memory().run(found)


def test_a_missing_barrier_shows_in_the_other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for barrier in ("BARRIER();", ""):
        body = f"s[LOCAL_ID] = (float)LOCAL_ID; {barrier} ST(d, LOCAL_ID, 0, 0, 0, s[(LOCAL_ID + 1) % WG]);"
        found, d = planted(body, monkeypatch)
        for order in (FORWARD, BACKWARD):
            Memory().run(found, order)
            results.append(d.to_numpy().copy())
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[2], results[3], equal_nan=True)
