"""Small programs that reach every kernel with shared memory, or written for CUDA alone, on the PTX machine.

Each compares with the CPU backend, or with what ggml computed; `PROGRAMS` has them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ggmlb import BufferUsage, Context, DType, Graph, init_by_name
from ggmlb.backends.common.fusion import Group, Item, fuse, gather
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.kernels import RULES, Step, products
from ggmlb.backends.gpu import RULES as PORTABLE
from ggmlb.backends.gpu import Launch, PreparedOperand, Target, lower
from ggmlb.backends.gpu.lowering.matmul import Glu
from ggmlb.core.dtypes import can_quantize, random_blocks
from ggmlb.core.enums import GluOp
from ggmlb.core.tensor import Tensor
from ggmlb.testing.programs import Built, Case
from tests.support.fusable import mixture
from tests.support.golden import CASES
from tests.support.ptx import BACKWARD, FORWARD, Memory
from tests.support.ptx.runner import Runner, place

CARD = Target(False, 132, 128, blas=True, capability=90, shared=228 << 10)
TURING = replace(CARD, capability=75, shared=64 << 10)


def steps_of(item: Item, target: Target = CARD, own: bool = True) -> list[Step]:
    """Return the steps that compute an item alone: CUDA's `own`, or the portable ones."""
    return _each(lower(item, target, RULES if own else PORTABLE))


def _each(found: Iterable[Step | PreparedOperand]) -> list[Step]:
    return [step for x in found for step in (x.made_by if isinstance(x, PreparedOperand) else [x])]


def fill(ctx: Context, seed: int = 2) -> None:
    """Place a context's tensors, and put random numbers into those that nobody computes."""
    place(ctx)
    rng = np.random.default_rng(seed)
    for t in ctx.tensors:
        if t.view_src is None and t.op.name == "NONE" and t.dtype is not DType.I32:
            if can_quantize(t.dtype):
                t.set_array(rng.standard_normal(t.shape, np.float32))
            else:
                t.set(random_blocks(t.dtype, t.n_elements))


def on_cpu(y: Tensor) -> np.ndarray:
    """Return what the CPU backend computes, in the tensor's own memory."""
    y.memset(0, 0, y.nbytes)
    with init_by_name("CPU") as cpu:
        cpu.graph_compute(Graph().build_forward_expand(y))
    return y.to_numpy()


def in_both_orders(steps: Iterable[Step], y: Tensor) -> np.ndarray:
    """Return what steps compute, threads in either order."""
    Runner().run(steps, order=BACKWARD)
    got = y.to_numpy().copy()
    y.memset(0xFF, 0, y.nbytes)
    Runner().run(steps, order=FORWARD)
    np.testing.assert_array_equal(y.to_numpy(), got, "the order of threads makes a difference")
    return got


def beside_cpu(
    y: Tensor,
    ctx: Context,
    prepare: Callable[[], None] | None = None,
    target: Target = CARD,
    own: bool = True,
) -> list[Step]:
    """Compare a node with the CPU backend; return the steps: CUDA's `own`, or the portable ones."""
    fill(ctx)
    if prepare is not None:
        prepare()
    steps = [s for node in Graph().build_forward_expand(y).nodes for s in steps_of(node, target, own)]
    close(in_both_orders(steps, y), on_cpu(y))
    return steps


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Compare by the mean squared error: activations in 8 bits, and tensor cores, round."""
    error = float(((got - want) ** 2).sum() / (want**2).sum())
    assert error < 5e-4, error


def product(dtype: DType, k: int, m: int, n: int, target: Target = CARD, more: int = 1) -> list[Step]:
    """A product; `more`: matrices of b that meet one of a."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (k, m, 2 if more > 1 else 1)), ctx.new_tensor(DType.F32, (k, n, more))
    return beside_cpu(ctx.mul_mat(w, x), ctx, target=target)


