from __future__ import annotations

import os
import platform
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from ggmlb.backends.cpu import backend_reg
from ggmlb.backends.cpu.blas import one_blas_thread
from ggmlb.backends.cpu.threads import Threads
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import DeviceType, Op, Status
from ggmlb.core.errors import ArgumentError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.cases import FAMILIES
from tests.support.oracle import programs

REG = backend_reg()
DEVICE = REG.devices[0]


class TestDevice:
    def test_facts(self):
        props = DEVICE.props
        assert (props.name, props.type, props.device_id) == ("CPU", DeviceType.CPU, None)
        assert props.description
        assert 0 < props.memory_free <= props.memory_total
        assert props.caps.as_dict() == {
            "async": False,
            "host_buffer": False,
            "buffer_from_host_ptr": True,
            "events": False,
            "mmap_support": True,
        }
        assert DEVICE.reg is REG
        assert REG.name == "CPU"

    def test_the_system_may_tell_nothing(self, monkeypatch):
        from ggmlb.backends.cpu import device

        monkeypatch.setattr(device, "Path", lambda name: Path(f"/nowhere{name}"))
        monkeypatch.setattr(os, "sysconf", lambda name: 4096)
        monkeypatch.setattr(platform, "processor", lambda: "some chip")
        assert device._memory() == (4096 * 4096, 4096 * 4096)
        assert device._description() == "some chip"

        def unknown(name):
            raise ValueError(name)

        monkeypatch.setattr(os, "sysconf", unknown)
        assert device._memory() == (0, 0)

    def test_any_host_memory_will_do(self):
        assert DEVICE.supports_buft(DEVICE.buffer_type)
        assert DEVICE.buffer_type.is_host
        assert DEVICE.host_buffer_type is None

    def test_declines_say_why(self):
        ctx = Context()
        a = ctx.new_tensor(DType.F32, (4, 4))
        assert DEVICE.declines(ctx.mul_mat(a, a)) is None
        odd = Tensor(DType.I32, (4, 4, 1, 1), op=Op.MUL_MAT, src=(a, a))
        assert DEVICE.declines(odd) == "the result is i32: only f32"
        assert not DEVICE.supports_op(odd)

    @pytest.mark.parametrize("family", sorted(FAMILIES))
    @settings(max_examples=20)
    @given(data=st.data())
    def test_it_declines_no_layout_that_ggml_computes(self, family, data):
        program = data.draw(programs(family))
        for node in program.case(family, []).build().graph.nodes:
            assert DEVICE.declines(node) is None

    def test_groups_are_normalised_in_place_in_part_of_a_tensor(self, cpu):
        values = np.random.default_rng(0).standard_normal((2, 4, 3, 7), np.float32)
        ctx = Context()
        whole, copy = ctx.from_array(values), ctx.from_array(values[:, :3, :, :5].copy())
        part = ctx.view_4d(whole, 5, 3, 3, 2, *whole.nb[1:], 0)
        results = ctx.group_norm_inplace(part, 2, 1e-5), ctx.group_norm(copy, 2, 1e-5)
        with alloc_ctx_tensors(ctx, cpu):
            assert cpu.graph_compute(Graph().build_forward_expand(*results)) is Status.SUCCESS
            inside, alone = (t.to_numpy() for t in results)
            np.testing.assert_allclose(inside, alone, atol=1e-6)
            values[:, :3, :, :5] = alone
            np.testing.assert_allclose(whole.to_numpy(), values, atol=1e-6)

    def test_groups_are_normalised_where_a_row_has_one_element(self, cpu):
        """Its stride is any number; here the other dimensions lie side by side."""
        ctx = Context()
        a = ctx.from_array(np.random.default_rng(0).standard_normal((2, 1, 4, 3), np.float32))
        odd = ctx.permute(a, 1, 2, 0, 3)
        assert odd.ne == (1, 3, 4, 2)
        results = ctx.group_norm(odd, 2, 1e-5), ctx.group_norm(ctx.cont(odd), 2, 1e-5)
        with alloc_ctx_tensors(ctx, cpu):
            assert cpu.graph_compute(Graph().build_forward_expand(*results)) is Status.SUCCESS
            np.testing.assert_array_equal(*(t.to_numpy() for t in results))

    def test_parameters_are_checked(self):
        with DEVICE.init_backend({"n_threads": 1}) as backend:
            assert backend.n_threads == 1
        with pytest.raises(ArgumentError, match=r"unknown parameters \['n_thread'\]; known: n_threads"):
            DEVICE.init_backend({"n_thread": 1})
        with pytest.raises(ArgumentError, match="0 threads"):
            DEVICE.init_backend({"n_threads": 0})


