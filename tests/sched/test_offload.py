"""Weights that lie elsewhere: placed by pattern, and copied for ops that are offloaded."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage, Op, Status
from ggmlb.core.errors import AllocationError, ArgumentError, BackendError, SanitizerError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors, alloc_ctx_tensors_size
from ggmlb.runtime.compile.assign import Cause
from ggmlb.runtime.scheduler import Scheduler, execute
from ggmlb.testing.fake import FakeBackend, FakeReg

N_EXPERTS, WIDTH = 8, 4


@pytest.fixture
def offloading(make_bench, monkeypatch):
    """A bench whose GPUs find every product worth copying its weights."""
    bench = make_bench(FakeReg(2))
    products = (Op.MUL_MAT, Op.MUL_MAT_ID)
    monkeypatch.setattr(type(bench.gpu0.device), "offload_op", lambda self, op: op.op in products)
    return bench


class Uploads:
    """The byte ranges that a stream is asked to write."""

    def __init__(self, monkeypatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        whole = FakeBackend._set_tensor_async

        def note(backend, tensor, data, offset):
            self.ranges.append((tensor.name.partition("#")[2], offset, offset + data.size))
            whole(backend, tensor, data, offset)

        monkeypatch.setattr(FakeBackend, "_set_tensor_async", note)

    def of(self, name: str) -> list[tuple[int, int]]:
        """Ranges written in the copies of a tensor, in experts."""
        size = WIDTH * WIDTH * 4
        return [(a // size, b // size) for n, a, b in self.ranges if n == name]


class Experts:
    """`y = down[ids] (up[ids] x)`, the ids as given, or computed by a router on the device."""

    def __init__(self, bench, *, routed: bool = False) -> None:
        self.up = bench.weight(bench.cpu, WIDTH, WIDTH, N_EXPERTS, name="up")
        self.down = bench.weight(bench.cpu, WIDTH, WIDTH, N_EXPERTS, name="down")
        c = Context()
        self.x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 1, 3), name="x"))
        self.ids = c.set_input(c.new_tensor(DType.I32, (2, 3), name="ids"))
        ids = self.ids
        if routed:
            self.scores = c.set_input(c.new_tensor(DType.F32, (N_EXPERTS, 3), name="scores"))
            gate = bench.weight(bench.gpu0, N_EXPERTS, 3, name="gate")
            gate.set_array(np.ones((3, N_EXPERTS)))
            ids = c.top_k(c.mul(self.scores, gate), 2)
        h = c.mul_mat_id(self.up, self.x, ids)
        self.y = c.set_output(c.mul_mat_id(self.down, h, ids))
        self.graph = Graph().build_forward_expand(self.y)

    def expected(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        up, down = self.up.to_numpy()[ids], self.down.to_numpy()[ids]
        return np.einsum("teij,tej->tei", down, np.einsum("teij,tj->tei", up, x[:, 0]))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ([[0, 1], [2, 1], [5, 0]], [(0, 3), (5, 6)]),
        ([[7, 7], [7, 7], [7, 7]], [(7, 8)]),
        ([[0, 7], [2, 4], [6, 3]], [(0, 1), (2, 5), (6, 8)]),
        ([[0, 1], [2, 3], [4, 5]], [(0, 6)]),
    ],
)
def test_only_the_experts_in_use_are_copied_in_runs(offloading, monkeypatch, parallel, ids, runs):
    experts = Experts(offloading)
    uploads = Uploads(monkeypatch)
    x = np.random.default_rng(0).standard_normal((3, 1, WIDTH)).astype(np.float32)
    with Scheduler(offloading.backends, parallel=parallel) as sched:
        sched.alloc_graph(experts.graph)
        assert [p.cause for p in sched.placement] == [Cause.OFFLOAD] * 2
        for _ in range(3):
            uploads.ranges.clear()
            experts.x.set_array(x)
            experts.ids.set_array(np.array(ids))
            sched.graph_compute(experts.graph)
            assert uploads.of("up") == uploads.of("down") == runs
            np.testing.assert_allclose(
                experts.y.to_numpy(), experts.expected(x, np.array(ids)), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("parallel", [False, True])
def test_a_callback_may_copy_weights_itself(offloading, monkeypatch, parallel):
    """It copies half of the experts of `down`, all that are used; the scheduler copies `up`."""
    experts = Experts(offloading)
    uploads = Uploads(monkeypatch)
    x, ids = np.ones((3, 1, WIDTH), np.float32), np.array([[0, 1], [2, 1], [3, 0]])
    asked = []

    def callback(backend, weight, copy, graph):
        asked.append((weight.name, any(copy in node.src for node in graph.nodes)))
        assert backend is offloading.backends[0] and weight.buffer.is_host
        if weight is not experts.down:
            return False
        backend.set_tensor_async(copy, weight.get()[: weight.nbytes // 2])
        return True

    with Scheduler(offloading.backends, parallel=parallel) as sched:
        sched.set_copy_callback(callback)
        sched.alloc_graph(experts.graph)
        for _ in range(3):
            uploads.ranges.clear()
            asked.clear()
            experts.x.set_array(x)
            experts.ids.set_array(ids)
            sched.graph_compute(experts.graph)
            assert sorted(asked) == [("down", True), ("up", True)]
            assert uploads.of("down") == [(0, N_EXPERTS // 2)] and uploads.of("up") == [(0, 4)]
            np.testing.assert_allclose(experts.y.to_numpy(), experts.expected(x, ids), rtol=1e-5, atol=1e-6)
        sched.set_copy_callback(None)
        asked.clear()
        sched.graph_compute(experts.graph)
        assert not asked
        with pytest.raises(ArgumentError, match="callback"):
            sched.set_copy_callback(7)


def test_ids_that_the_device_computes_are_waited_for_once(offloading, monkeypatch):
    experts = Experts(offloading, routed=True)
    uploads = Uploads(monkeypatch)
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 1, WIDTH)).astype(np.float32)
    with Scheduler(offloading.backends) as sched:
        sched.alloc_graph(experts.graph)
        for _ in range(3):
            uploads.ranges.clear()
            scores = random.standard_normal((3, N_EXPERTS)).astype(np.float32)
            experts.x.set_array(x)
            experts.scores.set_array(scores)
            sched.graph_compute(experts.graph)
            ids = np.argsort(-scores, axis=1)[:, :2]
            assert {e for a, b in uploads.of("up") for e in range(a, b)} == set(ids.flat)
            got = np.sort(experts.y.to_numpy(), axis=1)  # top_k gives no order
            np.testing.assert_allclose(got, np.sort(experts.expected(x, ids), axis=1), rtol=1e-5, atol=1e-6)


def test_a_weight_that_others_read_too_is_copied_whole(offloading, monkeypatch):
    # ggml copies the experts of the first reader, and the second one reads what it finds.
    experts = Experts(offloading)
    c = Context()
    other = c.set_input(c.new_tensor(DType.I32, (2, 3), name="other"))
    z = c.set_output(c.mul_mat_id(experts.up, experts.x, other))
    experts.graph.build_forward_expand(z)
    uploads = Uploads(monkeypatch)
    x = np.random.default_rng(0).standard_normal((3, 1, WIDTH)).astype(np.float32)
    with Scheduler(offloading.backends) as sched:
        sched.alloc_graph(experts.graph)
        experts.x.set_array(x)
        experts.ids.set_array(np.zeros((3, 2)))
        other.set_array(np.full((3, 2), 5))
        sched.graph_compute(experts.graph)
        assert uploads.of("up") == [(0, N_EXPERTS)]
        assert uploads.of("down") == [(0, 1)]
        expected = np.einsum("ij,tj->ti", experts.up.to_numpy()[5], x[:, 0])
        np.testing.assert_allclose(z.to_numpy()[:, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", ["before", "between"])
def test_experts_whose_ids_the_graph_writes_are_copied_whole(offloading, changed):
    """The ids are read before the split runs, once for all weights; here they change after that."""
    c, random = Context(), np.random.default_rng(0)
    ids, other = c.new_tensor(DType.I32, (2, 3)), c.new_tensor(DType.I32, (2, 3))
    x = c.new_tensor(DType.F32, (WIDTH, 1, 3))
    offloading.stack.enter_context(alloc_ctx_tensors(c, offloading.gpu0))
    up, down = (offloading.weight(offloading.cpu, WIDTH, WIDTH, N_EXPERTS, name=n) for n in ("up", "down"))
    d, graph = Context(), Graph()
    if changed == "between":
        h = d.mul_mat_id(up, x, ids)
        graph.build_forward_expand(h).build_forward_expand(d.cpy(other, ids))
        y = d.mul_mat_id(down, h, ids)
    else:
        y = d.mul_mat_id(down, x, d.concat(d.view_2d(ids, 1, 3, ids.nb[1], 0), other, 0))
    graph.build_forward_expand(d.set_output(y))
    with Scheduler(offloading.backends) as sched:
        sched.alloc_graph(graph)
        first, then = random.integers(0, 4, (3, 2)), random.integers(4, N_EXPERTS, (3, 2))
        ids.set_array(first)
        other.set_array(then)
        x.set_array(random.standard_normal((3, 1, WIDTH)).astype(np.float32))
        sched.graph_compute(graph)
        if changed == "between":
            h_of = np.einsum("teij,tj->tei", up.to_numpy()[first], x.to_numpy()[:, 0])
        else:
            then = np.concatenate([first[:, :1], then], 1)
            h_of = x.to_numpy()
        expected = np.einsum(
            "teij,tej->tei", down.to_numpy()[then], np.broadcast_to(h_of, (*then.shape, WIDTH))
        )
        np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, N_EXPERTS])
def test_an_id_without_an_expert_is_an_error(offloading, bad):
    experts = Experts(offloading)
    with Scheduler(offloading.backends) as sched:
        sched.alloc_graph(experts.graph)
        experts.x.set_array(np.zeros((3, 1, WIDTH)))
        experts.ids.set_array(np.array([[0, 1], [bad, 1], [2, 3]]))
        with pytest.raises(BackendError, match=f"holds {bad}, but there are 8 experts"):
            sched.graph_compute(experts.graph)


def test_offloaded_weights_share_memory_one_after_another(offloading):
    c = Context()
    y = c.set_input(c.new_tensor(DType.F32, (64, 1), name="x"))
    for i in range(10):
        y = c.mul_mat(offloading.weight(offloading.cpu, 64, 64, name=f"w{i}"), y)
    graph = Graph().build_forward_expand(c.set_output(y))
    with Scheduler(offloading.backends, parallel=True) as sched:
        sizes = sched.reserve_size(graph)
        sched.alloc_graph(graph)
        assert [len(s.inputs) for s in sched.splits] == [2] + [1] * 9
        assert sched.buffer_size(offloading.gpu0) == sizes[0] < 3 * 64 * 64 * 4


@pytest.fixture
def prefetching(make_bench, monkeypatch):
    """As `offloading`, with pinned memory."""
    bench = make_bench(FakeReg(1, host_buffer=True))
    monkeypatch.setattr(type(bench.reg.devices[0]), "offload_op", lambda self, op: op.op is Op.MUL_MAT)
    return bench


def products(bench, n_layers: int) -> tuple[Tensor, Tensor, Graph, list[Tensor]]:
    """`x + w x`, `n_layers` times, with weights in host memory."""
    c = Context()
    weights = [bench.weight(bench.cpu, 64, 64, name=f"w{i}") for i in range(n_layers)]
    x = y = c.set_input(c.new_tensor(DType.F32, (64, 3), name="x"))
    for w in weights:
        y = c.add(c.mul_mat(w, y), y)
    return x, c.set_output(y), Graph().build_forward_expand(y), weights


@pytest.mark.parametrize("parallel", [False, True])
def test_the_next_weight_is_uploaded_while_a_split_computes(prefetching, monkeypatch, parallel, sanitizer):
    uploads = Uploads(monkeypatch)
    x, y, graph, weights = products(prefetching, 6)
    random = np.random.default_rng(1)
    with Scheduler([prefetching.gpu0, prefetching.cpu], parallel=parallel) as sched:
        sched.alloc_graph(graph)
        assert [[i.tensor.name for i in s.next_weights] for s in sched.splits] == [
            [f"w{i}"] for i in range(1, 6)
        ] + [[]]
        for _ in range(3):
            data = random.standard_normal((3, 64), np.float32)
            x.set(data)
            sched.graph_compute(graph)
            for w in weights:
                data = data + data @ w.to_numpy().T
            np.testing.assert_allclose(y.to_numpy(), data, rtol=1e-4, atol=1e-3)
        assert [name for name, *_ in uploads.ranges if name != "x"] == [f"w{i}" for i in range(6)] * 3
        assert 3 * 64 * 64 * 4 > sched.buffer_size(prefetching.gpu0) > 2 * 64 * 64 * 4  # of two weights
    calls = [call for call in prefetching.reg.calls if "event" not in call]
    assert len(calls) == 3 * (1 + 6 + 6)


@pytest.mark.parametrize("left_out", ["begin", "wait"])
def test_uploads_of_weights_are_ordered_on_both_sides(prefetching, monkeypatch, left_out):
    """Without one of the waits, the sanitizer finds a copy or a read that may be too early."""
    x, _, graph, _ = products(prefetching, 6)
    monkeypatch.setattr(execute.Uploads, left_out, lambda self: None)
    with Scheduler([prefetching.gpu0, prefetching.cpu], sanitize=True) as sched:
        sched.alloc_graph(graph)
        x.set(np.ones((3, 64), np.float32))
        with pytest.raises(SanitizerError):
            sched.graph_compute(graph)


def test_after_a_stopped_computation_weights_are_uploaded_anew(prefetching):
    x, y, graph, weights = products(prefetching, 6)
    with Scheduler([prefetching.gpu0, prefetching.cpu]) as sched:
        sched.alloc_graph(graph)
        x.set(np.ones((3, 64), np.float32))
        sched.set_eval_callback(lambda node, ask: ask == (node is graph.nodes[2]))
        assert sched.graph_compute(graph) is Status.ABORTED
        ran = [call for call in prefetching.reg.calls if "writes" in call]
        assert {call.rpartition("#")[2] for call in ran} == {"x", "w0", "w1"}
        sched.set_eval_callback(None)
        sched.graph_compute(graph)
        data = np.ones((3, 64))
        for w in weights:
            data = data + data @ w.to_numpy().T
        np.testing.assert_allclose(y.to_numpy(), data, rtol=1e-4)


def test_weights_are_uploaded_in_order_where_the_device_cannot_prefetch(make_bench, monkeypatch):
    bench = make_bench(FakeReg(1, host_buffer=True, events=False))
    monkeypatch.setattr(type(bench.gpu0.device), "offload_op", lambda self, op: op.op is Op.MUL_MAT)
    _, _, graph, _ = products(bench, 3)
    with Scheduler([bench.gpu0, bench.cpu]) as sched:
        sched.alloc_graph(graph)
        assert not any(split.next_weights for split in sched.splits)


@pytest.mark.parametrize(
    "order", ["GPU, host, CPU", "host, GPU, CPU", "GPU, GPU, host, host, CPU", "GPU, host"]
)
@pytest.mark.parametrize("op_offload", [True, False])
def test_devices_in_the_memory_of_the_cpu_take_no_offload_from_those_before_them(
    offloading, order, op_offload
):
    """Accelerators beside the CPU compute in its memory: their weights are the CPU's, for a GPU to copy."""
    kinds = order.split(", ")
    gpus = iter([offloading.gpu0, offloading.gpu1])
    backends: list[Backend] = []
    for kind in kinds:
        one = {"GPU": lambda: next(gpus), "host": lambda: init_by_name("LLVM")}.get(kind)
        backends.append(offloading.cpu if one is None else one())
        if kind == "host":
            offloading.stack.enter_context(backends[-1])
    c = Context()
    x = c.set_input(c.new_tensor(DType.F32, (64, 2), name="x"))
    w = offloading.weight(offloading.cpu, 64, 64, name="w")
    y = c.set_output(c.mul_mat(w, x))
    graph = Graph().build_forward_expand(y)
    offers = op_offload and kinds[0] == "GPU"
    with Scheduler(backends, op_offload=op_offload) as sched:
        sched.alloc_graph(graph)
        assert sched.get_tensor_backend(y) is (backends[0] if offers else backends[kinds.index("host")])
        assert sched.placement[-1].cause is (Cause.OFFLOAD if offers else Cause.WEIGHT)
        x.set_array(np.ones((2, 64)))
        sched.graph_compute(graph)
        np.testing.assert_allclose(y.to_numpy()[0], w.to_numpy().sum(1), rtol=1e-4, atol=1e-5)


