"""What a rule saves: the sums and gathers that a node costs, for each way to deal its operands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Graph, GraphAllocator, SplitState, Tensor
from ggmlb.parallel.meta import MIRRORED
from ggmlb.parallel.meta.reduce import MetaCommunicator
from ggmlb.testing.fake import FakeReg

CPU = ggmlb.device_by_name("CPU")

Program = tuple["Callable[..., Tensor]", dict[str, tuple[int, ...]]]

# A method of Context by its name and its operands after the leafs; the leafs' extents, by name.
PROGRAMS: dict[str, Program] = {
    "mul_mat": (Context.mul_mat, {"w": (8, 6, 1, 2), "x": (8, 4, 4, 2)}),
    "mul_mat_id": (Context.mul_mat_id, {"w": (8, 6, 3), "x": (8, 2, 4), "ids": (2, 4)}),
    "attention": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 0.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3)},
    ),
    "attention, masks of pairs": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 0.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3, 4)},
    ),
    "attention, masks of each": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 0.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3, 8, 2)},
    ),
    "alibi": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 8.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3)},
    ),
    "attention, one head of keys": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 0.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 1, 2), "v": (4, 5, 1, 2), "m": (5, 3)},
    ),
    "rope back": (
        lambda c, x, ids: c.rope_ext_back(x, ids, None, 8, 0, 0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0),
        {"x": (8, 6, 3), "ids": (3,)},
    ),
    "branches": (
        lambda c, w, x, v, z: c.add(c.mul_mat(w, x), c.mul_mat(v, z)),
        {"w": (8, 6), "x": (8, 4), "v": (16, 6), "z": (16, 4)},
    ),
    "branches and a residual": (
        lambda c, w, x, v, z, y: c.add(c.div(c.sub(c.mul_mat(w, x), c.mul_mat(v, z)), y), y),
        {"w": (8, 6), "x": (8, 4), "v": (16, 6), "z": (16, 4), "y": (6, 4)},
    ),
    "a residual": (lambda c, w, x, y: c.add(c.mul_mat(w, x), y), {"w": (8, 6), "x": (8, 4), "y": (6, 4)}),
    "a branch read twice": (
        lambda c, w, x, v, z: c.add(c.add(t := c.mul_mat(w, x), c.mul_mat(v, z)), c.sqr(t)),
        {"w": (8, 6), "x": (8, 4), "v": (16, 6), "z": (16, 4)},
    ),
    "a view of a branch": (
        lambda c, w, x, v, z: c.add(c.transpose(c.mul_mat(w, x)), c.sqr(c.mul_mat(v, z))),
        {"w": (8, 6), "x": (8, 4), "v": (16, 4), "z": (16, 6)},
    ),
    "one sum for two readers": (
        lambda c, w, x, y, z: c.mul(c.sqr(c.mul(t := c.mul_mat(w, x), y)), c.sqr(c.mul(t, z))),
        {"w": (8, 6), "x": (8, 4), "y": (6, 4), "z": (6, 4)},
    ),
    "a marked branch": (
        lambda c, w, x, v, z: c.add(c.set_output(c.mul_mat(w, x)), c.mul_mat(v, z)),
        {"w": (8, 6), "x": (8, 4), "v": (16, 6), "z": (16, 4)},
    ),
    "weighted experts": (
        lambda c, w, x, ids, y, v, z: c.add(weighted_experts(c, w, x, ids, y), c.mul_mat(v, z)),
        {"w": (8, 6, 3), "x": (8, 2, 4), "ids": (2, 4), "y": (1, 2, 4), "v": (16, 6), "z": (16, 4)},
    ),
    "sum": (Context.sum_rows, {"x": (8, 6)}),
    "norm": (lambda c, x: c.rms_norm(x, 1e-5), {"x": (8, 6)}),
    "add": (Context.add, {"x": (8, 6), "y": (8, 1)}),
    "gated": (Context.swiglu_split, {"x": (8, 6, 4), "y": (8, 6, 4)}),
    "add repeated": (Context.add, {"x": (8, 6), "y": (4, 3)}),
    "step": (lambda c, x, g, p: c.opt_step_sgd(c.set_param(x), g, p), {"x": (8, 6), "g": (8, 6), "p": (2,)}),
}

# The program; the dimension along which each leaf is cut, mirrored if not named; sums and gathers.
CASES: list[tuple[str, dict[str, int], tuple[int, int]]] = [
    ("mul_mat", {"w": 1}, (0, 0)),
    ("mul_mat", {"w": 0}, (1, 0)),
    ("mul_mat", {"x": 0}, (1, 0)),
    ("mul_mat", {"w": 0, "x": 0}, (1, 0)),
    ("mul_mat", {"x": 1}, (0, 0)),
    ("mul_mat", {"x": 2}, (0, 0)),
    ("mul_mat", {"x": 3}, (0, 0)),
    ("mul_mat", {"w": 3}, (0, 0)),
    ("mul_mat", {"w": 3, "x": 3}, (0, 0)),
    ("mul_mat", {"w": 1, "x": 1}, (0, 1)),
    ("gated", {"x": 0}, (0, 0)),
    ("gated", {"x": 2}, (0, 0)),
    ("gated", {"x": 1, "y": 1}, (0, 0)),
    ("gated", {"x": 1}, (0, 1)),  # a slice of y would have gaps between planes, which GLU does not take
    ("mul_mat_id", {"w": 1}, (0, 0)),
    ("mul_mat_id", {"w": 0}, (1, 0)),
    ("mul_mat_id", {"w": 2}, (0, 1)),
    ("mul_mat_id", {"x": 2}, (0, 0)),
    ("mul_mat_id", {"x": 2, "ids": 1}, (0, 0)),
    ("mul_mat_id", {"x": 0}, (0, 1)),
    ("attention", {"q": 2}, (0, 0)),
    ("attention", {"k": 2, "v": 2}, (0, 0)),
    ("attention", {"q": 2, "k": 2, "v": 2}, (0, 0)),
    ("attention", {"q": 3}, (0, 0)),
    ("attention", {"k": 3}, (0, 0)),
    ("attention", {"q": 1}, (0, 1)),
    ("attention", {"m": 1}, (0, 1)),
    ("attention, masks of pairs", {"q": 2}, (0, 1)),
    ("attention, masks of each", {"q": 2}, (0, 0)),
    ("attention, masks of each", {"q": 3, "m": 3}, (0, 0)),
    ("alibi", {"q": 2}, (0, 1)),
    ("alibi", {"q": 3}, (0, 0)),
    ("attention, one head of keys", {"q": 2}, (0, 0)),
    ("rope back", {"x": 1}, (0, 0)),
    ("branches", {"w": 0, "v": 0}, (1, 0)),
    ("branches", {"w": 0, "z": 0}, (1, 0)),
    ("branches", {"w": 0, "v": 1}, (1, 1)),
    ("branches and a residual", {"w": 0, "v": 0}, (1, 0)),
    ("branches and a residual", {"w": 0, "v": 0, "y": 0}, (1, 1)),
    ("a residual", {"w": 0}, (1, 0)),
    ("a branch read twice", {"w": 0, "v": 0}, (2, 0)),
    ("a view of a branch", {"w": 0, "v": 0}, (2, 0)),
    ("one sum for two readers", {"w": 0}, (1, 0)),
    ("a marked branch", {"w": 0, "v": 0}, (2, 0)),
    ("weighted experts", {"w": 0, "v": 0}, (1, 0)),
    ("sum", {"x": 0}, (0, 1)),
    ("sum", {"x": 1}, (0, 0)),
    ("norm", {"x": 1}, (0, 0)),
    ("norm", {"x": 0}, (0, 1)),
    ("add", {"x": 0}, (0, 0)),
    ("add", {"x": 1}, (0, 0)),
    ("add", {"y": 0}, (0, 0)),
    ("add", {"y": 1}, (0, 1)),
    ("add repeated", {"y": 0}, (0, 1)),
    ("add repeated", {"y": 1}, (0, 1)),
    ("add repeated", {"x": 0}, (0, 1)),
    ("step", {"x": 0, "g": 0}, (0, 0)),
    ("step", {"x": 1, "g": 1}, (0, 0)),
    ("step", {"x": 0}, (0, 1)),
    ("step", {"x": 0, "g": 1}, (0, 2)),
    ("step", {"x": 0, "g": 0, "p": 0}, (0, 3)),
]


def weighted_experts(c: Context, w: Tensor, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
    """The sum of two experts' products for each of four tokens, multiplied by the weights `y`."""
    products = c.mul(c.mul_mat_id(w, x, ids), y)
    nb = products.nb
    return c.add(*[c.view_2d(products, products.ne[0], 4, nb[2], i * nb[1]) for i in range(2)])