def blas_threads():
    return {p["num_threads"] for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas"}


class TestProcs:
    def test_features_are_pairs_of_text(self):
        features = REG.get_proc_address("ggml_backend_get_features")(REG)
        assert dict(features)["NUMPY"] == np.__version__
        assert "BLAS" in dict(features)
        assert all(isinstance(name, str) and isinstance(value, str) for name, value in features)

    def test_number_of_threads(self, cpu):
        set_n_threads = REG.get_proc_address("set_n_threads")
        for n in (1, 3):
            set_n_threads(cpu, n)
            assert cpu.n_threads == n
        with pytest.raises(ArgumentError, match="give 1 or more"):
            set_n_threads(cpu, 0)

    def test_blas_has_one_thread_while_a_graph_computes(self, cpu):
        seen = []

        def look():
            seen.append(blas_threads())
            raise KeyboardInterrupt

        ctx = Context()
        y = ctx.sqr(ctx.new_tensor(DType.F32, (4,)))
        cpu.abort_callback = look
        with threadpoolctl.threadpool_limits(2), alloc_ctx_tensors(ctx, cpu):
            with pytest.raises(KeyboardInterrupt):
                cpu.graph_compute(Graph().build_forward_expand(y))
            assert seen == [{1}]
            assert blas_threads() == {2}

    def test_two_backends_at_once_leave_blas_as_it_was(self):
        with threadpoolctl.threadpool_limits(2):
            with one_blas_thread:
                with one_blas_thread:
                    pass
                assert blas_threads() == {1}
            assert blas_threads() == {2}

    def test_unknown_ones_are_none(self):
        assert REG.get_proc_address("comm_init") is None


class TestBackend:
    def test_infinities_and_nan_raise_no_warnings(self, cpu):
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (4,))
        y = ctx.soft_max(ctx.log(ctx.sub(ctx.div(x, x), x)))
        with alloc_ctx_tensors(ctx, cpu), warnings.catch_warnings():
            warnings.simplefilter("error")
            x.set_array(np.array([0, np.inf, -1, 1e38]))
            assert cpu.graph_compute(Graph().build_forward_expand(y)) is Status.SUCCESS

    def test_big_nodes_over_threads_compute_the_same(self):
        ctx = Context()
        x = ctx.new_tensor(DType.F16, (512, 1024))
        y = ctx.gelu_erf(ctx.cast(x, DType.F32))
        data = np.random.default_rng(0).standard_normal(x.shape)
        results = []
        for n in (1, 3):
            with DEVICE.init_backend({"n_threads": n}) as cpu, alloc_ctx_tensors(ctx, cpu) as buffer:
                buffer.clear(0xFF)
                x.set_array(data)
                cpu.graph_compute(Graph().build_forward_expand(y))
                results.append(y.to_numpy())
            for t in ctx:
                t.buffer = None
        assert np.array_equal(*results)
        assert np.isfinite(results[0]).all()


class TestThreads:
    def test_lists_run_at_the_same_time(self):
        threads = Threads(3)
        meeting = threading.Barrier(3, timeout=300)
        threads.run([[meeting.wait]] * 3)
        threads.free()

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_every_step_runs_once_and_in_order(self, n):
        threads = Threads(n)
        seen = [[] for _ in range(4)]
        for _ in range(3):
            threads.run([[lambda i=i, j=j: seen[i].append(j) for j in range(50)] for i in range(4)])
        assert seen == [list(range(50)) * 3] * 4
        threads.free()

    @pytest.mark.parametrize("culprit", [0, 1])
    def test_a_failure_surfaces_and_harms_nothing_later(self, culprit):
        threads = Threads(2)

        def fail():
            raise ValueError("bad step")

        done = []
        lists = [[lambda: done.append(0)], [lambda: done.append(1)]]
        lists[culprit] = [fail]
        for _ in range(2):
            with pytest.raises(ValueError, match="bad step"):
                threads.run(lists)
        threads.run([[lambda: done.append(2)]] * 2)
        assert done.count(2) == 2
        threads.free()

    def test_threads_see_no_floating_point_warnings(self):
        threads = Threads(2)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("error")
            threads.run([[lambda: np.log(np.zeros(3, np.float32))]] * 2)
        threads.free()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_threads_start_anew_after_a_fork(self):
        threads = Threads(2)
        threads.run([[int], [int]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking a process that has threads
            child = os.fork()
        if child == 0:
            try:
                threads.run([[int], [int]])
            finally:
                os._exit(0)
        for _ in range(3000):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            threading.Event().wait(0.01)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hung")
        assert status == 0
        threads.free()
