"""The end of a process, and its forks, while threads compute: no abort, no hang, and an error of ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.processes import COMMON, finish, start

NATIVE = ["CPU", "LLVM", "OpenCL0"]

OPENED = """
import sys, threading, time
def opened(name):
    if name != "played":
        return init_by_name(name)
    from tests.support.gpus import first
    return first(name).init_backend()
streams = [opened(name) for name in NAMES]
work = [scaled(stream) for stream in streams]
for stream, (a, y, graph) in zip(streams, work):
    a.set(np.ones(1000, np.float32))
    stream.graph_compute(graph)
"""

DAEMONS = """
def compute(stream, graph):
    while True:
        stream.graph_compute(graph)
def move(stream, a, y):
    while True:
        a.set(np.ones(1000, np.float32))
        stream.set_tensor_async(a, np.ones(1000, np.float32))
        stream.synchronize()
        y.to_numpy()
def plan(stream, a):
    while True:
        with stream.device.init_backend() as other:
            a, y, graph = scaled(other)
            other.graph_compute(graph)
for stream, (a, y, graph) in zip(streams, work):
    for target, args in (compute, (stream, graph)), (move, (stream, a, y)), (plan, (stream, a)):
        threading.Thread(target=target, args=args, daemon=True).start()
time.sleep(0.2)
print("done")
"""

LEFT = """
import ggmlb.testing.run as kit    # imported before the backend, it drops its streams after the backend
kit.left = kit.Runner()
for task in kit.tasks(kit.left.device(NAME), kit.Selection("test", ("add",), limit=1)):
    assert [result.reason for result in kit.left.run(task) if result.outcome.is_bad] == []
print("done")
"""

REFUSED = """
import atexit
said = []
def compute():
    try:
        while True:
            streams[0].graph_compute(work[0][2])
    except SystemExit as error:    # which ends the thread, silently
        said.append(str(error))
thread = threading.Thread(target=compute, daemon=True)
def ask():     # registered before ggmlb's, and so called after it
    thread.join(300)
    assert "Python is exiting" in said[0]
    streams[0].graph_compute(work[0][2])    # the thread that ends may go on
    print("done", flush=True)
import ggmlb.system.process
atexit.unregister(ggmlb.system.process.process_state._end)
atexit.register(ask)
atexit.register(ggmlb.system.process.process_state._end)
thread.start()
"""

FORKS = """
import os
def compute(stream, graph):
    while not stop:
        stream.graph_compute(graph)
stop = []
threads = [threading.Thread(target=compute, args=(s, g)) for s, (a, y, g) in zip(streams, work)]
for thread in threads:
    thread.start()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        for stream, (a, y, graph) in zip(streams, work):
            if stream.name in ("CPU", "LLVM"):
                a.set(np.full(1000, 3, np.float32))
                stream.graph_compute(graph)
                assert (y.to_numpy() == 6).all()
                continue
            for call in (lambda: stream.graph_compute(graph), lambda: a.memset(0), stream.free, y.to_numpy):
                try:
                    call()
                except BackendError as error:
                    assert "forked" in str(error) and "spawn" in str(error)
                else:
                    raise SystemExit("it went on in a fork")
        raise SystemExit(0)    # with all objects alive
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
stop.append(1)
print("done")
"""

POOL = """
import multiprocessing
def doubled(i):
    a.set(np.full(1000, i, np.float32))
    streams[0].graph_compute(graph)
    return y.to_numpy()[0]
a, y, graph = work[0]
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(doubled, range(8)) == [2 * i for i in range(8)]
    try:
        pool.map(len, [y])
    except Exception as error:
        assert "cannot be copied or pickled" in str(error), error
    else:
        raise SystemExit("a tensor was sent to another process")
print("done")
"""

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def run(program: str, *names: str) -> None:
    finish(start(f"NAMES = {names!r}\n{COMMON}{OPENED}{program}"))


@pytest.mark.parametrize("names", [NATIVE, ["played"]], ids="+".join)
def test_threads_that_nobody_joins_may_compute_to_the_end(names: list[str]) -> None:
    run(DAEMONS, *names)


@pytest.mark.parametrize("name", NATIVE)
def test_streams_that_nobody_frees_are_silent_at_the_end(name: str) -> None:
    finish(start(f"NAME = {name!r}\n{LEFT}"))


def test_a_thread_is_refused_at_the_end(tmp_path: Path) -> None:
    run(REFUSED, "CPU")


@forks
@pytest.mark.parametrize("names", [NATIVE, ["played"]], ids="+".join)
def test_a_fork_in_the_middle_of_computing(names: list[str]) -> None:
    run(FORKS, *names)


@forks
@pytest.mark.parametrize("name", ["CPU", "LLVM"])
def test_a_pool_of_forks_computes(name: str) -> None:
    run(POOL, name)