def leafs_of(name: str) -> tuple[Context, list[Tensor], list[Any]]:
    ctx, rng = Context(), np.random.default_rng(0)
    leafs, values = [], []
    for leaf, ne in PROGRAMS[name][1].items():
        dtype = {"ids": "i32", "m": "f16"}.get(leaf, "f32")
        leafs.append(ctx.new_tensor(dtype, ne, leaf))
        values.append(rng.normal(size=ne[::-1]) if leaf != "ids" else rng.integers(0, 3, ne[::-1]))
    return ctx, leafs, values


def halves(tensor: Tensor, axis: int) -> SplitState:
    n = tensor.ne[axis]
    return SplitState(ggmlb.SplitAxis(axis), ((n // 2, n - n // 2),))


@pytest.mark.parametrize(("name", "cuts", "costs"), CASES, ids=[f"{n} {c}" for n, c, _ in CASES])
def test_what_a_node_costs(name: str, cuts: dict[str, int], costs: tuple[int, int]) -> None:
    build = PROGRAMS[name][0]
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, cuts[t.name]) if t.name in cuts else MIRRORED)
    ctx, leafs, values = leafs_of(name)
    _, plain, _ = leafs_of(name)
    inputs = dict(zip(plain, values, strict=True))
    expected = ggmlb.evaluate(build(Context(), *plain), inputs, devices="CPU")
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta):
        for leaf, array in zip(leafs, values, strict=True):
            leaf.set_array(array)
        y = build(Context(), *leafs)
        graph = Graph().build_forward_expand(y)
        with GraphAllocator(device.buffer_type) as allocator:
            allocator.alloc_graph(graph)
            plan: Any = meta.graph_plan_create(graph)
            meta.graph_plan_compute(plan)
            np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-3, atol=1e-3)
            assert (plan.n_reductions, plan.n_gathers) == costs
            meta.graph_plan_free(plan)


