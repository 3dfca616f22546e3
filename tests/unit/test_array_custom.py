"""Ops that call a Python function."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ggmlb.backends.cpu import backend_reg
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError
from ggmlb.core.ops.custom import N_TASKS_MAX
from tests.support.array_program import Program, close

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32


class TestCustom:
    def test_arguments(self, cpu):
        calls = []

        def fun(dst, a, b, ith, nth, userdata):
            calls.append((dst.shape, b.shape, ith, nth, userdata))
            np.add(a, b.sum(), out=dst)

        p = Program()
        a, b = p.leaf((5, 2)), p.leaf((3,))
        got = p.compute(cpu, p.ctx.map_custom2(a, b, fun, 1, "mine"))
        assert calls == [((1, 1, 2, 5), (1, 1, 1, 3), 0, 1, "mine")]
        close(got, p.array(a) + p.array(b).sum())

    @pytest.mark.parametrize(("n_tasks", "used"), [(1, 1), (2, 2), (7, 2), (N_TASKS_MAX, 2)])
    def test_tasks_share_the_work(self, cpu, n_tasks, used):
        def fun(dst, a, ith, nth, userdata):
            assert nth == used
            dst[..., ith::nth] = a[..., ith::nth] + ith

        p = Program()
        a = p.leaf((6,))
        got = p.compute(cpu, p.ctx.map_custom1(a, fun, n_tasks))
        close(got, p.array(a) + np.arange(6) % used)

    def test_in_place(self, cpu):
        p = Program()
        a = p.leaf((6,))
        node = p.ctx.map_custom1_inplace(a, lambda dst, a, *_: np.negative(a, out=dst))
        got, leaf = p.compute(cpu, node, a)
        np.testing.assert_array_equal(got, leaf)
        close(got, -p.array(a))

    def test_operands_of_any_type(self, cpu):
        seen = {}

        def fun(dst, args, ith, nth, userdata):
            seen.update({i: a.dtype for i, a in enumerate(args)})
            dst[...] = sum(float(a.astype(np.float32).sum()) for a in args)

        p = Program()
        leafs = [p.leaf((32,), t, np.arange(32)) for t in (F16, BF16, I32, DType.Q8_0)]
        got = p.compute(cpu, p.ctx.custom_4d(BF16, 2, 1, 1, 1, leafs, fun))
        assert seen == {0: np.float16, 1: ml_dtypes.bfloat16, 2: np.int32, 3: np.float32}
        np.testing.assert_allclose(got.astype(np.float32), 4 * 496, rtol=1e-2)

    def test_a_failure_names_the_node(self, cpu):
        p = Program()
        node = p.ctx.map_custom1(p.leaf((3,)), lambda *_: 1 / 0)
        node.name = "mine"
        with pytest.raises(BackendError, match=r"MAP_CUSTOM1 f32\[3\] \(node 'mine'\).*ZeroDivisionError"):
            p.compute(cpu, node)

    def test_blocks_cannot_be_a_result(self):
        ctx = Context()
        node = ctx.map_custom1(ctx.new_tensor(DType.Q8_0, (32,)), print)
        assert backend_reg().devices[0].declines(node) == "no kernel writes q8_0"
