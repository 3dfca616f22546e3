"""Traces: rows for the host and each device, with times that can be, from what the devices say."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import BufferUsage, Context, DType, Graph, GraphError, Scheduler, alloc_ctx_tensors
from ggmlb.inspect.trace import COMPUTE, COPIES, HOST, Trace
from ggmlb.interface import Backend
from ggmlb.interface.observe import observers

N_LAYERS = 6


class Layers:
    """Products whose weights lie on the backends by turns."""

    def __init__(self, backends: list[Backend], stack: ExitStack) -> None:
        c = Context()
        self.x = c.set_input(c.new_tensor(DType.F32, (64, 8), name="x"))
        y = self.x
        for i in range(N_LAYERS):
            ctx = Context()
            w = ctx.new_tensor(DType.F32, (64, 64), name=f"w{i}")
            buffer = stack.enter_context(alloc_ctx_tensors(ctx, backends[i % len(backends)]))
            buffer.usage = BufferUsage.WEIGHTS
            w.set_array(np.eye(64))
            y = c.set_name(c.mul_mat(w, y), f"y{i}")
        self.y = c.set_output(y)
        self.graph = Graph().build_forward_expand(y)


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return {row: sorted(found, key=lambda e: e["ts"]) for row, found in rows.items()}


def names(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    found = [e for e in events if e["ph"] == "M" and e["name"] == what]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in found}


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def run(stack, tmp_path):
    """Trace a graph over some devices; return what was written."""

    def run(*devices: str) -> dict[str, Any]:
        backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in devices]
        layers = Layers(backends, stack)
        sched = stack.enter_context(Scheduler(backends))
        sched.alloc_graph(layers.graph)
        path: Path = tmp_path / "run.json"
        with sched.trace(path):
            layers.x.set_array(np.ones((8, 64)))
            sched.graph_compute(layers.graph)
        assert (layers.y.to_numpy() == 1).all()
        trace: dict[str, Any] = json.loads(path.read_text())
        return trace

    return run


@pytest.mark.parametrize("devices", [("CPU",), ("OpenCL0",), ("OpenCL0", "CPU")], ids="+".join)
def test_rows_and_times(run, devices):
    trace = run(*devices)
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ns"
    processes = list(names(events, "process_name").values())
    assert processes[0] == "host"
    assert [p.split(" ")[0] for p in processes[1:]] == list(devices)
    rows = slices(events)
    titles = names(events, "thread_name")
    assert set(rows) == set(titles)
    for (pid, tid), found in rows.items():
        assert all(e["dur"] >= 0 and e["ts"] > 0 for e in found)
        if pid != HOST:  # one thing after the other
            assert titles[pid, tid] == ("copies" if tid == COPIES else "computations")
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(found))
    # Every product is there, and none outside of the computation that the host waited for.
    on_device = [e for (pid, tid), found in rows.items() if pid != HOST and tid == COMPUTE for e in found]
    assert len([e for e in on_device if "mul_mat" in e["name"].lower()]) >= N_LAYERS
    assert all(any(f"'y{i}'" in e["name"] for e in on_device) for i in range(N_LAYERS))
    host = rows[HOST, 0]
    end = max(e["ts"] + e["dur"] for e in host)
    slack = 20_000  # microseconds to which the clock of a device is known on the busiest machine
    assert all(host[0]["ts"] - slack < e["ts"] and e["ts"] + e["dur"] < end + slack for e in on_device)


def test_splits_copies_and_arrows(run):
    events = run("OpenCL0", "CPU")["traceEvents"]
    host = slices(events)[HOST, 0]
    computed = [e["name"] for e in host if e["name"].startswith("split")]
    assert computed == [f"split {i}: 1 nodes on {('OpenCL0', 'CPU')[i % 2]}" for i in range(N_LAYERS)]
    copies = next(found for (_, tid), found in slices(events).items() if tid == COPIES)
    assert len(copies) == 3  # x, and what the CPU's layers give to the device
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) >= N_LAYERS
    assert all(e["pid"] == HOST for e in starts.values())
    assert all(e["pid"] != HOST for e in ends.values())


def test_a_device_that_cannot_tell_is_named(bench, stack):
    layers = Layers([bench.gpu0, bench.cpu], stack)
    with Scheduler(bench.backends) as sched:
        sched.alloc_graph(layers.graph)
        with sched.trace() as trace:
            sched.graph_compute(layers.graph)
        assert trace.untimed == ("Fake0", "Fake1")
        assert not any(name.startswith("Fake") for name in names(trace.events, "process_name").values())
        assert any("Fake0" in e["name"] for e in slices(trace.events)[HOST, 0])


def test_a_synchronous_backend_needs_no_hook(monkeypatch, run):
    monkeypatch.setattr("ggmlb.backends.cpu.backend.CpuBackend._start_timing", lambda self: False)
    events = run("CPU")["traceEvents"]
    assert [e["name"] for e in slices(events)[1, COMPUTE]] == [f"split 0: {N_LAYERS} nodes on CPU"]


def test_the_devices_of_a_meta_device_have_rows(stack):
    devices = [ggmlb.device_by_name("OpenCL0"), ggmlb.device_by_name("CPU")]
    mirrored = ggmlb.SplitState(ggmlb.SplitAxis.MIRRORED)
    meta = stack.enter_context(ggmlb.meta_device(devices, lambda tensor: mirrored).init_backend())
    assert [s.device for s in meta.streams] == devices
    layers = Layers([meta], stack)
    with Scheduler([meta]) as sched:
        sched.alloc_graph(layers.graph)
        with sched.trace() as trace:
            sched.graph_compute(layers.graph)
    assert trace.untimed == ()
    counts = {row: len(found) for row, found in slices(trace.events).items() if row[0] != HOST}
    # The input's write is queued on OpenCL0, and done at once on the CPU.
    assert counts == {(1, COMPUTE): N_LAYERS, (1, COPIES): 1, (2, COMPUTE): N_LAYERS}


def test_a_failure_ends_the_trace(stack):
    backend = stack.enter_context(ggmlb.init_by_name("OpenCL0"))
    n = len(observers)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), Trace([backend]):
            raise ZeroDivisionError
    assert len(observers) == n
    assert backend.commands is None


def test_one_at_a_time(stack):
    backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in ("OpenCL0", "CPU")]
    with Trace([backends[1]]):
        with pytest.raises(GraphError, match="this CPU backend is being timed already"), Trace(backends):
            pass
        assert backends[0].commands is None  # what was started was stopped
    with pytest.raises(GraphError, match="not being timed"):
        backends[0].stop_timing()