SumOf = tuple[tuple[int, ...], tuple[bool, ...]]


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[SumOf]:
    """For each sum over devices that is prepared: its extents, and which devices have a part."""
    sums: list[SumOf] = []
    plain = MetaCommunicator.sum_of

    def sum_of(self: MetaCommunicator, parts: Any, has_part: Any) -> Any:
        sums.append((parts[0].ne, has_part))
        return plain(self, parts, has_part)

    monkeypatch.setattr(MetaCommunicator, "sum_of", sum_of)
    return sums


def test_the_sum_of_experts_is_that_of_one_row_for_each_token(summed: list[SumOf]) -> None:
    test_what_a_node_costs("weighted experts", {"w": 0, "v": 0}, (1, 0))
    assert summed == [((6, 4, 1, 1), (True, True))]


@pytest.mark.parametrize(
    ("on_cpu", "expected"), [(False, [(6, 4, 1, 1)]), (True, [(6, 2, 4, 1), (6, 4, 1, 1)])]
)
def test_a_scheduler_sums_before_another_device_reads(
    on_cpu: bool, expected: list[Any], summed: list[SumOf]
) -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, 0) if t.name in "wv" else MIRRORED)
    ctx, leafs, values = leafs_of("weighted experts")
    _, plain, _ = leafs_of("weighted experts")
    build = PROGRAMS["weighted experts"][0]
    right = ggmlb.evaluate(build(Context(), *plain), dict(zip(plain, values, strict=True)), devices="CPU")
    with (
        device.init_backend() as meta,
        CPU.init_backend() as cpu,
        ggmlb.alloc_ctx_tensors(ctx, meta) as weights,
    ):
        weights.usage = "weights"
        for leaf, array in zip(leafs, values, strict=True):
            leaf.set_array(array)
        y = build(Context(), *leafs)
        with ggmlb.Scheduler([meta, cpu]) as scheduler:
            if on_cpu:  # it adds the weighted experts
                scheduler.set_tensor_backend(y.operand(0), cpu)
            scheduler.graph_compute(Graph().build_forward_expand(y))
            np.testing.assert_allclose(y.to_numpy(), right, rtol=1e-3, atol=1e-3)
    assert [ne for ne, _ in summed] == expected


