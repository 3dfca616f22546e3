"""What only a process of its own can show of a GPU backend: fork, exit, an empty cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ggmlb import device_by_name
from tests.support.gpus import CARD, OPENCL
from tests.support.processes import COMMON, finish, start

AFTER_FORK = """
import os
stream = init_by_name(NAME)
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

EXIT_WITH_WORK_PENDING = """
stream = init_by_name(NAME)
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

COMPUTE = """
with init_by_name(NAME) as stream:
    a, y, graph = scaled(stream)
    a.set(np.ones(1000, np.float32))
    for _ in range(3):
        stream.graph_compute(graph)
    assert (y.to_numpy() == 2).all()
print("done")
"""


@pytest.fixture(params=[OPENCL, CARD])
def common(request: pytest.FixtureRequest) -> str:
    device_by_name(request.param)  # no process is started for a device that is not there
    return f"{COMMON}\nNAME = {request.param!r}\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_so_instead_of_hanging(common: str) -> None:
    finish(start(common + AFTER_FORK))


def test_exit_with_work_pending_is_clean(common: str) -> None:
    finish(start(common + EXIT_WITH_WORK_PENDING))


def test_four_processes_may_start_on_an_empty_cache(common: str, tmp_path: Path) -> None:
    env = {
        "GGMLB_CACHE_DIR": str(tmp_path / "ggmlb"),
        "POCL_CACHE_DIR": str(tmp_path / "pocl"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
        "CUPY_CACHE_DIR": str(tmp_path / "cupy"),
    }
    for process in [start(common + COMPUTE, **env) for _ in range(4)]:
        finish(process)
    if "OpenCL" in common.splitlines()[-1]:
        ours = {path.suffix for path in tmp_path.glob("ggmlb/opencl/*")}
        assert ours or any(tmp_path.glob("pocl/*"))
        assert ours <= {".bin"}  # nothing half written
