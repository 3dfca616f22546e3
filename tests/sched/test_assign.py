"""Which backend each node goes to, and the cause that is given for it."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import ArgumentError, GraphError, UnsupportedOpError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.compile.assign import AssignRules
from ggmlb.runtime.compile.read import IndexedGraph
from ggmlb.runtime.scheduler import Cause, Scheduler
from ggmlb.testing.fake import FakeBackend, FakeReg
from tests.support.chain import new_input

F32 = DType.F32


def causes(sched: Scheduler) -> dict[str, tuple[str, Cause]]:
    return {p.node: (p.device, p.cause) for p in sched.placement}


def test_nodes_run_where_their_weights_are_and_the_rest_follows(bench):
    ctx = Context()
    x = new_input(ctx, 8, 2)
    a = ctx.set_name(ctx.mul_mat(bench.weight(bench.gpu0, 8, 8), x), "a")
    b = ctx.set_name(ctx.silu(a), "b")
    c = ctx.set_name(ctx.mul_mat(bench.weight(bench.gpu1, 8, 8), b), "c")
    d = ctx.set_name(ctx.scale(c, 2.0), "d")
    graph = Graph().build_forward_expand(d)
    with Scheduler(bench.backends) as sched:
        sched.split_graph(graph)
        assert causes(sched) == {
            "a": ("Fake0", Cause.WEIGHT),
            "b": ("Fake0", Cause.NEIGHBOUR),
            "c": ("Fake1", Cause.WEIGHT),
            "d": ("Fake1", Cause.NEIGHBOUR),
        }
        assert [[i.tensor.name for i in s.inputs] for s in sched.splits] == [["x"], ["b"]]
        assert sched.get_tensor_backend(x) is bench.cpu


def test_without_weights_the_first_neighbours_decide_and_inputs_stay_on_the_last_backend(bench):
    ctx = Context()
    x = new_input(ctx, 4)
    y = ctx.scale(ctx.silu(x), 3.0)
    with Scheduler(bench.backends) as sched:
        sched.split_graph(Graph().build_forward_expand(y))
        # Nothing is placed and no user asked: the backend that reads most operands in place is the CPU.
        assert {p.device for p in sched.placement} == {"CPU"}
        assert sched.get_tensor_backend(x) is bench.cpu


def test_a_computed_input_runs_where_its_op_does(make_bench):
    bench = make_bench(FakeReg(2, declines=lambda t: "no kernel for silu" if t.op is Op.UNARY else None))
    ctx = Context()
    y = ctx.set_input(ctx.silu(ctx.sqr(new_input(ctx, 4))))
    with Scheduler([bench.cpu, bench.gpu0]) as sched:
        sched.split_graph(Graph().build_forward_expand(y))
        assert sched.get_tensor_backend(y) is bench.cpu


def test_a_device_that_declines_an_op_hands_it_on_and_the_reason_is_kept(make_bench):
    bench = make_bench(FakeReg(2, declines=lambda t: "no kernel for silu" if t.op is Op.UNARY else None))
    ctx = Context()
    x = new_input(ctx, 8, 2)
    a = ctx.mul_mat(bench.weight(bench.gpu0, 8, 8), x)
    b = ctx.set_name(ctx.silu(a), "b")
    c = ctx.mul_mat(bench.weight(bench.gpu0, 8, 8), b)
    with Scheduler(bench.backends) as sched:
        sched.split_graph(Graph().build_forward_expand(c))
        assert [s.backend.name for s in sched.splits] == ["Fake0", "CPU", "Fake0"]
        (record,) = (p for p in sched.placement if p.node == "b")
        assert record.rejected == {"Fake0": "no kernel for silu", "Fake1": "no kernel for silu"}
        assert record.copies == ("CPU",) or len(record.copies) == 1
        assert "no kernel for silu" in str(sched)


def test_an_op_that_nobody_runs_names_every_refusal(make_bench):
    bench = make_bench(FakeReg(2, declines=lambda t: "fakes decline all"))
    ctx = Context()
    y = ctx.set_name(ctx.silu(new_input(ctx, 4)), "y")
    with Scheduler([bench.gpu0, bench.gpu1]) as sched:
        with pytest.raises(
            UnsupportedOpError, match=r"no device can run SILU f32\[4\] \(node 'y'\)"
        ) as error:
            sched.alloc_graph(Graph().build_forward_expand(y))
        assert error.value.reasons == {"Fake0": "fakes decline all", "Fake1": "fakes decline all"}
        assert "Fake1: fakes decline all" in str(error.value)


def test_a_users_request_is_followed_and_survives_reserve_and_reset(bench):
    ctx = Context()
    y = ctx.scale(ctx.silu(new_input(ctx, 4)), 3.0)
    graph = Graph().build_forward_expand(y)
    with Scheduler(bench.backends) as sched:
        sched.set_tensor_backend(y, bench.gpu1)
        sched.reserve(graph)
        sched.reset()
        sched.split_graph(graph)
        assert sched.placement[-1].device == "Fake1"
        assert sched.placement[-1].cause is Cause.USER
        sched.set_tensor_backend(y, None)
        sched.split_graph(graph)
        assert sched.placement[-1].device == "CPU"
        with pytest.raises(ArgumentError, match="not one of this scheduler's backends"):
            sched.set_tensor_backend(y, FakeReg(1).devices[0].init_backend())


def test_a_request_that_cannot_be_followed_warns_or_if_strict_raises(make_bench):
    bench = make_bench(FakeReg(2, declines=lambda t: "no silu" if t.op is Op.UNARY else None))
    ctx = Context()
    y = ctx.silu(new_input(ctx, 4))
    graph = Graph().build_forward_expand(y)
    with Scheduler(bench.backends) as sched:
        sched.set_tensor_backend(y, bench.gpu0)
        with pytest.warns(RuntimeWarning, match="Fake0, which the user asked for: no silu"):
            sched.split_graph(graph)
        assert sched.placement[0].device == "CPU"
    with Scheduler(bench.backends, strict=True) as sched:
        sched.set_tensor_backend(y, bench.gpu0)
        with pytest.raises(UnsupportedOpError, match="no silu"):
            sched.split_graph(graph)


def test_a_weight_whose_device_declines_the_op_warns_or_if_strict_raises(make_bench):
    bench = make_bench(FakeReg(2, declines=lambda t: "no product" if t.op is Op.MUL_MAT else None))
    ctx = Context()
    y = ctx.mul_mat(bench.weight(bench.gpu0, 4, 4), new_input(ctx, 4, 2))
    graph = Graph().build_forward_expand(y)
    with Scheduler(bench.backends) as sched:
        with pytest.warns(RuntimeWarning, match="Fake0, which holds its weight: no product"):
            sched.split_graph(graph)
        assert [i.tensor.name for s in sched.splits for i in s.inputs] == ["w"]
    with (
        Scheduler(bench.backends, strict=True) as sched,
        pytest.raises(UnsupportedOpError, match="no product"),
    ):
        sched.split_graph(graph)


def test_a_view_alone_takes_its_source_along(bench):
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(F32, 8, "x"))
    y = ctx.new_tensor(F32, 8, "y")
    left, right = ctx.view_1d(x, 4, 16), ctx.view_1d(y, 4, 16)
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(Graph([left, right]))  # with leafs that nobody listed
        for leaf in (x, y):
            leaf.set_array(np.arange(8))
            assert sched.get_tensor_backend(leaf) is bench.cpu
        assert left.to_numpy().tolist() == right.to_numpy().tolist() == [4, 5, 6, 7]


def test_a_node_that_writes_into_a_tensor_runs_where_the_tensor_is(make_bench):
    # ggml lets the write happen on the other device, where it never reaches the tensor.
    bench = make_bench(FakeReg(2, declines=lambda t: "no scale" if t.op is Op.SCALE else None))
    ctx = Context()
    x = new_input(ctx, 4, 3)
    base = ctx.set_name(ctx.scale(x, 2.0), "base")  # on the CPU: the fakes decline it
    rows = new_input(ctx, 4, 1, name="rows")
    where = ctx.set_input(ctx.new_tensor(DType.I64, (1,), name="where"))
    written = ctx.set_rows(base, rows, where)
    y = ctx.set_output(ctx.mul_mat(bench.weight(bench.gpu0, 4, 4), written))
    graph = Graph().build_forward_expand(y)
    with Scheduler(bench.backends) as sched:
        sched.set_tensor_backend(written, bench.gpu0)
        with pytest.warns(RuntimeWarning, match="must be on one device: CPU"):
            sched.alloc_graph(graph)
        assert sched.get_tensor_backend(written) is bench.cpu
        x.set_array(np.ones((3, 4)))
        rows.set_array(np.full((1, 4), 7.0))
        where.set_array(np.array([1]))
        sched.graph_compute(graph)
        expected = np.full((3, 4), 2.0, np.float32)
        expected[1] = 7
        w = y.src[0].to_numpy()
        np.testing.assert_allclose(y.to_numpy(), expected @ w.T, rtol=1e-5)
    with Scheduler(bench.backends, strict=True) as sched:
        sched.set_tensor_backend(written, bench.gpu0)
        with pytest.raises(GraphError, match=", too, or to none"):
            sched.alloc_graph(graph)


def test_a_tensor_moves_to_the_device_that_can_also_write_into_it(make_bench):
    bench = make_bench(FakeReg(2, declines=lambda t: "no scale" if t.op is Op.SCALE else None))
    ctx = Context()
    x = new_input(ctx, 4)
    base = ctx.silu(x)
    y = ctx.set_output(ctx.scale_inplace(base, 3.0))
    graph = Graph().build_forward_expand(y)
    with Scheduler(bench.backends) as sched:
        sched.set_tensor_backend(base, bench.gpu0)
        with pytest.warns(RuntimeWarning, match="SILU"):
            sched.alloc_graph(graph)
        assert sched.get_tensor_backend(base) is bench.cpu
        x.set_array(np.ones(4))
        sched.graph_compute(graph)
        np.testing.assert_allclose(y.to_numpy(), np.full(4, 3 / (1 + np.exp(-1))), rtol=1e-6)


def test_a_write_into_memory_whose_device_declines_it_is_an_error(make_bench):
    def declines(t: Tensor) -> str | None:
        return "no set_rows" if t.op is Op.SET_ROWS else None

    bench = make_bench(FakeReg(2, declines=declines))
    ctx = Context()
    cache = bench.weight(bench.gpu0, 4, 8, name="cache")
    rows = new_input(ctx, 4, 1, name="rows")
    where = ctx.set_input(ctx.new_tensor(DType.I64, (1,), name="where"))
    y = ctx.set_rows(cache, rows, where)
    with (
        Scheduler(bench.backends) as sched,
        pytest.raises(UnsupportedOpError, match=r"is in a Fake0 buffer, and no backend(.|\n)*no set_rows"),
    ):
        sched.alloc_graph(Graph().build_forward_expand(y))


@pytest.mark.parametrize("offload", [True, False])
def test_a_device_may_take_an_op_although_its_weights_are_in_host_memory(make_bench, monkeypatch, offload):
    bench = make_bench(FakeReg(2))
    monkeypatch.setattr(type(bench.gpu0.device), "offload_op", lambda self, op: op.op is Op.MUL_MAT)
    ctx = Context()
    y = ctx.mul_mat(bench.weight(bench.cpu, 8, 8), new_input(ctx, 8, 2))
    with Scheduler(bench.backends, op_offload=offload) as sched:
        sched.split_graph(Graph().build_forward_expand(y))
        assert sched.placement[0].device == ("Fake0" if offload else "CPU")
        assert sched.placement[0].cause is (Cause.OFFLOAD if offload else Cause.WEIGHT)


def test_two_backends_of_the_same_memory_the_higher_priority_takes_what_it_runs(make_bench):
    bench = make_bench(FakeReg(2))
    other = bench.stack.enter_context(bench.gpu0.device.init_backend())
    ctx = Context()
    y = ctx.silu(ctx.mul_mat(bench.weight(bench.gpu0, 8, 8), new_input(ctx, 8, 2)))
    with Scheduler([other, bench.gpu0, bench.cpu]) as sched:
        sched.set_tensor_backend(y, bench.gpu0)
        sched.split_graph(Graph().build_forward_expand(y))
        assert sched.get_tensor_backend(y) is other
        assert sched.placement[-1].cause is Cause.UPGRADE


def test_the_backend_list_is_checked():
    with pytest.raises(ArgumentError, match="at least one backend"):
        Scheduler([])
    reg = FakeReg(2)
    with reg.devices[0].init_backend() as backend:
        assert isinstance(backend, FakeBackend)
        with pytest.raises(ArgumentError, match="Fake0 cannot use Fake1 memory"):
            Scheduler([backend], [reg.devices[1].buffer_type])
        with pytest.raises(ArgumentError, match="1 backends, but 2 buffer types"):
            Scheduler([backend], [reg.devices[0].buffer_type] * 2)


def test_a_device_is_asked_once_for_nodes_that_differ_only_in_place(make_bench):
    asked: list[str] = []
    bench = make_bench(FakeReg(2, declines=lambda t: asked.append(t.name)))
    weights = [bench.weight(bench.gpu0, 8, 8) for _ in range(3)]

    def graph(ctx: Context, factor: float, n: int) -> Graph:
        x = new_input(ctx, 8, n)
        for i, w in enumerate(weights):
            x = ctx.set_name(ctx.scale(ctx.set_name(ctx.mul_mat(w, x), f"product{i}"), factor), f"scaled{i}")
        return Graph().build_forward_expand(x)

    with Scheduler([bench.gpu0, bench.cpu]) as sched:
        for factor, n, new in (
            (2.0, 2, {"product0", "product1", "scaled0"}),  # the first product reads an input
            (3.0, 2, {"product1", "scaled0"}),  # which reads a result of another factor
            (2.0, 4, {"product0", "product1", "scaled0"}),
            (3.0, 2, set()),
        ):
            asked.clear()
            sched.split_graph(graph(Context(), factor, n))
            assert sorted(asked) == sorted(new)
            assert {p.device for p in sched.placement} == {"Fake0"}


def test_answers_about_custom_functions_keep_none_alive(bench):
    ctx = Context()
    x = new_input(ctx, 4)

    def double(dst: np.ndarray, a: np.ndarray, ith: int, nth: int, userdata: object) -> None:
        dst[:] = 2 * a

    y = ctx.map_custom1(x, double, 1, None)
    rules = AssignRules([bench.cpu], [bench.cpu.default_buffer_type])
    indexed = IndexedGraph(Graph().build_forward_expand(y))
    indexed.keep()
    first, second = rules.kinds(indexed), rules.kinds(indexed)
    assert set(first).isdisjoint(second)
    assert not rules._kinds