def gated(dtype: DType, k: int, m: int, n: int, target: Target = CARD) -> list[Step]:
    """Both products of a gated unit, in one kernel."""
    ctx = Context()
    a, g = (ctx.new_tensor(dtype, (k, m)) for _ in "ag")
    x = ctx.new_tensor(DType.F32, (k, n))
    y = ctx.geglu_split(ctx.mul_mat(a, x), ctx.mul_mat(g, x))
    fill(ctx)
    unit = Glu(Mem.of(g), None, GluOp.GEGLU, 0.0, 0.0)
    steps = _each(products._by_kernels(target, Mem.of(a), x, Mem.of(y), None, unit))
    close(in_both_orders(steps, y), on_cpu(y))
    return steps


def portable(dtype: DType, k: int, m: int, n: int) -> list[Step]:
    """A product by the portable kernels."""
    ctx = Context()
    y = ctx.mul_mat(ctx.new_tensor(dtype, (k, m)), ctx.new_tensor(DType.F32, (k, n)))
    return beside_cpu(y, ctx, own=False)


def argmax(n: int) -> list[Step]:
    """The largest of long rows."""
    ctx = Context()
    return beside_cpu(ctx.argmax(ctx.new_tensor(DType.F32, (n, 3))), ctx, own=False)


def top_k(n: int, k: int, n_launches: int) -> list[Step]:
    """The largest of three rows with equal elements and a NaN; the first k of one are equal."""
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (n, 3))
    y = ctx.top_k(x, k)
    place(ctx)
    values = np.random.default_rng(4).integers(-40, 40, (3, n)).astype(np.float32)
    values[0, n // 2] = -np.float32(np.nan)
    values[1, : k + 5] = 99
    x.set_array(values)
    steps = steps_of(y, own=False)
    assert len(steps) == n_launches
    found = in_both_orders(steps, y)
    assert n // 2 in found[0]
    for row, ids in zip(np.nan_to_num(values, nan=1e9), found, strict=True):
        assert len({*ids.tolist()}) == k
        assert np.array_equal(np.sort(row[ids]), np.sort(row)[-k:])
    return steps


def experts(dtype: DType, slots: int, tokens: int, own: bool, target: Target = CARD) -> list[Step]:
    """A product with one of three matrices for each row; most rows meet the first, but not the first row."""
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (96, 70, 3)), ctx.new_tensor(DType.F32, (96, slots, tokens))
    ids = ctx.new_tensor(DType.I32, (slots, tokens))
    chosen = np.random.default_rng(3).integers(0, 3, ids.shape)
    chosen[: tokens * 3 // 4] = 0
    chosen[-1], chosen[0, 0] = 2, 1
    return beside_cpu(ctx.mul_mat_id(w, x, ids), ctx, lambda: ids.set_array(chosen), target, own=own)


def fused(
    y: Tensor, *more: Tensor, ctx: Context, prepare: Callable[[], None] | None = None, own: bool = True
) -> list[Step]:
    """Compute a graph with its nodes fused, and compare with the CPU; return all steps.

    Args:
        y: The result to compare.
        more: Other results.
        ctx: The context.
        prepare: Sets operands other than floats.
        own: Whether CUDA's own kernels may have a part.
    """
    rules = RULES if own else PORTABLE
    fill(ctx)
    for t in ctx.tensors:
        if t.op.name != "NONE" and t.buffer is not None:
            t.buffer.usage = BufferUsage.COMPUTE
    if prepare is not None:
        prepare()
    graph = Graph().build_forward_expand(y, *more)

    def can_fuse(group: Group) -> bool:
        return rules.find(group, CARD) is not None

    gather(graph, can_fuse, rules.patterns)
    items = fuse(graph, can_fuse, names=rules.patterns)
    steps = [step for item in items for step in steps_of(item, CARD, own)]
    close(in_both_orders(steps, y), on_cpu(y))
    return steps


def experts_layer(
    dtype: DType, n: int, n_experts: int, own: bool = True, biased: bool = False, **how: bool
) -> list[Step]:
    """A mixture of experts: routing, products with two of them for each of `n` tokens, and their sum."""
    ctx = Context()
    x, router = ctx.new_tensor(DType.F32, (96, n)), ctx.new_tensor(DType.F32, (96, n_experts))
    gate, up, down = (ctx.new_tensor(dtype, (96, 96, n_experts)) for _ in range(3))
    biases = [ctx.new_tensor(DType.F32, (96, n_experts)) for _ in range(3 if biased else 0)]
    y = mixture(ctx, x, router, gate, up, down, n_used=2, biases=biases, **how)
    return fused(y, ctx=ctx, own=own)


def side_by_side(dtype: DType, n: int, sizes: Sequence[int], bias: bool, k: int = 1056) -> list[Step]:
    """Products of one operand with weights of several sizes, and biases."""
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (k, n))
    ys = [ctx.mul_mat(ctx.new_tensor(dtype, (k, m)), x) for m in sizes]
    if bias:
        ys = [ctx.add(y, ctx.new_tensor(DType.F32, y.ne[:1])) for y in ys]
    y, *more = reversed(ys)
    steps = fused(y, *more, ctx=ctx)
    for other in more:
        close(other.to_numpy().copy(), on_cpu(other))
    return steps


