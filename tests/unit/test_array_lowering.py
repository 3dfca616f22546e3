from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ggmlb.backends.common.rules import FLOATS, Rules, in_rows, operands
from ggmlb.backends.common.workspace import Workspace
from ggmlb.backends.cpu.lowering import CpuLowering
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.threads import Threads
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, Status
from ggmlb.core.errors import BackendError, UnsupportedOpError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import tensor_alloc
from ggmlb.interface.registry import cpu_buffer_from_ptr
from ggmlb.runtime.alloc import alloc_ctx_tensors


def bytes_for(n):
    return np.empty(n, np.uint8)


class TestWorkspace:
    def test_arrays_of_one_node_do_not_overlap(self):
        workspace = Workspace(bytes_for)
        arrays = [workspace.take((n, 3)) for n in (5, 700_000, 1, 0, 2_000_000)]
        for i, a in enumerate(arrays):
            a[...] = i
        assert [a.shape for a in arrays] == [(5, 3), (700_000, 3), (1, 3), (0, 3), (2_000_000, 3)]
        assert all((a == i).all() for i, a in enumerate(arrays))

    def test_the_next_node_takes_the_same_memory(self):
        workspace = Workspace(bytes_for)
        first = workspace.take((1000,))
        workspace.restart()
        assert np.shares_memory(first, workspace.take((10,), np.uint16))

    def test_memory_that_was_taken_outlives_its_replacement(self):
        workspace = Workspace(bytes_for)
        first = workspace.take((10,))
        first[...] = 7
        workspace.restart()
        workspace.take((1 << 20,))[...] = 0
        assert (first == 7).all()


class SmallTiles(CpuLowering):
    """Cuts after few items."""

    tile = 8
    weight_tile = 16


def compute(y):
    lowering = SmallTiles(Workspace(bytes_for), Threads(1))
    graph = Graph().build_forward_expand(y)
    with np.errstate(all="ignore"):
        steps, counts = lowering.lower(graph.nodes)
        for step in steps:
            step()
    return steps, counts


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


PLAIN_FLOATS = [DType.F32, DType.F16, DType.BF16]


@pytest.mark.parametrize("a_type", PLAIN_FLOATS)
@pytest.mark.parametrize("b_type", PLAIN_FLOATS)
def test_operands_of_any_type_meet_in_float32(cpu, a_type, b_type):
    ctx = Context()
    a, b = ctx.new_tensor(a_type, (64, 3, 2)), ctx.new_tensor(b_type, (32, 1, 2))
    y = ctx.mul(a, b)
    with alloc_ctx_tensors(ctx, cpu):
        a.set_array(normal(0, 2, 3, 64))
        b.set_array(normal(1, 2, 1, 32))
        compute(y)
        expected = a.to_numpy().astype(np.float32) * np.tile(b.to_numpy().astype(np.float32), (1, 3, 2))
        rounding = {DType.F32: 0, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}[a_type]
        np.testing.assert_allclose(y.to_numpy().astype(np.float32), expected, rtol=rounding, atol=0)


def test_blocks_meet_whole_rows_only(cpu):
    ctx = Context()
    a, b = ctx.new_tensor(DType.Q8_0, (64, 3, 2)), ctx.new_tensor(DType.Q8_0, (64, 1, 2))
    half = ctx.new_tensor(DType.F32, (32,))
    y = ctx.add(a, b)
    assert RULES.declines(ctx.add(a, half)) == "blocks and rows of src1 that repeat do not go together"
    with alloc_ctx_tensors(ctx, cpu):
        a.set_array(normal(0, 2, 3, 64))
        b.set_array(normal(1, 2, 1, 64))
        compute(y)
        np.testing.assert_allclose(y.to_numpy(), a.to_numpy() + b.to_numpy(), atol=0.03)


def test_a_node_is_cut_into_tiles_that_give_the_same(cpu):
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (5, 4, 3, 2))
    view = ctx.permute(a, 2, 0, 3, 1)
    y = ctx.soft_max(ctx.add(ctx.silu(ctx.cont(view)), view))
    with alloc_ctx_tensors(ctx, cpu):
        x = normal(0, 2, 3, 4, 5)
        a.set_array(x)
        steps, counts = compute(y)
        x = np.transpose(x, (1, 3, 0, 2))
        assert len(steps) == sum(counts) > 20
        z = x / (1 + np.exp(-x)) + x
        e = np.exp(z - z.max(-1, keepdims=True))
        np.testing.assert_allclose(y.to_numpy(), e / e.sum(-1, keepdims=True), rtol=1e-5)


