"""What only a process of its own can show: a kernel that fails, fork, exit, an empty cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMMON = """
import numpy as np
from ggmlb import BackendError, Context, DType, Graph, alloc_ctx_tensors, init_by_name

def scaled(backend, factor=2.0):
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (1000,))
    y = ctx.scale(a, factor)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)
"""

COMPUTE = """
with init_by_name("CUDA0") as stream:
    a, y, graph = scaled(stream)
    a.set(np.ones(1000, np.float32))
    for _ in range(3):
        stream.graph_compute(graph)
    assert (y.to_numpy() == 2).all()
print("done")
"""

EXIT_WITH_WORK_PENDING = """
stream = init_by_name("CUDA0")
a, y, graph = scaled(stream)
stream.set_tensor_async(a, np.ones(1000, np.float32))
for _ in range(3):
    stream.graph_compute_async(graph)
out = np.empty(1000, np.float32)
stream.get_tensor_async(y, out)
event = stream.device.event_new()
stream.event_record(event)
host = stream.device.host_buffer_type.alloc_buffer(4096)
print("done")
"""

AFTER_FORK = """
import os
stream = init_by_name("CUDA0")
a, y, graph = scaled(stream)
a.set(np.ones(1000, np.float32))
stream.graph_compute(graph)
pid = os.fork()
if pid == 0:
    try:
        y.get()
    except BackendError as error:
        os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 3)
    os._exit(4)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert (y.to_numpy() == 2).all()
print("done")
"""

ILLEGAL_ADDRESS = """
stream = init_by_name("CUDA0")
ctx = Context()
table = ctx.new_tensor(DType.F32, (64, 8), "table")
rows = ctx.new_tensor(DType.I32, (64,), "rows")
y = ctx.sqr(ctx.get_rows(table, rows))
alloc_ctx_tensors(ctx, stream)
rows.set(np.full(64, 2_000_000_000, np.int32))
try:
    stream.graph_compute(Graph().build_forward_expand(y))
except BackendError as error:
    assert EXPECTED in str(error), error
    print("done", flush=True)
import os
os._exit(0)     # the context is broken: nothing can be released any more
"""


def start(code: str, **env: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=settings,
    )


def finish(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=200)
    assert not err, err
    assert (process.returncode, out) == (0, "done\n")


def test_exit_with_work_pending_is_clean() -> None:
    finish(start(EXIT_WITH_WORK_PENDING))


def test_a_forked_process_is_told_so() -> None:
    finish(start(AFTER_FORK))


def test_four_processes_may_start_on_an_empty_cache(tmp_path: Path) -> None:
    for process in [start(COMPUTE, CUPY_CACHE_DIR=str(tmp_path)) for _ in range(4)]:
        finish(process)


@pytest.mark.parametrize(
    ("expected", "sync"), [("a graph of 2 nodes", "0"), ("failed to compute GET_ROWS", "1")]
)
def test_a_kernel_that_fails_is_told_with_its_graph_or_node(expected: str, sync: str) -> None:
    finish(start(f"EXPECTED = {expected!r}\n{ILLEGAL_ADDRESS}", GGMLB_CUDA_SYNC=sync))