# -- overrides -----------------------------------------------------------------------------------------------


def weights() -> tuple[Context, dict[str, Tensor]]:
    ctx = Context()
    names = [f"blk.{i}.{part}" for i in range(3) for part in ("attn", "ffn_up_exps", "ffn_down_exps")]
    return ctx, {name: ctx.new_tensor(DType.F32, (WIDTH, WIDTH), name) for name in names}


def test_tensors_go_where_the_first_pattern_found_in_their_name_says(bench):
    ctx, tensors = weights()
    view = ctx.view_1d(tensors["blk.1.ffn_up_exps"], 2, 8)
    overrides = {r"blk\.0\.ffn": bench.gpu1, "exps": bench.cpu.default_buffer_type, "ffn": bench.gpu0}
    size = alloc_ctx_tensors_size(ctx, bench.gpu0, overrides)
    with alloc_ctx_tensors(ctx, bench.gpu0, overrides) as buffer:
        buffer.usage = BufferUsage.WEIGHTS
        assert buffer.size == size
        assert {n: t.buffer.name for n, t in tensors.items()} == {
            n: "Fake1" if "0.ffn" in n else "CPU" if "exps" in n else "Fake0" for n in tensors
        }
        assert view.buffer is tensors["blk.1.ffn_up_exps"].buffer
        assert {t.buffer.usage for t in tensors.values()} == {BufferUsage.WEIGHTS}
    assert all(t.buffer.is_freed for t in tensors.values())