def test_rows_that_are_masked_wholly_attend_to_nothing(cpu):
    ctx = Context()
    q, k = ctx.new_tensor(DType.F32, (8, 2)), ctx.new_tensor(DType.F32, (8, 3))
    mask = ctx.new_tensor(DType.F16, (3, 2))
    y = ctx.flash_attn_ext(q, k, k, mask)
    with alloc_ctx_tensors(ctx, cpu):
        q.set_array(normal(0, 2, 8))
        k.set_array(normal(1, 3, 8))
        mask.set_array(np.array([[0, 0, 0], [-np.inf] * 3]))
        compute(y)
        assert (y.to_numpy()[1] == 0).all()
        assert np.isfinite(y.to_numpy()[0]).all()


def test_experts_that_nobody_chose_are_not_read(cpu):
    ctx = Context()
    experts = ctx.new_tensor(DType.F32, (4, 3, 2))
    x, ids = ctx.new_tensor(DType.F32, (4, 1, 5)), ctx.new_tensor(DType.I32, (1, 5))
    y = ctx.mul_mat_id(experts, x, ids)
    with alloc_ctx_tensors(ctx, cpu):
        w = normal(0, 2, 3, 4)
        w[1] = np.nan
        experts.set_array(w)
        x.set_array(normal(1, 5, 1, 4))
        ids.set_array(np.zeros((5, 1), np.int32))
        compute(y)
        np.testing.assert_allclose(y.to_numpy()[:, 0], x.to_numpy()[:, 0] @ w[0].T, rtol=1e-5)


def test_nothing_big_is_allocated_when_a_plan_runs(cpu):
    ctx = Context()
    w = ctx.new_tensor(DType.F16, (512, 512))
    x = ctx.new_tensor(DType.F32, (512, 2048))
    h = ctx.gelu_erf(ctx.rms_norm(ctx.add(ctx.mul_mat(w, x), x), 1e-5))
    y = ctx.soft_max(ctx.mul(h, h))
    with alloc_ctx_tensors(ctx, cpu) as buffer:
        buffer.clear(0)
        plan = cpu.graph_plan_create(Graph().build_forward_expand(y))
        cpu.graph_plan_compute(plan)
        tracemalloc.start()
        cpu.graph_plan_compute(plan)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20  # an activation has 4 MiB


class TestRules:
    def test_a_rule_lowers_an_op_where_all_its_conditions_hold(self):
        rules = Rules()

        @rules.rule((Op.SQR, Op.SQRT), operands(FLOATS), lambda t: None if t.ne[0] > 10 else "too short")
        def lower(t):
            return f"lowered {t.op}"

        ctx = Context()
        a, half = ctx.new_tensor(DType.F32, (50,)), ctx.new_tensor(DType.F16, (5,))
        assert rules.declines(ctx.sqr(a)) is None
        assert rules[Op.SQRT](ctx.sqrt(a)) == "lowered SQRT"
        assert rules.declines(ctx.sqr(half)) == "too short"
        assert rules.declines(ctx.sqr(ctx.new_tensor(DType.I8, (5,)))).startswith("src0 is i8: only")
        assert Op.SQR in rules
        assert Op.SIN not in rules
        with pytest.raises(AssertionError, match="two rules for SQR"):
            rules.rule(Op.SQR)(lower)

    def test_a_reason_names_the_operand(self):
        ctx = Context()
        a, b = ctx.new_tensor(DType.F32, (64, 64)), ctx.new_tensor(DType.Q4_0, (64, 64))
        y, index = ctx.mul_mat(b, a), frozenset({DType.I32, DType.I64})
        any_, but_q4, but_f32 = (frozenset(DType) - {t} for t in (None, DType.Q4_0, DType.F32))
        turned = Tensor(DType.F32, (64, 64, 1, 1), src=(Tensor(b.dtype, b.ne, (36, 18, 2304, 2304)),))
        for condition, node, why in (
            (operands(FLOATS), y, "src0 is q4_0: only f32, f16 and bf16"),
            (operands(any_, index), y, "src1 is f32: only i32 and i64"),
            (operands(but_q4), y, "no kernel takes q4_0 as src0"),
            (operands(out=frozenset({DType.F16})), y, "the result is f32: only f16"),
            (operands(out=but_f32), y, "no kernel writes f32"),
            (operands(any_), turned, "the rows of src0 are not contiguous (nb0 = 36): apply cont"),
            (in_rows(0, -1), ctx.transpose(a), "the rows of the result are not contiguous (nb0 = 256)"),
        ):
            assert condition(node) == why

    def test_what_no_rule_takes_is_declined_with_the_last_reason(self):
        ctx = Context()
        y = ctx.sqr(ctx.new_tensor(DType.I32, (4,)))
        assert RULES.declines(y) == "src0 is i32: only f32, f16 and bf16"
        assert Rules().declines(y) == "no kernel for SQR"
        with pytest.raises(UnsupportedOpError, match=r"cannot lower SQR i32\[4\]: src0 is i32"):
            compute(y)

    def test_views_need_no_rule(self):
        ctx = Context()
        a = ctx.new_tensor(DType.Q4_K, (256, 4))
        assert Rules().declines(ctx.reshape_1d(a, 1024)) is None

    def test_sources_are_those_that_are_there(self):
        ctx = Context()
        a = ctx.new_tensor(DType.F32, (4,))
        assert ctx.soft_max(a).sources == (a,)


