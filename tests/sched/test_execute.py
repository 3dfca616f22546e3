"""Computing split graphs: right values, right order, right copies."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.enums import Status
from ggmlb.core.errors import GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.system import env
from ggmlb.testing.fake import FakeReg
from tests.support.chain import new_input


@pytest.mark.parametrize("async_copies", [True, False])
@pytest.mark.parametrize("events", [True, False])
def test_a_user_may_overwrite_an_input_as_soon_as_the_call_returns(make_bench, async_copies, events):
    bench = make_bench(FakeReg(2, async_copies=async_copies, events=events))
    chain = bench.chain()
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(chain.graph)
        chain.x.set_array(x)
        sched.graph_compute_async(chain.graph)
        chain.x.set_array(np.full((3, 8), 99.0))
        sched.synchronize()
        np.testing.assert_allclose(chain.y.to_numpy(), chain.expected(x), rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(
    env.flag("GGMLB_SANITIZE", default=False), reason="the sanitizer refuses what this test does"
)
def test_a_fake_device_shows_a_forgotten_wait(bench):
    # The instrument itself: without synchronize the result is still poison.
    chain = bench.chain()
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(chain.graph)
        chain.x.set_array(np.ones((3, 8)))
        sched.graph_compute_async(chain.graph)
        assert np.isnan(chain.y.to_numpy()).all()


def test_the_users_graph_stays_as_it_is_and_serves_several_schedulers(bench):
    chain = bench.chain()
    before = [(n, n.src) for n in chain.graph.nodes]
    x = np.random.default_rng(4).standard_normal((3, 8)).astype(np.float32)
    with Scheduler(bench.backends) as a, Scheduler(bench.backends[::-1]) as b:
        for sched in (a, b, a):
            sched.alloc_graph(chain.graph)
            chain.x.set_array(x)
            sched.graph_compute(chain.graph)
            np.testing.assert_allclose(chain.y.to_numpy(), chain.expected(x), rtol=2e-5, atol=1e-6)
            assert [(n, n.src) for n in chain.graph.nodes] == before


def test_computing_a_graph_that_another_scheduler_has_taken_is_an_error(bench):
    chain = bench.chain()
    with Scheduler(bench.backends) as a, Scheduler(bench.backends) as b:
        a.alloc_graph(chain.graph)
        b.alloc_graph(chain.graph)
        chain.x.set_array(np.ones((3, 8)))
        with pytest.raises(GraphError, match="call alloc_graph again"):
            a.graph_compute(chain.graph)
        b.graph_compute(chain.graph)


def test_a_parameter_changed_after_planning_is_seen(bench):
    ctx = Context()
    x = new_input(ctx, 4, 4)
    q = ctx.mul_mat(bench.weight(bench.gpu0, 4, 4), x)
    p = ctx.soft_max_ext(q, None, 1.0, 0.0)
    graph = Graph().build_forward_expand(p)
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(graph)
        x.set_array(np.ones((4, 4)))
        sched.graph_compute(graph)
        plain = p.to_numpy()
        ctx.soft_max_add_sinks(p, bench.weight(bench.gpu0, 1, name="sinks"))
        with pytest.raises(GraphError, match="moved or changed"):
            sched.graph_compute(graph)
        sched.alloc_graph(graph)
        x.set_array(np.ones((4, 4)))
        sched.graph_compute(graph)
        assert (p.to_numpy() < plain).all()


def test_many_inputs_of_one_split(bench):
    ctx = Context()
    xs = [new_input(ctx, 4, name=f"x{i}") for i in range(1000)]
    y = ctx.mul(xs[0], bench.weight(bench.gpu0, 4))
    for x in xs[1:]:
        y = ctx.add(y, x)
    graph = Graph().build_forward_expand(y)
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(graph)
        assert [len(s.inputs) for s in sched.splits] == [1000]
        for i, x in enumerate(xs):
            x.set_array(np.full(4, i))
        sched.graph_compute(graph)
        np.testing.assert_allclose(y.to_numpy(), np.full(4, sum(range(1, 1000))))


def test_the_eval_callback_sees_the_nodes_it_asks_for_and_can_stop(bench):
    chain = bench.chain()
    x = np.random.default_rng(5).standard_normal((3, 8)).astype(np.float32)
    seen = {}

    def callback(node: Tensor, ask: bool) -> bool:
        if ask:
            return node.name.startswith("y")
        seen[node.name] = node.to_numpy()
        return node.name != "y2"

    with Scheduler(bench.backends) as sched:
        sched.set_eval_callback(callback)
        sched.alloc_graph(chain.graph)
        chain.x.set_array(x)
        assert sched.graph_compute(chain.graph) is Status.ABORTED
        assert list(seen) == ["y0", "y1", "y2"]
        for i in range(3):
            np.testing.assert_allclose(seen[f"y{i}"], chain.expected(x, i + 1), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("call", ["graph_compute", "alloc_graph", "split_graph", "reserve", "reserve_size"])
def test_a_callback_does_not_take_the_memory_from_under_its_computation(bench, call):
    chain, small, other = bench.chain(), bench.chain(2), bench.chain(3)
    x = np.random.default_rng(6).standard_normal((3, 8)).astype(np.float32)
    refused = []

    def callback(node: Tensor, ask: bool) -> bool:
        if not ask and node.name == "y1":
            for again in (chain, small):
                with pytest.raises(GraphError, match="in the middle of a computation") as error:
                    getattr(sched, call)(again.graph)
                refused.append(error)
            with pytest.raises(GraphError, match="free: this Scheduler is in the middle"):
                sched.free()
            with Scheduler(bench.backends) as another:
                another.graph_compute(other.graph)
        return True

    def compute() -> None:
        chain.x.set_array(x)
        sched.graph_compute(chain.graph)
        np.testing.assert_allclose(chain.y.to_numpy(), chain.expected(x), rtol=2e-5, atol=1e-6)

    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(chain.graph)
        sched.set_eval_callback(callback)
        compute()
        assert len(refused) == 2
        sched.set_eval_callback(lambda node, ask: 1 // 0 > 0)
        with pytest.raises(ZeroDivisionError):
            compute()
        sched.set_eval_callback(None)
        compute()


@pytest.mark.parametrize("where", [1, 2])
@pytest.mark.parametrize("reader", [None, 0, 1, 2])
def test_a_view_lies_where_its_source_does_whatever_it_was_set_to(bench, where, reader):
    ctx = Context()
    x = new_input(ctx, 8, 4)
    view = ctx.reshape_2d(ctx.mul_mat(bench.weight(bench.gpu0, 8, 8), x), 4, 8)
    y = ctx.sqr(view)
    data = np.random.default_rng(6).standard_normal((4, 8)).astype(np.float32)
    with Scheduler(bench.backends) as sched:
        sched.set_tensor_backend(view, bench.backends[where])
        sched.set_tensor_backend(y, None if reader is None else bench.backends[reader])
        graph = Graph().build_forward_expand(y)
        sched.alloc_graph(graph)
        x.set_array(data)
        sched.graph_compute(graph)
        w = next(n for n in graph.leafs if n.name == "w").to_numpy()
        np.testing.assert_allclose(y.to_numpy().reshape(4, 8), (data @ w.T) ** 2, rtol=2e-5, atol=1e-6)
        assert sched.get_tensor_backend(view) is bench.gpu0


@pytest.mark.parametrize("n_backends", [1, 2])
@pytest.mark.parametrize("use", ["whole", "view", "transposed"])
def test_memory_of_a_device_that_takes_no_part_is_read_through_a_copy(bench, n_backends, use):
    data = np.random.default_rng(6).standard_normal((3, 4)).astype(np.float32)
    own = Context()
    elsewhere = own.new_tensor("f32", (4, 3), name="elsewhere")
    with alloc_ctx_tensors(own, bench.gpu0), Scheduler([bench.gpu1, bench.cpu][-n_backends:]) as sched:
        ctx = Context()
        read = {
            "whole": elsewhere, "view": ctx.view_2d(elsewhere, 2, 3, elsewhere.nb[1], 8),
            "transposed": ctx.transpose(elsewhere),
        }[use]  # fmt: skip
        y = ctx.add(ctx.sqr(ctx.cont(read)), read)
        sched.set_tensor_backend(y, bench.cpu)
        graph = Graph().build_forward_expand(y)
        for sign in (1, -1):
            elsewhere.set_array(sign * data)
            sched.graph_compute(graph)
            seen = sign * {"whole": data, "view": data[:, 2:], "transposed": data.T}[use]
            np.testing.assert_allclose(y.to_numpy(), seen**2 + seen, rtol=1e-6)