def test_an_eval_callback_sees_sums() -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, 0) if t.name in "wv" else MIRRORED)
    seen: list[list[Any]] = []
    for first in (device, CPU):
        seen.append([])
        ctx, leafs, values = leafs_of("weighted experts")
        with first.init_backend() as stream, CPU.init_backend() as cpu, ggmlb.alloc_ctx_tensors(ctx, stream):
            for leaf, array in zip(leafs, values, strict=True):
                leaf.set_array(array)
            y = PROGRAMS["weighted experts"][0](Context(), *leafs)
            with ggmlb.Scheduler([stream, cpu] if first is device else [cpu]) as scheduler:
                scheduler.set_eval_callback(lambda t, ask: ask or seen[-1].append(t.to_numpy()) is None)
                scheduler.graph_compute(Graph().build_forward_expand(y))
    assert len(seen[0]) == len(seen[1]) > 3
    for found, right in zip(*seen, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("of_w", "of_v", "expected"),
    [
        ((2, 0, 6), (8, 0, 8), [(True, False, True)]),
        ((2, 0, 6), (8, 8, 0), [(True, False, True), (True, True, False)]),
    ],
)
def test_branches_are_summed_at_once_where_the_same_devices_have_a_part(
    of_w: tuple[int, ...], of_v: tuple[int, ...], expected: list[Any], summed: list[SumOf]
) -> None:
    cuts = {"w": SplitState(0, (of_w,)), "v": SplitState(0, (of_v,))}
    device = ggmlb.meta_device([CPU] * 3, lambda t: cuts.get(t.name, MIRRORED))
    ctx, (w, x, v, z), values = leafs_of("branches")
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta):
        for leaf, array in zip((w, x, v, z), values, strict=True):
            leaf.set_array(array)
        c = Context()
        y = c.add(c.mul_mat(w, x), c.mul_mat(v, z))
        graph = Graph().build_forward_expand(y)
        with GraphAllocator(device.buffer_type) as allocator:
            allocator.alloc_graph(graph)
            for buffer in allocator.buffers:
                buffer.clear(0xFF)  # what a device has no part of must not be read: it is NaN
            assert meta.graph_compute(graph) is ggmlb.Status.SUCCESS
            np.testing.assert_allclose(
                y.to_numpy(), values[1] @ values[0].T + values[3] @ values[2].T, rtol=1e-4, atol=1e-4
            )
    assert [has for _, has in summed] == expected


def test_results_that_the_user_placed_are_summed() -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, 0) if t.name in "wv" else MIRRORED)
    ctx, (w, x, v, z), values = leafs_of("branches")
    product = ctx.mul_mat(w, x)
    y = ctx.add(product, ctx.mul_mat(v, z))
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta):
        for leaf, array in zip((w, x, v, z), values, strict=True):
            leaf.set_array(array)
        meta.graph_compute(Graph().build_forward_expand(y))
        np.testing.assert_allclose(product.to_numpy(), values[1] @ values[0].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [{"y": 0}, {"y": 1}, {"x": 1, "y": 0}, {"x": 1, "y": 1}, {"x": 1}], ids=str)
def test_a_result_whose_place_is_given_is_dealt_out_as_that_is(cuts: dict[str, int]) -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, cuts[t.name]) if t.name in cuts else MIRRORED)
    ctx, (x,), (values,) = leafs_of("sum")
    y = ctx.set_name(ctx.sqr(x), "y")
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta) as buffer:
        buffer.clear(0xFF)
        x.set_array(values)
        for _ in range(2):
            meta.graph_compute(Graph().build_forward_expand(y))
            np.testing.assert_allclose(y.to_numpy(), values.astype("f4") ** 2)
    assert device.state(Context().from_array(values)) == MIRRORED, "what lies elsewhere"


def test_a_freed_plan_frees_those_of_its_devices() -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, 0))
    ctx, (x,), _ = leafs_of("sum")
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta):
        y = Context().sum_rows(x)
        with GraphAllocator(device.buffer_type) as allocator:
            graph = Graph().build_forward_expand(y)
            allocator.alloc_graph(graph)
            plan: Any = meta.graph_plan_create(graph)
            parts = [own for stage in plan.stages for own in stage.plans if own is not None]
            assert parts
            meta.graph_plan_free(plan)
            assert all(own.is_freed for own in parts)
            with pytest.raises(ggmlb.FreedError):
                meta.graph_plan_compute(plan)
    assert device.reg.devices == (device,)
    assert device.reg.name == "Meta"


def test_devices_of_two_kinds_do_not_sum_by_the_means_of_one() -> None:
    class Reg(FakeReg):
        def get_proc_address(self, name: str) -> Any:
            return pytest.fail

    with Reg(2).devices[0].init_backend() as fake, CPU.init_backend() as cpu:
        assert not MetaCommunicator([fake, cpu]).allreduce([])
        assert not MetaCommunicator([fake]).allreduce([])
