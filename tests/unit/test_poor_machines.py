"""Machines that lack what others have: a home, a place to write, threads, files, memory.

Each program runs in a process of its own, which is put in that state for real.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import COMMON, ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and namespaces are Linux's")

CLONE_NEWUSER = 0x10000000
UID = 12345


def without_passwd_entry() -> None:
    """Give this process a user that nothing is known of, as containers do; it may write what it could."""
    uid, gid = os.geteuid(), os.getegid()
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER):
        os._exit(77)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{UID} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{UID} {gid} 1")


def run(
    code: str,
    cwd: Path | None = None,
    home: str | None = None,
    before: Callable[[], None] | None = None,
    **env: str,
) -> str:
    """Run a program in an environment of its own; return what it said, which ends with "done"."""
    settings = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "GGMLB_CACHE_DIR")}
    settings |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **env}
    if home is not None:
        settings["HOME"] = home
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code + '\nprint("done")'],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=settings,
        preexec_fn=before,
        check=False,
    )
    if done.returncode == 77 and not done.stdout:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
    return done.stdout


EACH_DEVICE = """
import ggmlb
for device in ggmlb.devices():
    try:
        backend = device.init_backend()
    except ggmlb.Error as error:
        print("refused:", error)
        continue
    a, y, graph = scaled(backend)
    a.set_array(np.ones(1000))
    try:
        backend.graph_compute(graph)
        assert (y.to_numpy() == 2).all()
        print("computed on", device.name)
    except ggmlb.Error as error:
        print("refused:", error)
"""


def test_no_home_and_no_passwd_entry(tmp_path: Path) -> None:
    code = f"""
import os
assert os.getuid() == {UID} and os.path.expanduser("~") == "~"
"""
    said = run(code + EACH_DEVICE, cwd=tmp_path, before=without_passwd_entry)
    assert "computed on CPU" in said and "computed on LLVM" in said
    assert not [p for p in tmp_path.rglob("*") if "ggmlb" in p.name]  # nor in a folder named ~


def test_a_model_in_a_home_that_there_is_not(tmp_path: Path) -> None:
    code = """
from ggmlb.models import ModelFolder
from ggmlb import ModelError
try:
    ModelFolder("~/model")
except ModelError as error:
    assert "home directory" in str(error), error
    print("refused")
"""
    assert run(code, cwd=tmp_path, before=without_passwd_entry) == "refused\ndone\n"


@pytest.mark.parametrize(
    "caches", [{}, {"GGMLB_CACHE_DIR": "ours", "POCL_CACHE_DIR": "pocl"}], ids=["", "set"]
)
def test_a_home_that_cannot_be_written(caches: dict[str, str], tmp_path: Path) -> None:
    caches = {name: str(tmp_path / folder) for name, folder in caches.items()}
    for folder in caches.values():
        os.mkdir(folder)
    said = run(EACH_DEVICE, cwd=tmp_path, home="/proc/1", **caches)  # where not even root can write
    assert "computed on CPU" in said and "computed on LLVM" in said
    if caches:
        assert "refused" not in said
        assert list((tmp_path / "ours" / "llvm").iterdir())


NO_THREADS = """
import threading
threading.stack_size((1 << 47) - (1 << 20))  # more than there are addresses: each start fails
try:
    threading.Thread(target=print).start()
    raise SystemExit("a thread started")
except RuntimeError:
    pass
"""


@pytest.mark.parametrize("device", ["CPU", "LLVM"])
def test_no_threads_to_be_had(device: str) -> None:
    code = f"""
backend = init_by_name("{device}", {{"n_threads": 4}})
ctx = Context()
w, x = ctx.new_tensor("f32", (256, 512)), ctx.new_tensor("f32", (256, 64))
y = ctx.soft_max(ctx.mul_mat(w, x))
alloc_ctx_tensors(ctx, backend)
rng = np.random.default_rng(0)
w.set_array(rng.normal(size=(512, 256)))
x.set_array(rng.normal(size=(64, 256)))
graph = Graph().build_forward_expand(y)
for _ in range(3):
    backend.graph_compute(graph)
expected = np.exp(x.to_numpy() @ w.to_numpy().T)
np.testing.assert_allclose(y.to_numpy(), expected / expected.sum(-1, keepdims=True), rtol=1e-3, atol=1e-6)
backend.free()
"""
    run(NO_THREADS + code, GGMLB_PROGRESS="1")


NO_FILES = """
import os, resource
def exhaust():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    held = []
    while True:
        try:
            held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return held
"""


@pytest.mark.parametrize("known", [True, False], ids=["opened before", "first seen"])
def test_no_file_descriptors(known: bool) -> None:
    """What is known goes on, what is not is ours to refuse; and once there are files again, all is well."""
    code = f"""
import ggmlb
if {known}:
    ggmlb.devices()
held = exhaust()
try:
    ggmlb.devices()
    ggmlb.init_best()
except ggmlb.Error as error:
    print("refused:", error)
for name in ("CPU", "LLVM"):
    try:
        backend = init_by_name(name)
        a, y, graph = scaled(backend)
        backend.graph_compute(graph)
    except ggmlb.Error as error:
        print("refused:", error)
for fd in held:
    os.close(fd)
ggmlb.load_all()
"""
    said = run(NO_FILES + code + EACH_DEVICE)
    assert "computed on CPU" in said and "computed on LLVM" in said


@pytest.mark.parametrize("device", ["CPU", "LLVM"])
def test_scratch_memory_exhausted(device: str) -> None:
    """Without room for scratch the error is ours, and once there is room again the graph is computed."""
    small = {
        "CPU": "ctx.argsort(ctx.new_tensor('f32', (64,)))",
        "LLVM": "ctx.mul_mat(w, ctx.new_tensor('f32', (8192, 64)))",
    }
    told = {
        "CPU": "failed to compute ARGSORT i32[8388608]: MemoryError",
        "LLVM": "no room for scratch memory",
    }
    large = {"CPU": "ctx.argsort(ctx.new_tensor('f32', (1 << 23,)))", "LLVM": "ctx.mul_mat(w, x)"}
    code = f"""
import resource
from ggmlb import AllocationError
backend = init_by_name("{device}", {{"n_threads": 1}})
ctx = Context()
w, x = ctx.new_tensor("q8_0", (8192, 64)), ctx.new_tensor("f32", (8192, 4096))
small = {small[device]}
y = {large[device]}
alloc_ctx_tensors(ctx, backend).clear()
backend.graph_compute(Graph().build_forward_expand(small))  # its kernels are loaded
graph = Graph().build_forward_expand(y)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 23), limits[1]))
try:
    backend.graph_compute(graph)
    raise SystemExit("it computed")
except AllocationError as error:
    assert {told[device]!r} in str(error), error
try:
    x.get()
    raise SystemExit("it was read")
except AllocationError as error:
    assert error.asked == x.nbytes
resource.setrlimit(resource.RLIMIT_AS, limits)
backend.graph_compute(graph)
backend.synchronize()
"""
    run(code)
