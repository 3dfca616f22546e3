"""Row numbers and experts out of range: an error that names node and number, and no byte touched outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from ggmlb import (
    Backend,
    BufferUsage,
    Context,
    DType,
    Graph,
    Scheduler,
    init_by_name,
    tensor_alloc,
    view_init,
)
from ggmlb.core.enums import Op, RopeType
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from tests.support.gpus import first

GUARD, BYTE = 1 << 14, 0xA5
"""Bytes around each tensor, and what they hold: more than any row here has."""


class Program(NamedTuple):
    """A node, the indices that it reads, and what they must be below."""

    ctx: Context
    y: Tensor
    ids: Tensor
    n: int


def get_rows(dtype: DType, n: int = 64) -> Program:
    ctx = Context()
    a, ids = ctx.new_tensor(dtype, (n, 5)), ctx.new_tensor(DType.I32, (3,))
    return Program(ctx, ctx.get_rows(a, ids), ids, 5)


def get_rows_of_batch() -> Program:
    ctx = Context()
    a, ids = ctx.new_tensor(DType.F32, (10, 5, 2)), ctx.new_tensor(DType.I32, (3, 2))
    return Program(ctx, ctx.get_rows(a, ids), ids, 5)


def get_rows_back() -> Program:
    ctx = Context()
    a, ids = ctx.new_tensor(DType.F32, (33, 3)), ctx.new_tensor(DType.I32, (3,))
    return Program(ctx, ctx.get_rows_back(a, ids, ctx.new_tensor(DType.F32, (33, 5))), ids, 5)


def set_rows(dtype: DType, index: DType = DType.I64, n: int = 64) -> Program:
    ctx = Context()
    a, b = ctx.new_tensor(dtype, (n, 6)), ctx.new_tensor(DType.F32, (n, 3))
    ids = ctx.new_tensor(index, (3,))
    return Program(ctx, ctx.set_rows(a, b, ids), ids, 6)


def rope_set_rows() -> Program:
    """A key in a cache: one kernel turns it and puts it."""
    ctx = Context()
    x, at = ctx.new_tensor(DType.F32, (32, 4, 3)), ctx.new_tensor(DType.I32, (3,))
    cache, ids = ctx.new_tensor(DType.F16, (128, 7)), ctx.new_tensor(DType.I64, (3,))
    turned = ctx.rope(x, at, 32, RopeType.NEOX)
    rows = ctx.view_2d(turned, 128, 3, turned.nb[2], 0)
    return Program(ctx, ctx.set_rows(cache, rows, ids), ids, 7)


def mul_mat_id(dtype: DType, tokens: int) -> Program:
    ctx = Context()
    w, x = ctx.new_tensor(dtype, (96, 70, 4)), ctx.new_tensor(DType.F32, (96, 2, tokens))
    ids = ctx.new_tensor(DType.I32, (2, tokens))
    return Program(ctx, ctx.mul_mat_id(w, x, ids), ids, 4)


def add_id() -> Program:
    ctx = Context()
    a, b = ctx.new_tensor(DType.F32, (33, 2, 3)), ctx.new_tensor(DType.F32, (33, 4))
    ids = ctx.new_tensor(DType.I32, (2, 3))
    return Program(ctx, ctx.add_id(a, b, ids), ids, 4)


def ssm_scan() -> Program:
    ctx = Context()
    f32 = DType.F32
    state, x = ctx.new_tensor(f32, (8, 16, 2, 5)), ctx.new_tensor(f32, (16, 2, 3, 2))
    dt, a = ctx.new_tensor(f32, (2, 3, 2)), ctx.new_tensor(f32, (8, 2))
    b, c = (ctx.new_tensor(f32, (8, 1, 3, 2)) for _ in "bc")
    ids = ctx.new_tensor(DType.I32, (2,))
    return Program(ctx, ctx.ssm_scan(state, x, dt, a, b, c, ids), ids, 5)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "get_rows f32": lambda: get_rows(DType.F32),
    "get_rows f32, odd": lambda: get_rows(DType.F32, 7),
    "get_rows f16": lambda: get_rows(DType.F16),
    "get_rows q8_0": lambda: get_rows(DType.Q8_0),
    "get_rows q4_K": lambda: get_rows(DType.Q4_K, 512),
    "get_rows batch": get_rows_of_batch,
    "get_rows_back": get_rows_back,
    "set_rows f32": lambda: set_rows(DType.F32),
    "set_rows f16, i32": lambda: set_rows(DType.F16, DType.I32),
    "set_rows f16, odd": lambda: set_rows(DType.F16, DType.I64, 7),
    "set_rows q8_0": lambda: set_rows(DType.Q8_0),
    "rope and set_rows": rope_set_rows,
    "mul_mat_id f32": lambda: mul_mat_id(DType.F32, 3),
    "mul_mat_id f16": lambda: mul_mat_id(DType.F16, 3),
    "mul_mat_id q4_0": lambda: mul_mat_id(DType.Q4_0, 3),
    "mul_mat_id f16, many": lambda: mul_mat_id(DType.F16, 20),
    "mul_mat_id q8_0, many": lambda: mul_mat_id(DType.Q8_0, 20),
    "add_id": add_id,
    "ssm_scan": ssm_scan,
}

STREAMS = [
    pytest.param(("OpenCL0", {"work_split": "cpu"}), id="opencl-cpu"),
    pytest.param(("OpenCL0", {"work_split": "gpu"}), id="opencl-gpu"),
    pytest.param(("played", {}), id="played"),
    pytest.param(("CUDA0", {}), id="card", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=STREAMS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    kind, params = request.param
    with first(kind).init_backend(params) as made:
        yield made


class Placed:
    """A program in one buffer, guard bytes around each tensor."""

    def __init__(self, program: Program, backend: Backend) -> None:
        self.ctx, self.y, self.ids, self.n = program
        self.graph = Graph().build_forward_expand(self.y)
        ends = [t for t in self.ctx.tensors if t.view_src is None]
        size = sum(-(-t.nbytes // GUARD) * GUARD + GUARD for t in ends) + GUARD
        self.buffer = backend.alloc_buffer(size)
        self.whole = Context().new_tensor(DType.I8, (size,))
        tensor_alloc(self.buffer, self.whole, 0)
        self.buffer.clear(BYTE)
        at, rng = GUARD, np.random.default_rng(1)
        for t in self.ctx.tensors:
            if t.view_src is not None:
                view_init(t)
                continue
            tensor_alloc(self.buffer, t, at)
            at += -(-t.nbytes // GUARD) * GUARD + GUARD
            if t.op is Op.NONE and t.dtype not in (DType.I32, DType.I64):
                t.set_array(rng.standard_normal(t.shape, np.float32))
            elif t.op is Op.NONE:
                t.memset(0)

    def put_ids(self, *bad: int) -> None:
        """Valid indices, and in the middle of them others."""
        ids = np.arange(self.ids.n_elements) % self.n
        ids[1 : 1 + len(bad)] = bad
        self.ids.set(ids.astype(np.int64 if self.ids.dtype is DType.I64 else np.int32))

    def outside(self) -> np.ndarray[Any, Any]:
        """All bytes but those of the nodes' results."""
        found = self.whole.to_numpy().view(np.uint8).copy()
        for t in self.graph.nodes:
            base = t.view_src or t
            found[base.offset : base.offset + base.nbytes] = 0
        return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_index_out_of_range_is_an_error_and_touches_nothing_else(backend: Backend, name: str) -> None:
    placed = Placed(PROGRAMS[name](), backend)
    n, is_long = placed.n, placed.ids.dtype is DType.I64
    for bad in (n, -1, n + 3, -(1 << 31), (1 << 31) - 1, *((1 << 40, -(1 << 62)) if is_long else ())):
        placed.put_ids(bad)
        before = placed.outside()
        with pytest.raises(BackendError, match=rf"{placed.y.op}.*row number {bad} for a tensor of {n} rows"):
            backend.graph_compute(placed.graph)
        np.testing.assert_array_equal(placed.outside(), before)
        backend.synchronize()  # told once


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "set_rows" in name])
def test_rows_beside_the_bad_one_are_written_and_no_others(backend: Backend, name: str) -> None:
    placed = Placed(PROGRAMS[name](), backend)
    placed.put_ids(placed.n)
    cache = placed.y.view_src
    assert cache is not None
    cache.memset(BYTE)
    with pytest.raises(BackendError, match="row number"):
        backend.graph_compute(placed.graph)
    rows = cache.get().reshape(placed.n, -1)
    assert [bool((row == BYTE).all()) for row in rows] == [i not in (0, 2) for i in range(placed.n)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_after_the_error_the_same_plan_computes_rightly(backend: Backend, name: str) -> None:
    """Also where it was captured as a CUDA graph before, and is replayed."""
    program = PROGRAMS[name]()
    placed = Placed(program, backend)
    plan = backend.graph_plan_create(placed.graph)
    placed.put_ids()
    with init_by_name("CPU") as cpu:
        theirs = Placed(PROGRAMS[name](), cpu)
        theirs.put_ids()
        cpu.graph_compute(theirs.graph)
        want = theirs.y.to_numpy()
    for bad in ((), (), (), (placed.n,), (-1,), ()):
        placed.put_ids(*bad)
        backend.graph_plan_compute(plan)
        if bad:
            with pytest.raises(BackendError, match=f"row number {bad[0]} "):
                backend.synchronize()
            continue
        backend.synchronize()
        error = np.square(placed.y.to_numpy() - want).sum() / np.square(want).sum()
        assert error < 5e-4


@pytest.mark.parametrize("bad", [7, -1])
def test_heads_beside_a_bad_row_are_written(backend: Backend, bad: int) -> None:
    """Queries, keys and values of few tokens, by one kernel on GPUs."""
    ctx = Context()
    positions, ids = ctx.new_tensor(DType.I32, (3,)), ctx.new_tensor(DType.I64, (3,))
    q, k, v = (ctx.new_tensor(DType.F32, (32, heads, 3)) for heads in (4, 2, 2))
    caches = [ctx.new_tensor(DType.F16, (64, 7)) for _ in "kv"]
    query, key = (ctx.rope(t, positions, 32, RopeType.NEOX) for t in (q, k))
    puts = [ctx.set_rows(c, ctx.reshape_2d(t, 64, 3), ids) for c, t in zip(caches, (key, v), strict=True)]
    graph = Graph()
    for t in (query, *puts):
        graph.build_forward_expand(t)
    placed = Placed(Program(ctx, puts[1], ids, 7), backend)
    placed.buffer.usage = BufferUsage.COMPUTE  # rotated keys need not be written
    placed.put_ids(bad)
    for cache in caches:
        cache.memset(BYTE)
    with pytest.raises(BackendError, match=rf"row number {bad} for a tensor of 7 rows"):
        backend.graph_compute(graph)
    assert np.isfinite(query.to_numpy()).all()
    for cache in caches:
        rows = cache.get().reshape(7, -1)
        assert [bool((row == BYTE).all()) for row in rows] == [i not in (0, 2) for i in range(7)]


def test_each_node_is_named(backend: Backend) -> None:
    ctx = Context()
    a, ids, more = (
        ctx.new_tensor(DType.F32, (8, 5)),
        ctx.new_tensor(DType.I32, (3,)),
        ctx.new_tensor(DType.I32, (2,)),
    )
    ys = [ctx.get_rows(a, ids), ctx.get_rows(a, more)]
    for y, name in zip(ys, ("first", "second"), strict=True):
        y.name = name
    graph = Graph()
    for y in ys:
        graph.build_forward_expand(y)
    placed = Placed(Program(ctx, ys[0], ids, 5), backend)
    more.set(np.full(2, 9, np.int32))
    placed.put_ids(6)
    with pytest.raises(BackendError, match=r"'first'.*row number 6 ") as caught:
        backend.graph_compute(graph)  # of several, the first that the stream met
    assert "second" not in str(caught.value)
    placed.put_ids()
    with pytest.raises(BackendError, match=r"'second'.*row number 9 ") as caught:
        backend.graph_compute(graph)
    assert "first" not in str(caught.value)
    more.memset(0)
    backend.graph_compute(graph)


def test_a_plan_that_is_gone_before_the_wait_is_told_of_too(backend: Backend) -> None:
    for i in range(3):
        placed = Placed(get_rows(DType.F32), backend)
        placed.put_ids(10 + i)
        backend.graph_compute_async(placed.graph)
        del placed
        other = Placed(get_rows(DType.F32), backend)  # whose record this is not
        other.put_ids()
        backend.graph_compute_async(other.graph)
        with pytest.raises(BackendError, match=f"row number {10 + i} "):
            backend.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_names_of_plans_that_are_gone_are_dropped(
    backend: Backend, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a wait; without one, by planning, once there are many."""
    monkeypatch.setattr("ggmlb.backends.gpu.bad_index.MAX_DROPPED", 4)
    before = len(backend.bad_indices._nodes)  # type: ignore[attr-defined]
    for _ in range(20):
        ctx = Context()
        y = ctx.get_rows(ctx.new_tensor(DType.F32, (8, 5)), ctx.new_tensor(DType.I32, (1,)))
        placed = Placed(Program(ctx, y, y.sources[1], 5), backend)
        backend.graph_compute_async(placed.graph)
        if waits:
            backend.synchronize()
        placed.buffer.free()
        del placed, ctx, y
    if waits:
        backend.synchronize()
    assert len(backend.bad_indices._nodes) <= before + (1 if waits else 5)  # type: ignore[attr-defined]


def test_a_scheduler_raises_it_from_its_synchronous_results(backend: Backend) -> None:
    with init_by_name("CPU") as cpu, Scheduler([backend, cpu]) as scheduler:
        program = get_rows(DType.F32)
        ids = program.ctx.set_input(program.ids)
        graph = Graph().build_forward_expand(program.ctx.scale(program.y, 2.0))
        scheduler.set_tensor_backend(program.y, backend)
        scheduler.alloc_graph(graph)
        ids.set(np.array([0, 8, 1], np.int32))
        with pytest.raises(BackendError, match="row number 8 for a tensor of 5 rows"):
            scheduler.graph_compute(graph)
        ids.set(np.array([0, 4, 1], np.int32))
        scheduler.graph_compute(graph)
