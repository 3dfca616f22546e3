"""Streams and plans of a GPU backend: what the conformance kit does not ask of every device."""

from __future__ import annotations

import numpy as np

from ggmlb import Backend, Status
from tests.support.gpus import held, scaled

ONES = np.ones(1000, np.float32)


def test_a_synchronous_read_waits_for_queued_work(stream: Backend) -> None:
    a, y, graph = scaled(stream, n=1 << 16)
    for i in range(5):
        a.set_array(np.full(1 << 16, i))
        with held(stream):
            stream.graph_compute_async(graph)
        assert np.array_equal(y.to_numpy(), np.full(1 << 16, 2 * i))


def test_a_plan_keeps_dropped_buffers_alive(stream: Backend) -> None:
    _, _, graph = scaled(stream)
    plan = stream.graph_plan_create(graph)
    del graph
    assert stream.graph_plan_compute(plan) is Status.SUCCESS
    stream.synchronize()