def heads(mode: int, size: int, n: int, norms: bool) -> list[Step]:
    """Rope of queries and keys, and the rows of a cache; returns with the cache compared."""
    ctx = Context()
    positions, ids = ctx.new_tensor(DType.I32, (n,)), ctx.new_tensor(DType.I32, (n,))
    keys, values = (ctx.new_tensor(DType.F16, (2 * size, 9)) for _ in "kv")
    q, k, v = (ctx.new_tensor(DType.F32, (size * heads, n)) for heads in (6, 2, 2))

    def rotated(t: Tensor) -> Tensor:
        t = ctx.reshape_3d(t, size, t.ne[0] // size, n)
        if norms:
            t = ctx.mul(ctx.rms_norm(t, 1e-5), ctx.new_tensor(DType.F32, (size,)))
        return ctx.rope(t, positions, size, mode)

    query, key = rotated(q), rotated(k)
    put = [ctx.set_rows(keys, ctx.reshape_2d(key, *keys.ne[:1], n), ids), ctx.set_rows(values, v, ids)]

    def prepare() -> None:
        positions.set_array(np.arange(n) + 3)
        ids.set_array(np.arange(n)[::-1] * 2)

    steps = fused(query, *put, ctx=ctx, prepare=prepare, own=False)
    for cache in (keys, values):
        got = cache.to_numpy()[::2].astype(np.float32).copy()
        cache.memset(0, 0, cache.nbytes)
        with init_by_name("CPU") as cpu:
            cpu.graph_compute(Graph().build_forward_expand(*put))
        close(got[:n], cache.to_numpy()[::2][:n].astype(np.float32))
    return steps


# d_k, d_v, queries, keys, heads, heads of keys, batches
ATTENTION = {
    "decode, few keys": (64, 64, 1, 5, 4, 2, 1),
    "decode, shared keys": (128, 128, 1, 720, 8, 2, 1),
    "decode, batches": (64, 64, 2, 130, 4, 4, 2),
    "decode, big heads": (256, 256, 1, 200, 4, 1, 1),
    "decode, other sizes": (96, 80, 3, 90, 2, 1, 1),
    "prefill": (128, 128, 70, 150, 2, 1, 1),
    "prefill, shared keys": (64, 64, 37, 100, 6, 2, 2),
    "prefill, big heads": (256, 256, 40, 50, 1, 1, 1),
    "prefill, few keys": (64, 64, 21, 7, 1, 1, 1),
    "decode, latent": (576, 512, 1, 150, 4, 1, 1),
    "decode, latent, many heads": (576, 512, 1, 280, 40, 1, 1),
    "prefill, latent": (576, 512, 5, 70, 16, 1, 1),
    "prefill, splits": (64, 64, 5, 600, 16, 1, 1),
}


def attention(shape: str, kv: DType, target: Target = CARD, own: bool = True) -> list[Step]:
    """With a mask that hides some keys, and all of them from one query; a soft cap, slopes and sinks."""
    d_k, d_v, n_q, n_kv, heads, kv_heads, batches = ATTENTION[shape]
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

    return beside_cpu(y, ctx, hide, target, own)


def golden(
    case_id: str, wg: int = 128, own: bool = False, groups: int = 0, memory: Memory | None = None
) -> list[Step]:
    """A golden program by the portable kernels, or by CUDA's `own` where there are.

    Args:
        case_id: Which.
        wg: Threads of a block, where kernels leave it open.
        own: Whether CUDA's own kernels and cuBLAS may have a part.
        groups: Where not 0, kernels that shard rows get so many blocks: then each has several.
        memory: What runs the kernels; steps are those for its compiler's cards.
    """
    (case,) = (c for c in CASES if c.id == case_id)
    return computed(case, memory or Memory(), wg, own, groups)[1]


def computed(
    case: Case, memory: Memory, wg: int = 128, own: bool = False, groups: int = 0
) -> tuple[Built, list[Step]]:
    """As `golden`, of a case; return its tensors too."""
    built = case.build()
    place(built.ctx)
    target = replace(CARD, wg=wg, capability=memory.compiler.capability)
    steps = [step for n in built.graph.nodes for step in steps_of(n, target, own)]
    if groups:
        steps = [
            replace(s, groups=(min(groups, s.groups[0]), *s.groups[1:]))
            if isinstance(s, Launch) and s.kernel.name in DEALS_OUT
            else s
            for s in steps
        ]
    built.upload()
    Runner(memory).run(steps, order=BACKWARD)
    wrong = {name: v.reason for name, v in built.compare().items() if not v.ok}
    assert not wrong, wrong
    return built, steps


DEALS_OUT = {
    "argmax", "argsort", "copy", "cumsum", "flash_attn", "get_rows", "l2_norm", "layer_norm", "quantize_q8",
    "rms_norm", "rms_norm_back", "rope", "soft_max", "soft_max_back", "sum_rows", "top_k",
    "cross_entropy_loss_back",
}  # fmt: skip
"""Kernels whose blocks take row after row."""

SHARING = (
    "argmax-0", "argsort-asc-0", "argsort-desc-1", "count_equal-0", "cumsum-0", "cumsum-1", "cpy-q8_0-f32",
    "cross_entropy_loss-0", "cross_entropy_loss_back-0", "rms_norm_back-0", "soft_max_ext_back-0",
    "flash_attn-f32-f32-4", "get_rows-q8_0-batch", "l2_norm-0", "norm-0", "norm-perm", "rms_norm-0",
    "rope-neox-plain", "set_rows-f32-f16", "soft_max-0", "sum-0", "sum_rows-0", "top_k-0",
)  # fmt: skip
"""Golden programs that reach the portable kernels with shared memory."""

FEW, TWO = replace(CARD, n_units=1, blas=False), replace(CARD, n_units=2, blas=False)
PROGRAMS: dict[str, Callable[[], list[Step]]] = {
    **{f"{case}, 2 blocks": partial(golden, case, groups=2) for case in SHARING},
    **{
        f"{case}, a warp": partial(golden, case, wg=32, groups=2)
        for case in ("argmax-0", "argsort-asc-0", "flash_attn-f32-f32-4", "norm-0", "top_k-0")
    },
    "q4_0, four warps a row": partial(product, DType.Q4_0, 256 * 9, 7, 3),
    "q6_k, four warps a row": partial(product, DType.Q6_K, 256 * 9, 7, 3),
    "q4_0, tile after tile": partial(product, DType.Q4_0, 256 * 13, 20, 1, FEW),
    "q4_0, set after set": partial(product, DType.Q4_0, 256 * 5, 75, 1, FEW),
    "q6_k, set after set, two warps a row": partial(product, DType.Q6_K, 256 * 9, 75, 1, TWO),
    "q4_k, set after set, gated": partial(gated, DType.Q4_K, 256 * 5, 75, 1, TWO),
    "q8_0, batches": partial(product, DType.Q8_0, 1056, 40, 2, CARD, 4),
    "f16, four warps a row": partial(product, DType.F16, 1320, 13, 5, CARD, 4),
    "f32, four warps a row": partial(product, DType.F32, 1320, 13, 1),
    "f16, short rows": partial(product, DType.F16, 64, 13, 2),
    "bf16, gated": partial(gated, DType.BF16, 1320, 13, 2),
    "q4_0, gated": partial(gated, DType.Q4_0, 256 * 9, 7, 2),
    "f16, gated": partial(gated, DType.F16, 1320, 13, 1),
    "q4_0, experts": partial(experts, DType.Q4_0, 1, 3, True),
    "q4_0, sorted experts": partial(experts, DType.Q4_0, 1, 60, True, TURING),
    "q8_0, a layer of experts": partial(experts_layer, DType.Q8_0, 3, 8),
    "q4_0, a layer of sorted experts": partial(experts_layer, DType.Q4_0, 10, 3),
    "f16, a layer of experts": partial(experts_layer, DType.F16, 2, 8, is_sorted=True, div=False),
    "q4_0, three weights": partial(side_by_side, DType.Q4_0, 1, (70, 20, 33), bias=False),
    "q8_0, two weights and biases": partial(side_by_side, DType.Q8_0, 3, (70, 21), bias=True),
    "f16, three weights and biases": partial(side_by_side, DType.F16, 2, (70, 20, 33), bias=True),
    "portable heads": partial(heads, 2, 96, 3, norms=False),
    "portable heads, normalised": partial(heads, 0, 64, 2, norms=True),
    "f16, experts": partial(experts, DType.F16, 1, 3, True),
    "argmax, long rows": partial(argmax, 1000),
    "argmax, rows in segments": partial(argmax, 8200),
    "top_k, lanes of a warp": partial(top_k, 100, 8, 1),
    "top_k, long rows": partial(top_k, 3000, 64, 1),
    "top_k, rows beyond registers": partial(top_k, 17021, 64, 1),
    "top_k, rows in segments": partial(top_k, 8200, 64, 2),
    "portable f16, few columns": partial(portable, DType.F16, 1320, 5, 3),
    "portable f32, few columns and a rest": partial(portable, DType.F32, 69, 5, 3),
    "portable q4_0, tiles": partial(portable, DType.Q4_0, 96, 70, 67),
    "portable f32, tiles and a rest": partial(portable, DType.F32, 69, 66, 9),
    "portable q8_0, experts": partial(experts, DType.Q8_0, 2, 2, False),
    "portable q4_0, a layer of experts": partial(experts_layer, DType.Q4_0, 3, 8, own=False),
    "portable f16, experts' tiles": partial(experts, DType.F16, 2, 150, False),
    **{
        f"portable attention, {shape}": partial(attention, shape, DType.Q8_0, FEW, False)
        for shape in ("decode, shared keys", "prefill, shared keys")
    },
    "q4_0, by cuBLAS": partial(product, DType.Q4_0, 256, 19, 40, TURING, 4),
    "q4_0, by tensor cores, tile after tile": partial(product, DType.Q4_0, 256 * 4, 40, 40, FEW),
    "q4_1, by tensor cores, a part of a tile": partial(product, DType.Q4_1, 256 + 96, 150, 70, FEW),
    "q4_1, experts by tensor cores": partial(experts, DType.Q4_1, 1, 60, True),
    "q6_k, by tensor cores, batches": partial(product, DType.Q6_K, 256 * 3, 70, 12, CARD, 4),
    **{
        f"attention, {shape}, {kv.name.lower()}": partial(attention, shape, kv)
        for shape in ATTENTION
        for kv in (DType.F16, DType.Q8_0)
        if ATTENTION[shape][1] % kv.block_size == 0
    },
}