class TestPlan:
    def test_a_failure_names_the_node(self, cpu):
        ctx = Context()
        table, rows = ctx.new_tensor(DType.F32, (4, 3)), ctx.new_tensor(DType.I32, (2,))
        x = ctx.sqr(table)
        y = ctx.set_name(ctx.get_rows(x, rows), "looked up")
        z = ctx.sqr(y)
        with alloc_ctx_tensors(ctx, cpu) as buffer:
            buffer.clear(0)
            rows.set_array(np.array([1, 3], np.int32))
            with pytest.raises(BackendError, match=r"GET_ROWS f32\[4, 2\] \(node 'looked up'\).*of 3 rows"):
                cpu.graph_compute(Graph().build_forward_expand(z))
            rows.set_array(np.array([1, 2], np.int32))
            assert cpu.graph_compute(Graph().build_forward_expand(z)) is Status.SUCCESS

    def test_nodes_that_run_tile_by_tile_fail_together(self, cpu):
        frozen = np.zeros((300, 1000), np.float32)
        frozen.flags.writeable = False  # `graph_compute` would refuse it
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (1000, 300))
        w = ctx.new_tensor(DType.F32, (1000, 300), "frozen")
        y = ctx.add_inplace(w, ctx.sqr(x))
        with cpu_buffer_from_ptr(frozen) as buffer:
            tensor_alloc(buffer, w, 0)
            with (
                alloc_ctx_tensors(ctx, cpu) as rest,
                pytest.raises(BackendError, match=r"SQR f32\[1000, 300\] with ADD .*frozen.*read-only"),
            ):
                rest.clear()
                cpu._compute(cpu._plan(Graph().build_forward_expand(y)))

    def test_the_abort_callback_is_asked_before_each_node(self, cpu):
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (4,))
        nodes = [x]
        for _ in range(4):
            nodes.append(ctx.add(nodes[-1], x))
        graph = Graph().build_forward_expand(nodes[-1])
        with alloc_ctx_tensors(ctx, cpu) as buffer:
            buffer.clear(0)
            x.set_array(np.ones(4, np.float32))
            answers = iter([False, False, True])
            cpu.abort_callback = lambda: next(answers)
            assert cpu.graph_compute(graph) is Status.ABORTED
            assert [n.to_numpy()[0] for n in nodes[1:]] == [2, 3, 0, 0]
            cpu.abort_callback = None
            assert cpu.graph_compute(graph) is Status.SUCCESS
            assert nodes[-1].to_numpy()[0] == 5

    def test_a_failure_under_an_abort_callback_names_the_node(self, cpu):
        ctx = Context()
        table, rows = ctx.new_tensor(DType.F32, (4, 3)), ctx.new_tensor(DType.I32, (2,))
        y = ctx.sqr(ctx.get_rows(ctx.sqr(table), rows))
        with alloc_ctx_tensors(ctx, cpu) as buffer:
            buffer.clear(0)
            rows.set_array(np.array([0, -1], np.int32))
            cpu.abort_callback = lambda: False
            with pytest.raises(BackendError, match="failed to compute GET_ROWS"):
                cpu.graph_compute(Graph().build_forward_expand(y))
