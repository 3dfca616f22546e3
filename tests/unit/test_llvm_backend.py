"""The LLVM device: beside the CPU in a scheduler, over threads and forks, and against the CPU's results."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from collections.abc import Callable, Iterator
from pathlib import Path

import ggmlb
from ggmlb import BufferUsage, Context, DType, Graph, Scheduler, Status
from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.llvm import LlvmReg, backend_reg, plan
from ggmlb.backends.llvm.backend import LlvmBackend
from ggmlb.backends.llvm.codegen.emit import I64, Emitter
from ggmlb.backends.llvm.codegen.host import levels_here, target_for
from ggmlb.backends.llvm.codegen.library import Library
from ggmlb.backends.llvm.kernels import elementwise, float_bands
from ggmlb.backends.llvm.lowering import context
from ggmlb.backends.llvm.lowering.context import lower
from ggmlb.backends.llvm.plan import LlvmPlan
from ggmlb.backends.llvm.pool import Pool
from ggmlb.core.dtypes import can_quantize, dequantize, quantize, random_blocks
from ggmlb.core.enums import SortOrder
from ggmlb.core.errors import ArgumentError, BackendError, BackendUnavailable
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.runtime.alloc import GraphAllocator, alloc_ctx_tensors

Program = Callable[[Context, "Leafs"], Tensor]

DEVICE = backend_reg().devices[0]
F32, F16 = DType.F32, DType.F16


@pytest.fixture
def llvm() -> Iterator[LlvmBackend]:
    with DEVICE.init_backend({"n_threads": 3}) as backend:
        assert isinstance(backend, LlvmBackend)
        backend.kinds = Kinds()  # not those of other tests
        yield backend


class Leafs:
    """Makes leafs with random values, which are the same for each backend."""

    def __init__(self, ctx: Context) -> None:
        self._ctx, self._random = ctx, np.random.default_rng(0)
        self.data: list[tuple[Tensor, Any]] = []

    def __call__(self, dtype: DType, *ne: int, values: Any = None) -> Tensor:
        tensor = self._ctx.set_input(self._ctx.new_tensor(dtype, ne))
        if values is None and not can_be_written(dtype):
            values = random_blocks(dtype, tensor.n_elements).reshape(*ne[:0:-1], -1)
        elif values is None:
            values = self._random.standard_normal(ne[::-1]).astype(np.float32)
        self.data.append((tensor, values))
        return tensor


def can_be_written(dtype: DType) -> bool:
    return not dtype.is_quantized or can_quantize(dtype)


def computed(program: Program, backend: Backend) -> Any:
    ctx = Context()
    leafs = Leafs(ctx)
    result = ctx.set_output(program(ctx, leafs))
    graph = Graph().build_forward_expand(result)
    assert all(map(backend.supports_op, graph.nodes))
    with alloc_ctx_tensors(ctx, backend) as buffer:
        buffer.clear(0xFF)
        for tensor, values in leafs.data:
            tensor.set_array(values, None if can_be_written(tensor.dtype) else tensor.dtype)
        assert backend.graph_compute(graph) is Status.SUCCESS
        return result.to_numpy().copy()


def check(program: Program, backend: Backend, nmse: float = 1e-9) -> None:
    with ggmlb.init_by_name("CPU") as cpu:
        right, found = computed(program, cpu), computed(program, backend)
    assert ((found - right) ** 2).sum() <= nmse * (right**2).sum()


GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"]
TYPES = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", *GRIDS,
]  # fmt: skip


ROUGH_FLOATS = {"BF16": 1e-5}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (37, 1), (37, 3), (70, 9), (33, 25)])
def test_products(dtype: str, m: int, n: int, llvm: LlvmBackend) -> None:
    kind = DType[dtype]
    k = 512 if kind.is_quantized else 300 + m
    # Activations as bytes, or bfloat16: an error of some thousandths of each value.
    error = 3e-4 if kind.is_quantized else ROUGH_FLOATS.get(dtype, 1e-9)
    check(lambda c, leaf: c.mul_mat(leaf(kind, k, m, 2), leaf(F32, k, n, 4, 3)), llvm, error)


@pytest.mark.parametrize("dtype", GRIDS)
@pytest.mark.parametrize("simd", [level.name for level in levels_here()][1:])
def test_products_of_grids_on_each_instruction_set(dtype: str, simd: str) -> None:
    """With the greatest activations too, whose sums of products must fit in 16 bits where those are used."""
    kind = DType[dtype]
    with DEVICE.init_backend({"n_threads": 2, "simd": simd}) as backend:
        for n in (1, 9):
            signs = np.random.default_rng(n).choice([-1.0, 1.0], (n, 512)).astype(np.float32)
            check(lambda c, leaf, n=n: c.mul_mat(leaf(kind, 512, 37), leaf(F32, 512, n)), backend, 3e-4)
            check(
                lambda c, leaf, n=n, x=signs: c.mul_mat(leaf(kind, 512, 37), leaf(F32, 512, n, values=x)),
                backend,
                1e-9,
            )


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("n", [5, 12])
def test_bands_of_floats_meet_pieces_of_activations(dtype: str, n: int, llvm: LlvmBackend) -> None:
    k, m = 2500, 130
    assert float_bands.suits(llvm.library.target.level, k, m, n)
    program = lambda c, leaf: c.mul_mat(leaf(DType[dtype], k, m, 2), leaf(F32, k, n, 4))  # noqa: E731
    check(program, llvm, ROUGH_FLOATS.get(dtype, 1e-9))


def as_bfloat(x: np.ndarray) -> np.ndarray:
    return dequantize(quantize(x, DType.BF16), DType.BF16).reshape(x.shape)


@pytest.mark.parametrize(("k", "m", "n"), [(302, 37, 4), (301, 37, 4), (2500, 130, 12), (130, 40, 33)])
@pytest.mark.parametrize("x_dtype", [F32, DType.BF16])
def test_pairs_of_bfloat16(k: int, m: int, n: int, x_dtype: DType, llvm: LlvmBackend) -> None:
    """The activations are rounded to bfloat16, and nothing else is; but not in rows of odd length."""
    if not llvm.library.target.level.bf16:
        pytest.skip("the processor multiplies no bfloat16")
    random = np.random.default_rng(k)
    w, x = (as_bfloat(random.standard_normal(ne).astype(np.float32)) for ne in ((m, k), (2, n, k)))
    if x_dtype is F32:
        x *= np.float32(1 + 2**-7 / 3)
    found = computed(
        lambda c, leaf: c.mul_mat(leaf(DType.BF16, k, m, values=w), leaf(x_dtype, k, n, 2, values=x)), llvm
    )
    used = x if k % 2 else as_bfloat(x)
    right = used.astype(np.float64) @ w.T.astype(np.float64)
    assert ((found - right) ** 2).sum() <= 1e-11 * (right**2).sum()


@pytest.mark.parametrize("n", [1, 3, 20])
def test_a_value_that_stands_out_leaves_its_neighbours_their_bits(n: int, llvm: LlvmBackend) -> None:
    def program(c: Context, leaf: Leafs) -> Tensor:
        rng = np.random.default_rng(0)
        w, x = rng.standard_normal((40, 96)).astype(np.float32), rng.standard_normal((n, 96))
        w[:, 41], x[:, 41] = 0, 300  # what it adds itself is nothing
        weight, values = leaf(DType.Q8_0, 96, 40, values=w), leaf(F32, 96, n, values=x.astype(np.float32))
        return c.mul_mat(weight, values)

    check(program, llvm, 1e-4)


def test_products_of_blocks_that_are_no_multiple_of_256(llvm: LlvmBackend) -> None:
    for n in (1, 20):
        check(lambda c, leaf, n=n: c.mul_mat(leaf(DType.Q4_0, 96, 40), leaf(F32, 96, n)), llvm, 3e-4)


@pytest.mark.parametrize("dtype", ["F16", "Q4_0", "Q2_K"])
@pytest.mark.parametrize("n_tokens", [1, 7, 90])
def test_products_with_chosen_matrices(dtype: str, n_tokens: int, llvm: LlvmBackend) -> None:
    kind = DType[dtype]
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(5), (n_tokens, 1)), axis=1)[:, :2]

    def program(c: Context, leaf: Leafs) -> Tensor:
        chosen = leaf(DType.I32, 2, n_tokens, values=ids.astype(np.int32))
        return c.mul_mat_id(leaf(kind, 256, 50, 5), leaf(F32, 256, 1, n_tokens), chosen)

    check(program, llvm, 3e-4 if kind.is_quantized else 1e-9)


@pytest.mark.parametrize("ne0", [5, 70])
@pytest.mark.parametrize("scale", [1e30, -1e30, 3e20])
def test_soft_max_of_large_logits(scale: float, ne0: int, llvm: LlvmBackend) -> None:
    """The row maximum is subtracted from products that are rounded as it is."""

    def program(c: Context, leaf: Leafs) -> Tensor:
        x, mask = leaf(F32, ne0, 6), leaf(F32, ne0, 6)
        return c.add(c.soft_max_ext(x, None, scale, 0.0), c.soft_max_ext(x, mask, scale, 0.0))

    check(program, llvm)
    assert set(computed(program, llvm).ravel()) <= {0.0, 1.0, 2.0}


def attention(
    d: int, n_q: int, n_kv: int, heads: tuple[int, int], cache: DType, **options: Any
) -> Program:  # fmt: skip
    def program(c: Context, leaf: Leafs) -> Tensor:
        q, k, v = leaf(F32, d, n_q, heads[0]), leaf(cache, d, n_kv, heads[1]), leaf(cache, d, n_kv, heads[1])
        seen = np.arange(n_kv) <= np.arange(n_kv - n_q, n_kv)[:, None]
        mask = leaf(F16, n_kv, n_q, values=np.where(seen, 0, -np.inf).astype(np.float16))
        return c.flash_attn_ext(q, k, v, mask, d**-0.5, options.get("bias", 0.0), options.get("cap", 0.0))

    return program


@pytest.mark.parametrize(
    ("cache", "n_q", "n_kv"),
    [
        *((cache, *n) for cache in (F16, DType.Q8_0) for n in ((1, 1), (1, 200), (3, 70), (90, 170))),
        *((cache, *n) for cache in (DType.Q5_1, DType.IQ4_NL) for n in ((1, 200), (90, 170))),
    ],
)
def test_attention(cache: DType, n_q: int, n_kv: int, llvm: LlvmBackend) -> None:
    check(attention(64, n_q, n_kv, (4, 2), cache), llvm, 1e-6)
    check(attention(96, n_q, n_kv, (3, 3), cache, bias=2.0, cap=5.0), llvm, 1e-6)


@pytest.mark.parametrize(("n_heads", "n_q"), [(4, 1), (32, 1), (3, 2)])
@pytest.mark.parametrize("n_seen", [700, 130])
def test_attention_to_keys_in_parts(n_heads: int, n_q: int, n_seen: int, llvm: LlvmBackend) -> None:
    """One head of keys, so that threads share it; some parts are not seen at all."""

    def program(c: Context, leaf: Leafs) -> Tensor:
        q, k, v = leaf(F32, 64, n_q, n_heads), leaf(F16, 64, 1100, 1), leaf(F16, 32, 1100, 1)
        seen = np.broadcast_to(np.arange(1100) < n_seen, (n_q, 1100))
        mask = leaf(F16, 1100, n_q, values=np.where(seen, 0, -np.inf).astype(np.float16))
        y = c.flash_attn_ext(q, k, v, mask, 0.125, 0.0, 0.0)
        c.flash_attn_ext_add_sinks(y, leaf(F32, n_heads))
        return y

    check(program, llvm, 1e-6)
    many = computed(program, llvm)
    llvm.set_n_threads(1)
    np.testing.assert_allclose(many, computed(program, llvm), rtol=1e-4, atol=1e-5)


def long_program(c: Context, leaf: Leafs) -> Tensor:
    x = leaf(F32, 4096, 64)
    for _ in range(4):
        x = c.silu(c.add(x, x))
    return c.mul_mat(leaf(DType.Q8_0, 4096, 50), x)


def test_any_number_of_threads_gives_the_same(llvm: LlvmBackend) -> None:
    right = computed(long_program, llvm)
    for n in (1, 2, 5, 11):
        llvm.set_n_threads(n)
        assert (computed(long_program, llvm) == right).all()
    with pytest.raises(ArgumentError, match="0 threads"):
        llvm.set_n_threads(0)


def tally(k: Emitter) -> None:
    """Count how often each chunk is done: `counts`."""
    at = k.build.inttoptr((k.int_arg() + k.chunk * 8).raw, I64.as_pointer())
    k.build.atomic_rmw("add", at, k.i64(1).raw, "monotonic")


def test_each_chunk_is_done_once() -> None:
    n_chunks = np.tile([2, 16, 3, 8], 2500)
    counts = np.zeros((len(n_chunks), 16), np.int64)
    kernels = Library(target_for(None))
    rows = counts.ctypes.data + 16 * 8 * np.arange(len(n_chunks))
    args = rows.ctypes.data + 8 * np.arange(len(rows))
    table = np.stack([np.full_like(rows, kernels.address(tally)), args, n_chunks], axis=1)
    pool = Pool(3, kernels)
    for _ in range(100):
        pool.run(pool.span(table.ctypes.data, 0, len(table)), True)
    pool.free()
    assert (counts == 100 * (np.arange(16) < n_chunks[:, None])).all()


@pytest.mark.parametrize("ne", [(4096, 5), (1000, 7), (33, 4), (5000,)])
def test_results_written_past_the_caches(
    ne: tuple[int, ...], llvm: LlvmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(c: Context, leaf: Leafs) -> Tensor:
        x, row = leaf(F32, *ne), leaf(F32, ne[0])
        return c.add(leaf(F16, *ne), c.swiglu_split(c.silu(c.add(x, row)), c.scale(x, 0.5)))

    right = computed(program, llvm)
    monkeypatch.setattr(context, "cached_nbytes", lambda: 0)
    llvm.kinds = Kinds()  # nothing is lowered so far
    assert (computed(program, llvm) == right).all()


def test_nodes_of_a_kind_are_lowered_once(llvm: LlvmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of other weights in other places, and graphs after it, share the steps of the first."""

    def layers(n: int) -> Program:
        def program(c: Context, leaf: Leafs) -> Tensor:
            x = leaf(F32, 64, 5)
            for _ in range(n):
                y = c.mul(c.rms_norm(x, 1e-5), leaf(F32, 64))
                x = c.add(c.mul_mat(leaf(DType.Q8_0, 64, 64), y), x)
            return x

        return program

    lowered = []
    monkeypatch.setattr(plan, "lower", lambda *args: (lowered.append(args[0]), lower(*args))[1])
    for n in (1, 3, 5):
        check(layers(n), llvm, 1e-3)
    assert len(lowered) == 5  # four of a layer; of two layers, a sum and a norm are a group