def test_overrides_that_fail_leave_nothing(bench):
    ctx, tensors = weights()
    with pytest.raises(ArgumentError, match="is not a regular expression"):
        alloc_ctx_tensors(ctx, bench.gpu0, {"[": bench.cpu})
    bench.gpu1.device.capacity = 0
    before = bench.gpu0.device.n_buffers
    with pytest.raises(AllocationError):
        alloc_ctx_tensors(ctx, bench.gpu0, {"exps": bench.gpu1})
    assert bench.gpu0.device.n_buffers == before
    assert all(t.buffer is None for t in tensors.values())


# -- graph_optimize ------------------------------------------------------------------------------------------


def test_a_backend_may_reorder_its_split_before_it_is_allocated(bench, monkeypatch):
    c = Context()
    x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 2), name="x"))
    w = bench.weight(bench.gpu0, WIDTH, WIDTH)
    a, b = c.mul_mat(w, x), c.mul(bench.weight(bench.gpu0, WIDTH, 2), x)
    y = c.set_output(c.add(a, c.mul_mat(bench.weight(bench.gpu1, WIDTH, WIDTH), c.add(a, b))))
    graph = Graph().build_forward_expand(y)
    seen: list[list[str]] = []

    def reverse_products(backend, part):
        seen.append([n.op_desc() for n in part.nodes])
        assert all(n.buffer is None for n in part.nodes), "it is too late"
        if part.nodes[0].op is Op.MUL_MAT and len(part.nodes) > 2:
            part.nodes[:2] = part.nodes[1::-1]

    monkeypatch.setattr(FakeBackend, "graph_optimize", reverse_products)
    before = list(graph.nodes)
    data = np.random.default_rng(0).standard_normal((2, WIDTH)).astype(np.float32)
    with Scheduler(bench.backends) as sched:
        for _ in range(2):
            sched.alloc_graph(graph)
            x.set_array(data)
            sched.graph_compute(graph)
        first = sched.splits[0]
        assert seen == [
            ["MUL_MAT", "MUL", "ADD"],
            ["MUL_MAT", "ADD"],
        ]  # once, and never for the same topology
        assert [n.op for n in first.plan.nodes] == [Op.MUL, Op.MUL_MAT, Op.ADD]
        assert graph.nodes == before
        p = data @ w.to_numpy().T
        inner = p + data * b.src[0].to_numpy()
        expected = p + inner @ y.src[1].src[0].to_numpy().T
        np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_backend_may_keep_tensors_allocated_until_a_later_node(bench, monkeypatch):
    c = Context()
    x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 2), name="x"))
    w = bench.weight(bench.gpu0, WIDTH, WIDTH)
    chain = [x]
    for _ in range(4):
        chain.append(c.mul_mat(w, chain[-1]))
    graph = Graph().build_forward_expand(c.set_output(chain[-1]))
    kept: list[int] = []

    def keep_first(backend, part):
        for i in kept:
            part.add_alloc_dep(part.nodes[0], part.nodes[i])

    monkeypatch.setattr(FakeBackend, "graph_optimize", keep_first)
    data = np.random.default_rng(0).standard_normal((2, WIDTH)).astype(np.float32)

    def places() -> list[int]:
        with Scheduler(bench.backends) as sched:
            sched.alloc_graph(graph)
            x.set_array(data)
            sched.graph_compute(graph)
            np.testing.assert_allclose(
                chain[-1].to_numpy(), data @ np.linalg.matrix_power(w.to_numpy().T, 4), rtol=1e-4, atol=1e-5
            )
            return [t.offset for t in chain[1:]]

    first, _, third, fourth = places()
    assert third == first, "memory that nothing reads any more is reused"
    kept += [2, 2]  # as in ggml, more than once for one tensor; the longest holds
    first, second, third, fourth = places()
    assert third != first
    assert fourth in (first, second), "it is freed after the node"
    with pytest.raises(ArgumentError, match="is no node of this graph"):
        graph.add_alloc_dep(chain[1], x)
