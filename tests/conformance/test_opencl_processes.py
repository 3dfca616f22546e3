"""What only a process of its own can show of OpenCL: several devices, fork, a missing runtime."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.processes import COMMON, finish, start

pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")

TWO_DEVICES = """
names = [d.name for d in devices() if d.name.startswith("OpenCL")]
assert names[:2] == ["OpenCL0", "OpenCL1"], names
with init_by_name("OpenCL0") as first, init_by_name("OpenCL1") as second:
    assert first.device.context is second.device.context
    assert first.device.buffer_type is not second.device.buffer_type
    a, y, graph = scaled(first)
    b, z, graph_b = scaled(second, 5.0)
    b.set(np.ones(1000, np.float32))
    second.graph_compute(graph_b)  # the second device is the first to compile it
    assert (z.to_numpy() == 5).all()
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

CHILD_ENDS = """
import os
stream = init_by_name("OpenCL0")
a, y, graph = scaled(stream)
stream.graph_compute(graph)
pid = os.fork()
if pid == 0:
    raise SystemExit(0)     # the child ends as programs do, with all objects alive
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
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


def test_two_devices_work_side_by_side(tmp_path: Path, only_pocl: dict[str, str]) -> None:
    env = {**only_pocl, "POCL_DEVICES": "pthread pthread", "GGMLB_CACHE_DIR": str(tmp_path)}
    env["POCL_CACHE_DIR"] = str(tmp_path / "pocl")
    for _ in range(2):  # on an empty cache, and on a full one
        finish(start(COMMON + TWO_DEVICES, **env))
    assert any(tmp_path.glob("pocl/*")) and not any(tmp_path.glob("opencl/*.bin"))  # PoCL has them


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_may_end_with_all_objects_alive() -> None:
    finish(start(COMMON + CHILD_ENDS))


def test_a_missing_library_or_device_is_told_with_what_to_do(only_pocl: dict[str, str]) -> None:
    no_library = "import sys; sys.modules['pyopencl'] = None\nEXPECTED = 'cannot be imported'\n"
    finish(start(no_library + LAZY.replace('assert "pyopencl" not in sys.modules\n', "")))
    # PoCL takes a list of drivers; of one that it does not know, it has no devices.
    finish(start("EXPECTED = 'no OpenCL platform has a device'\n" + LAZY, POCL_DEVICES="none", **only_pocl))


def test_a_pocl_that_cannot_write_its_cache_is_told_with_what_to_do(
    tmp_path: Path, only_pocl: dict[str, str]
) -> None:
    (file := tmp_path / "file").touch()
    code = "EXPECTED = 'set POCL_CACHE_DIR to a writable folder'\n" + LAZY
    for unwritable in ({"POCL_CACHE_DIR": str(file / "pocl")}, {"HOME": str(file), "XDG_CACHE_HOME": ""}):
        finish(start(code, **{"POCL_CACHE_DIR": "", **only_pocl, **unwritable}))