def test_steps_outlive_the_stream_that_lowered_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of threads has its own, as chunks differ."""
    lowered = []
    monkeypatch.setattr(plan, "lower", lambda *args: (lowered.append(args[0]), lower(*args))[1])
    for n_threads, n in ((2, 1), (2, 1), (3, 2), (2, 2)):
        with DEVICE.init_backend({"n_threads": n_threads}) as backend:
            computed(lambda c, leaf: c.floor(leaf(F32, 4099, 3)), backend)
        assert len(lowered) == n


def test_kinds_tell_operands_and_places_apart(llvm: LlvmBackend) -> None:
    """Nodes that differ only in which operands are one, or in their alignment."""

    def twice(c: Context, leaf: Leafs) -> Tensor:
        x, y = leaf(F32, 70), leaf(F32, 70)
        return c.mul(c.add(x, x), c.add(x, y))

    def windows(c: Context, leaf: Leafs) -> Tensor:
        x = leaf(F32, 4096)
        parts = [c.silu(c.view_1d(x, 1000, 4 * i)) for i in (0, 1, 16, 17)]
        return c.add(c.add(parts[0], parts[1]), c.mul(parts[2], parts[3]))

    check(twice, llvm)
    check(windows, llvm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_threads_of_its_own(llvm: LlvmBackend) -> None:
    right = computed(long_program, llvm)
    child = os.fork()
    if not child:
        same = False
        try:
            same = bool((computed(long_program, llvm) == right).all())
        finally:
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_activations_that_change_between_two_products(llvm: LlvmBackend) -> None:
    def program(c: Context, leaf: Leafs) -> Tensor:
        w, x = leaf(DType.Q8_0, 64, 8), leaf(F32, 64, 2)
        first = c.mul_mat(w, x)
        changed = c.scale_inplace(x, 3.0)
        return c.add(first, c.mul_mat(w, changed))

    check(program, llvm, 3e-4)


def test_a_wrong_row_number_names_the_node(llvm: LlvmBackend) -> None:
    ctx = Context()
    a, ids = ctx.new_tensor(F32, (8, 4)), ctx.new_tensor(DType.I32, (2,))
    y = ctx.get_rows(a, ids)
    y.name = "taken"
    graph = Graph().build_forward_expand(ctx.add(y, y))
    with alloc_ctx_tensors(ctx, llvm) as buffer:
        buffer.clear(0)
        ids.set_array(np.array([3, 4], np.int32))
        with pytest.raises(BackendError, match=r"'taken'.*row number 4 .* 4 rows"):
            llvm.graph_compute(graph)
        ids.set_array(np.array([3, 0], np.int32))
        assert llvm.graph_compute(graph) is Status.SUCCESS


@pytest.mark.parametrize("cache", [F16, DType.Q8_0, DType.Q5_1])
@pytest.mark.parametrize("index", [DType.I32, DType.I64])
def test_rope_that_writes_rows_of_a_cache(
    cache: DType, index: DType, llvm: LlvmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        caches, ctx = Context(), Context()
        kept = caches.new_tensor(cache, (128, 6))
        x, places = (ctx.set_input(ctx.new_tensor(t, ne)) for t, ne in ((F32, (128, 3)), (DType.I32, (3,))))
        rows = ctx.set_input(ctx.new_tensor(index, (3,)))
        turned = ctx.rope(ctx.reshape_3d(ctx.silu(x), 64, 2, 3), places, 48, 2)
        put = ctx.set_output(ctx.set_rows(kept, ctx.reshape_2d(turned, 128, 3), rows))
        put.name = "cached"
        graph = Graph().build_forward_expand(put)
        with (
            alloc_ctx_tensors(caches, llvm) as memory,
            GraphAllocator(llvm.default_buffer_type) as allocator,
        ):
            memory.clear(0)
            allocator.alloc_graph(graph)
            x.set_array(np.random.default_rng(0).standard_normal((3, 128), np.float32))
            places.set_array(np.arange(3))
            rows.set_array(np.array([4, 0, 3]))
            plan = llvm.graph_plan_create(graph)
            assert isinstance(plan, LlvmPlan)
            assert plan.n_steps == (2 if fused == "1" else 3)
            llvm.graph_plan_compute(plan)
            found.append(kept.get().copy())
            rows.set_array(np.array([4, 6, 3]))
            with pytest.raises(BackendError, match=r"'cached'.*row number 6 .* 6 rows"):
                llvm.graph_plan_compute(plan)
    assert (found[0] == found[1]).all()
    assert found[0].any()


# -- order of elements, recurrent layers ------------------------------------------------------------


def odd_values(n: int, n_rows: int) -> np.ndarray:
    """Rows with equal elements, both zeros, infinities and NaN of both signs."""
    rng = np.random.default_rng(n)
    x = rng.integers(-n // 3 - 1, n // 3 + 2, (n_rows, n)).astype(np.float32)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, np.copysign(np.nan, -1)], np.float32)
    places = rng.integers(0, n, (n_rows, min(n, 6)))
    np.put_along_axis(x, places, odd[: places.shape[1]][None], axis=1)
    return x


def in_order(x: np.ndarray, descending: bool) -> np.ndarray:
    """A stable order in which NaN is above infinity."""
    wide = np.nan_to_num(x.astype(np.float64), nan=1e300, posinf=1e200, neginf=-1e200)
    return np.argsort(-wide if descending else wide, axis=-1, kind="stable")


@pytest.mark.parametrize("simd", [level.name for level in levels_here()])
@pytest.mark.parametrize("n", [1, 2, 7, 16, 63, 64, 65, 300, 1025])
def test_orders_of_rows(n: int, simd: str) -> None:
    x = odd_values(n, 5)
    kept = min(n, 3)
    with DEVICE.init_backend({"n_threads": 2, "simd": simd}) as backend:
        for order, descending in ((SortOrder.ASC, False), (SortOrder.DESC, True)):
            found = computed(lambda c, leaf, o=order: c.argsort(leaf(F32, n, 5, values=x), o), backend)
            assert (found == in_order(x, descending)).all()
        for k in {kept, n // 2, n} - {0}:
            found = computed(lambda c, leaf, k=k: c.top_k(leaf(F32, n, 5, values=x), k), backend)
            assert (found == in_order(x, True)[:, :k]).all()
        found = computed(lambda c, leaf: c.argmax(leaf(F32, n, 5, values=x)), backend)
        assert (found == in_order(x, True)[:, 0]).all()


@pytest.mark.parametrize("k", [1, 40, 100])
def test_the_first_of_a_long_row(k: int, llvm: LlvmBackend) -> None:
    x = np.random.default_rng(0).integers(0, 5000, (2, 20011)).astype(np.float32)
    found = computed(lambda c, leaf: c.top_k(leaf(F16, 20011, 2, values=x), k), llvm)
    assert (found == in_order(x.astype(np.float16), True)[:, :k]).all()


def _delta_net(c: Context, leaf: Leafs, size: int, gates: int, n_tokens: int, n_kept: int) -> Tensor:
    heads, seqs = 4, 2
    q, k = (c.l2_norm(leaf(F32, size, 2, n_tokens, seqs), 1e-6) for _ in range(2))
    v = leaf(F32, size, heads, n_tokens, seqs)
    g, beta = c.neg(c.sqr(leaf(F32, gates, heads, n_tokens, seqs))), leaf(F32, 1, heads, n_tokens, seqs)
    return c.gated_delta_net(q, k, v, g, c.sigmoid(beta), leaf(F32, size, size, heads, seqs), n_kept)


def _ssm(
    c: Context, leaf: Leafs, sizes: tuple[int, int, int], rates: int, n_tokens: int, n_kept: int
) -> Tensor:
    (width, dim, heads), groups, seqs = sizes, 2, 3
    both = c.ssm_conv(leaf(F32, 3 + n_tokens, dim * heads, seqs), leaf(F32, 4, dim * heads))
    x = c.reshape_4d(both, dim, heads, n_tokens, seqs)
    b, out = (leaf(F32, width, groups, n_tokens, seqs) for _ in range(2))
    decay = c.neg(c.sqr(leaf(F32, rates, heads)))
    ids = leaf(DType.I32, seqs, values=np.array([3, 0, 4]))
    state, dt = leaf(F32, width, dim, heads, 5), leaf(F32, heads, n_tokens, seqs)
    return c.ssm_scan(state, x, dt, decay, b, out, ids, n_kept)


def _rwkv(c: Context, leaf: Leafs, size: int, n_tokens: int) -> Tensor:
    r, w, k, v, a, b = (c.scale(leaf(F32, size, 3, 2 * n_tokens), 0.3) for _ in range(6))
    return c.rwkv_wkv7(r, c.sigmoid(w), k, v, a, b, leaf(F32, size * size * 3, 2))


RECURRENT: dict[str, Program] = {
    "delta net": lambda c, leaf: _delta_net(c, leaf, 128, 1, 5, 1),
    "delta net, a gate for each column": lambda c, leaf: _delta_net(c, leaf, 70, 70, 4, 3),
    "delta net, more states than tokens": lambda c, leaf: _delta_net(c, leaf, 13, 1, 2, 4),
    "delta net, a long one": lambda c, leaf: _delta_net(c, leaf, 64, 1, 90, 2),
    "mamba": lambda c, leaf: _ssm(c, leaf, (16, 1, 74), 16, 35, 1),
    "mamba 2": lambda c, leaf: _ssm(c, leaf, (128, 64, 6), 1, 7, 2),
    "mamba, odd sizes": lambda c, leaf: _ssm(c, leaf, (5, 7, 4), 5, 3, 2),
    "mamba, more states than tokens": lambda c, leaf: _ssm(c, leaf, (21, 3, 2), 1, 1, 3),
    "rwkv": lambda c, leaf: _rwkv(c, leaf, 64, 9),
    "rwkv, odd sizes": lambda c, leaf: _rwkv(c, leaf, 37, 2),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_with_any_number_of_threads(name: str, llvm: LlvmBackend) -> None:
    llvm.set_n_threads(1)
    check(RECURRENT[name], llvm, 1e-11)
    right = computed(RECURRENT[name], llvm)
    for n in (2, 3, 7):
        llvm.set_n_threads(n)
        assert (computed(RECURRENT[name], llvm) == right).all()


@pytest.mark.parametrize("simd", [level.name for level in levels_here()][1:])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_on_each_instruction_set(name: str, simd: str) -> None:
    with DEVICE.init_backend({"n_threads": 2, "simd": simd}) as backend:
        check(RECURRENT[name], backend, 1e-11)


def test_convolutions_of_short_types_and_padded_rows(llvm: LlvmBackend) -> None:
    def program(c: Context, leaf: Leafs) -> Tensor:
        x = leaf(DType.BF16, 40, 37, 3)
        part = c.view_3d(x, 24, 37, 3, x.nb[1], x.nb[2], 4)
        return c.ssm_conv(part, leaf(F16, 4, 37))

    check(program, llvm, 1e-12)


@pytest.mark.parametrize("kind", [F32, F16], ids=str)
@pytest.mark.parametrize("is_strided", ["source", "result"])
def test_copies_to_another_shape(is_strided: str, kind: DType, llvm: LlvmBackend) -> None:
    def program(c: Context, leaf: Leafs) -> Tensor:
        whole, line = (
            (leaf(F32, 7, 20), leaf(kind, 60))
            if is_strided == "source"
            else (leaf(kind, 7, 20), leaf(F32, 60))
        )
        part = c.view_2d(whole, 3, 20, whole.nb[1], 2 * whole.nb[0])
        return c.cont(c.cpy(part, line) if is_strided == "source" else c.cpy(line, part))

    check(program, llvm, 0)


@pytest.mark.parametrize("dim", range(4))
def test_concat_of_blocks(dim: int, llvm: LlvmBackend) -> None:
    def program(c: Context, leaf: Leafs) -> Tensor:
        ne = [64, 3, 2, 2]
        a = leaf(DType.Q5_1, *ne)
        ne[dim] = 32 * 5 if dim == 0 else 4
        return c.cast(c.concat(a, leaf(DType.Q5_1, *ne), dim), F32)

    check(program, llvm, 0)


@pytest.mark.parametrize("op", ["add_id", "ssm_scan"])
def test_a_wrong_number_of_a_row_or_a_state_names_the_node(op: str, llvm: LlvmBackend) -> None:
    ctx = Context()
    ids = ctx.new_tensor(DType.I32, (2, 1) if op == "add_id" else (2,))
    if op == "add_id":
        y = ctx.add_id(ctx.new_tensor(F32, (8, 2, 1)), ctx.new_tensor(F32, (8, 3)), ids)
    else:
        x, dt, a = (ctx.new_tensor(F32, ne) for ne in ((4, 2, 1, 2), (2, 1, 2), (1, 2)))
        b, c = (ctx.new_tensor(F32, (8, 1, 1, 2)) for _ in range(2))
        y = ctx.ssm_scan(ctx.new_tensor(F32, (8, 4, 2, 3)), x, dt, a, b, c, ids)
    y.name = "chosen"
    graph = Graph().build_forward_expand(y)
    with alloc_ctx_tensors(ctx, llvm) as buffer:
        buffer.clear(0)
        for wrong in (3, -1):
            ids.set_array(np.array([2, wrong], np.int32).reshape(ids.ne[:2][::-1] if op == "add_id" else 2))
            with pytest.raises(BackendError, match=rf"'chosen'.*row number {wrong} .* 3 rows"):
                llvm.graph_compute(graph)
        ids.set_array(np.array([2, 0], np.int32).reshape(ids.ne[:2][::-1] if op == "add_id" else 2))
        assert llvm.graph_compute(graph) is Status.SUCCESS


# -- the device ------------------------------------------------------------------------------------


def test_a_scheduler_gives_it_what_it_computes_and_copies_nothing() -> None:
    weights = Context()
    w = weights.new_tensor(DType.Q4_K, (256, 64))
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(F32, (256, 3)))
    y = ctx.silu(ctx.cumsum(ctx.mul_mat(w, x)))
    graph = Graph().build_forward_expand(y)
    with (
        ggmlb.init_by_name("LLVM") as fast,
        ggmlb.init_by_name("CPU") as cpu,
        alloc_ctx_tensors(weights, cpu) as buffer,
        Scheduler([fast, cpu]) as scheduler,
    ):
        buffer.usage = BufferUsage.WEIGHTS
        w.set_array(np.ones((64, 256), np.float32))
        scheduler.alloc_graph(graph)
        x.set_array(np.ones((3, 256), np.float32))
        scheduler.graph_compute(graph)
        assert [entry.device for entry in scheduler.placement] == ["LLVM", "CPU", "LLVM"]
        assert not any(entry.copies for entry in scheduler.placement)
        np.testing.assert_allclose(y.to_numpy()[0], 256 * np.arange(1, 65), rtol=2e-2)


def test_kernels_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    params = ("neg", 0, ("f32", "f32"), False, False)
    first, second, third = (Library(target_for(None)) for _ in range(3))
    first.address(elementwise.elementwise, params)
    (kept,) = (tmp_path / "llvm").glob("*.o")
    second.address(elementwise.elementwise, params)
    assert (first.n_compiled, second.n_compiled) == (1, 0)
    kept.write_bytes(kept.read_bytes()[:-100])
    third.address(elementwise.elementwise, params)
    assert third.n_compiled == 1


def test_without_llvmlite_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.ir", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'ggmlb\[llvm\]'"):
        _ = LlvmReg().devices


def test_unknown_parameters() -> None:
    with pytest.raises(ArgumentError, match="n_threads, simd"):
        DEVICE.init_backend({"threads": 2})


def test_what_it_is_made_for() -> None:
    features = dict(backend_reg().get_proc_address("get_features")(backend_reg()))
    assert features["SIMD"] == target_for(os.environ.get("GGMLB_SIMD")).level.name


def test_it_can_be_aborted(llvm: LlvmBackend) -> None:
    ctx = Context()
    x = ctx.new_tensor(F32, (8,))
    y = ctx.neg(ctx.neg(ctx.neg(x)))
    graph = Graph().build_forward_expand(y)
    answers = iter([False, False, True])
    llvm.abort_callback = lambda: next(answers)
    with alloc_ctx_tensors(ctx, llvm):
        x.set_array(np.ones(8, np.float32))
        assert llvm.graph_compute(graph) is Status.ABORTED


@pytest.mark.parametrize("op", ["mul_mat", "out_prod"])
def test_products_of_more_matrices_than_chunks_can_be_counted_are_declined(op: str) -> None:
    ctx = Context()
    a = ctx.new_tensor(F32, (4, 4))
    few, many = (getattr(ctx, op)(a, ctx.new_tensor(F32, (4, 4, 1 << 18, n))) for n in (2, 4))
    assert DEVICE.declines(few) is None
    assert DEVICE.declines(many) == "a product of 1048576 matrices: at most 524288"


@pytest.mark.parametrize(("dtype", "is_converted"), [("F16", False), ("BF16", False), ("Q8_0", True)])
def test_only_products_of_blocks_convert_activations(dtype: str, is_converted: bool) -> None:
    ctx = Context()
    product = ctx.mul_mat(ctx.new_tensor(DType[dtype], (64, 32)), ctx.new_tensor(F32, (64, 4)))
    assert (DEVICE.declines(ctx.prec_set_src(product, "f32", 1)) is not None) == is_converted
