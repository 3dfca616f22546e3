"""One thread at a time uses a backend; re-entrant use raises instead of deadlocking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event
from typing import Any

import pytest

import ggmlb
from ggmlb import Backend, BackendError, Context, Graph, GraphError, Scheduler
from ggmlb.interface import stream_lock

LONG = 60  # seconds until a test fails that waits


@pytest.fixture
def streams() -> Iterator[Callable[[], Backend]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ggmlb.init_by_name("CPU", {"n_threads": 2}))


def calling(backend: Backend, fun: Callable[[], object], n_tasks: int = 1) -> Graph:
    """Return a graph whose node calls a function, in as many tasks, with nothing."""
    c = Context()
    y = c.map_custom1(c.new_tensor("f32", 8), lambda *_: fun(), n_tasks)
    ggmlb.alloc_ctx_tensors(c, backend)
    return ggmlb.Graph().build_forward_expand(y)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Do something in a thread, which must end in time."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(seconds)


FORBIDDEN: dict[str, Callable[[Any, Graph], object]] = {
    "compute": lambda backend, graph: backend.graph_compute(graph),
    "plan": lambda backend, graph: backend.graph_plan_create(graph),
    "schedule": lambda backend, graph: Scheduler([backend]).graph_compute(graph),
    "free": lambda backend, _: backend.free(),
    "threads": lambda backend, _: backend.set_n_threads(3),
}


@pytest.mark.parametrize("n_tasks", [1, 2])
@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_custom_op_is_refused_its_own_backend(what, n_tasks, streams):
    own = streams()
    inner = calling(own, lambda: None)
    graph = calling(own, lambda: FORBIDDEN[what](own, inner), n_tasks)
    for _ in range(2):
        with pytest.raises(BackendError, match=r"MAP_CUSTOM1.*a backend of its own") as told:
            within(LONG, lambda: own.graph_compute(graph))
        assert isinstance(told.value.__cause__, GraphError)
    own.graph_compute(inner)


@pytest.mark.parametrize("n_tasks", [1, 2])
def test_a_custom_op_may_compute_elsewhere(n_tasks, streams):
    own, other, called = streams(), streams(), []
    inner = calling(other, lambda: called.append(1))
    own.graph_compute(calling(own, lambda: other.graph_compute(inner), n_tasks))
    assert len(called) == n_tasks


@pytest.mark.parametrize("n_tasks", [1, 2])
def test_a_way_back_over_another_backend_is_refused(n_tasks, streams):
    own, other = streams(), streams()
    inner = calling(own, lambda: None)
    middle = calling(other, lambda: own.graph_compute(inner), n_tasks)
    graph = calling(own, lambda: other.graph_compute(middle), n_tasks)
    with pytest.raises(BackendError, match="a backend of its own"):
        within(LONG, lambda: own.graph_compute(graph))


@pytest.mark.parametrize("n_tasks", [1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_threads_that_want_each_others_backends_do_not_wait_for_ever(n, n_tasks, streams, monkeypatch):
    monkeypatch.setattr(stream_lock, "NESTED_TIMEOUT_S", 0.5)
    backends, together = [streams() for _ in range(n)], Barrier(n)
    inner = [calling(backend, lambda: None) for backend in backends]

    def ask_next(i: int) -> None:
        if not together.broken and n_tasks == 1:
            together.wait(LONG)  # each holds its own lock
        backends[(i + 1) % n].graph_compute(inner[(i + 1) % n])

    graphs = [calling(b, lambda i=i: ask_next(i), n_tasks) for i, b in enumerate(backends)]

    def outcome(i: int) -> str:
        try:
            backends[i].graph_compute(graphs[i])
        except BackendError as error:
            assert "a backend of its own" in str(error)
            return "refused"
        return "computed"

    with ThreadPoolExecutor(n) as threads:
        found = [f.result(LONG) for f in [threads.submit(outcome, i) for i in range(n)]]
    assert n_tasks > 1 or "refused" in found


def test_another_thread_waits_for_the_lock(streams):
    own, begun, go_on = streams(), Event(), Event()
    order = []

    def first() -> None:
        begun.set()
        go_on.wait(LONG)
        order.append("first")

    slow, quick = calling(own, first), calling(own, lambda: order.append("second"))
    with ThreadPoolExecutor(3) as threads:
        work = [threads.submit(own.graph_compute, slow)]
        begun.wait(LONG)
        work.append(threads.submit(own.graph_compute, quick))
        work.append(threads.submit(own.set_n_threads, 1))  # whose threads are in use
        go_on.set()
        for each in work:
            each.result(LONG)
    assert order == ["first", "second"]


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_backend_is_freed_after_what_other_threads_compute(n_threads):
    own, begun, go_on = ggmlb.init_by_name("CPU", {"n_threads": 2}), Event(), Event()

    def slowly() -> None:
        begun.set()
        go_on.wait(LONG)

    graph = calling(own, slowly, n_threads)
    with ThreadPoolExecutor(3) as threads:
        computing = threads.submit(own.graph_compute, graph)
        begun.wait(LONG)
        freeing = threads.submit(own.free)
        go_on.set()
        assert computing.result(LONG) is ggmlb.Status.SUCCESS
        freeing.result(LONG)
    with pytest.raises(ggmlb.FreedError):
        own.graph_compute(graph)


def test_an_abort_callback_is_refused_its_own_backend(streams):
    own = streams()
    inner, graph = calling(own, lambda: None), calling(own, lambda: None)
    own.abort_callback = lambda: bool(own.graph_compute(inner))
    with pytest.raises(GraphError, match="a backend of its own"):
        own.graph_compute(graph)
    own.abort_callback = None
    own.graph_compute(graph)
