from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ggmlb.backends.common.rules import FLOATS, Rules, in_rows, operands
from ggmlb.backends.cpu.lowering import RULES
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Status
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import alloc_ctx_tensors
from tests.support.array_program import Program


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


PLAIN_FLOATS = [DType.F32, DType.F16, DType.BF16]


@pytest.mark.parametrize("a_type", PLAIN_FLOATS)
@pytest.mark.parametrize("b_type", PLAIN_FLOATS)
def test_operands_of_any_type_meet_in_float32(cpu, a_type, b_type):
    p = Program()
    a, b = p.leaf((64, 3, 2), a_type, low=0.5), p.leaf((32, 1, 2), b_type, low=-2, high=-0.5)
    got, x, y = p.compute(cpu, p.ctx.mul(a, b), a, b)
    rounding = {DType.F32: 0, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}[a_type]
    expected = x.astype(np.float32) * np.tile(y.astype(np.float32), (1, 1, 3, 2))
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=rounding, atol=0)


def test_blocks_meet_whole_rows_only(cpu):
    p = Program()
    a, b = p.leaf((64, 3, 2), DType.Q8_0), p.leaf((64, 1, 2), DType.Q8_0)
    why = "src1 repeats along rows, which is impossible with quantised operands"
    assert cpu.device.declines(p.ctx.add(a, p.leaf((32,)))) == why
    got, x, y = p.compute(cpu, p.ctx.add(a, b), a, b)
    np.testing.assert_allclose(got, x + y, atol=0.03)


def test_rows_that_are_masked_wholly_attend_to_nothing(cpu):
    p = Program()
    q, k, mask = p.leaf((8, 2)), p.leaf((8, 3)), p.leaf((3, 2), DType.F16, [[0, 0, 0], [-np.inf] * 3])
    got = p.compute(cpu, p.ctx.flash_attn_ext(q, k, k, mask))[0]
    assert (got[1] == 0).all() and np.isfinite(got[0]).all()


def test_experts_that_nobody_chose_are_not_read(cpu):
    p = Program()
    w = normal(0, 2, 3, 4)
    w[1] = np.nan
    experts, x = p.leaf((4, 3, 2), values=w), p.leaf((4, 1, 5))
    got = p.compute(cpu, p.ctx.mul_mat_id(experts, x, p.leaf((1, 5), DType.I32, np.zeros(5))))
    np.testing.assert_allclose(got[0, :, 0], p.array(x)[0, :, 0] @ w[0].T, rtol=1e-5)


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


def test_a_reason_names_the_operand():
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
    assert RULES.declines(ctx.sqr(ctx.new_tensor(DType.I32, (4,)))) == "src0 is i32: only f32, f16 and bf16"
    assert Rules().declines(ctx.sqr(a)) == "no kernel for SQR"


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_failure_names_the_node(cpu, is_watched):
    p = Program()
    rows = p.leaf((2,), DType.I32, [1, 3])
    y = p.ctx.set_name(p.ctx.get_rows(p.ctx.sqr(p.leaf((4, 3))), rows), "looked up")
    z = p.ctx.sqr(y)
    cpu.abort_callback = (lambda: False) if is_watched else None
    with pytest.raises(BackendError, match=r"GET_ROWS f32\[4, 2\] \(node 'looked up'\).*of 3 rows"):
        p.compute(cpu, z)
    p.values[rows] = np.array([1, 2]).reshape(1, 1, 1, 2)
    p.compute(cpu, z)


def test_the_abort_callback_is_asked_before_each_node(cpu):
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
