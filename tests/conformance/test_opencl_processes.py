"""What only a process of its own can show: several devices, fork, exit, an empty cache, a missing runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMMON = """
import numpy as np
from ggmlb import BufferUsage, Context, DType, Graph, Scheduler
from ggmlb import alloc_ctx_tensors, device_by_name, devices, init_by_name
from ggmlb.interface import tensor_copy, tensor_copy_async

def scaled(backend, factor=2.0):
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (1000,))
    y = ctx.scale(a, factor)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)
"""

TWO_DEVICES = """
names = [d.name for d in devices() if d.name.startswith("OpenCL")]
assert names[:2] == ["OpenCL0", "OpenCL1"], names
with init_by_name("OpenCL0") as first, init_by_name("OpenCL1") as second:
    assert first.device.context is second.device.context
    assert first.device.buffer_type is not second.device.buffer_type
    a, y, graph = scaled(first)
    b, z, graph_b = scaled(second, 5.0)
    assert not second.supports_buft(a.buffer.buft)
    for i in range(20):     # two streams of two devices, ordered by copies alone
        first.set_tensor_async(a, np.full(1000, i, np.float32))
        first.graph_compute_async(graph)
        tensor_copy_async(first, second, y, b)
        second.graph_compute_async(graph_b)
        tensor_copy_async(second, first, z, a)
        out = np.empty(1000, np.float32)
        first.get_tensor_async(a, out)
        first.synchronize()
        assert (out == 10 * i).all(), (i, out)
    event = first.device.event_new()
    first.set_tensor_async(a, np.full(1000, 7, np.float32))
    first.graph_compute_async(graph)
    first.event_record(event)
    second.event_wait(event)
    tensor_copy(y, b)
    assert (b.to_numpy() == 14).all()
    second.graph_compute(graph_b)
    assert (z.to_numpy() == 70).all()
    try:
        second.event_record(event)
    except Exception as error:
        assert "belongs to OpenCL0" in str(error)
    else:
        raise SystemExit("an event of another device was recorded")

    weights = Context()
    w0 = weights.new_tensor(DType.F32, (64, 64))
    more = Context()
    w1 = more.new_tensor(DType.F32, (64, 64))
    alloc_ctx_tensors(weights, first).usage = BufferUsage.WEIGHTS
    alloc_ctx_tensors(more, second).usage = BufferUsage.WEIGHTS
    rng = np.random.default_rng(0)
    W0, W1, X = (rng.standard_normal(s, np.float32) for s in ((64, 64), (64, 64), (8, 64)))
    w0.set_array(W0)
    w1.set_array(W1)
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(DType.F32, (64, 8)))
    y = ctx.set_output(ctx.mul_mat(w1, ctx.relu(ctx.mul_mat(w0, x))))
    graph = Graph().build_forward_expand(y)
    with init_by_name("CPU") as cpu, Scheduler([first, second, cpu]) as sched:
        sched.alloc_graph(graph)
        for _ in range(3):
            x.set_array(X)
            sched.graph_compute(graph)
            want = np.maximum(X @ W0.T, 0) @ W1.T
            assert np.allclose(y.to_numpy(), want, rtol=1e-4, atol=1e-4)
        assert {sched.get_tensor_backend(n).name for n in graph.nodes} == {"OpenCL0", "OpenCL1"}
print("done")
"""

AFTER_FORK = """
import os
stream = init_by_name("OpenCL0")
a, y, graph = scaled(stream)
a.set(np.ones(1000, np.float32))
stream.graph_compute(graph)
pid = os.fork()
if pid == 0:
    try:
        y.get()
    except Exception as error:
        os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 3)
    os._exit(4)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert (y.to_numpy() == 2).all()
pid = os.fork()
if pid == 0:
    raise SystemExit(0)     # the child ends as programs do, with all objects alive
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
print("done")
"""

EXIT_WITH_WORK_PENDING = """
stream = init_by_name("OpenCL0")
a, y, graph = scaled(stream)
stream.set_tensor_async(a, np.ones(1000, np.float32))
stream.graph_compute_async(graph)
out = np.empty(1000, np.float32)
stream.get_tensor_async(y, out)
event = stream.device.event_new()
stream.event_record(event)
host = stream.device.host_buffer_type.alloc_buffer(4096)
print("done")
"""

COMPUTE = """
with init_by_name("OpenCL0") as stream:
    a, y, graph = scaled(stream)
    a.set(np.ones(1000, np.float32))
    stream.graph_compute(graph)
    assert (y.to_numpy() == 2).all()
print("done")
"""

LAZY = """
import sys
import ggmlb
assert "pyopencl" not in sys.modules
from ggmlb.backends.opencl import backend_reg
reg = backend_reg()
assert "pyopencl" not in sys.modules
try:
    reg.devices
except ggmlb.BackendUnavailable as error:
    assert EXPECTED in str(error) and "ggmlb[opencl]" in str(error), error
    print("done")
"""


def start(code: str, **env: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=settings,
    )


def finish(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=240)
    assert not err, err
    assert (process.returncode, out) == (0, "done\n")


def test_two_devices_work_side_by_side() -> None:
    finish(start(COMMON + TWO_DEVICES, POCL_DEVICES="pthread pthread"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_so_instead_of_hanging() -> None:
    finish(start(COMMON + AFTER_FORK))


def test_exit_with_work_pending_is_clean() -> None:
    finish(start(COMMON + EXIT_WITH_WORK_PENDING))


def test_four_processes_may_start_on_an_empty_cache(tmp_path: Path) -> None:
    env = {"POCL_CACHE_DIR": str(tmp_path / "pocl"), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    for process in [start(COMMON + COMPUTE, **env) for _ in range(4)]:
        finish(process)
    kept = list((tmp_path / "xdg/ggmlb/opencl").iterdir())
    assert kept
    assert {path.suffix for path in kept} == {".bin"}  # and nothing half written


def test_a_missing_library_or_device_is_told_with_what_to_do() -> None:
    no_library = "import sys; sys.modules['pyopencl'] = None\nEXPECTED = 'cannot be imported'\n"
    finish(start(no_library + LAZY.replace('assert "pyopencl" not in sys.modules\n', "")))
    # PoCL takes a list of drivers; of one that it does not know, it has no devices.
    finish(start("EXPECTED = 'no OpenCL platform has a device'\n" + LAZY, POCL_DEVICES="none"))
