"""Machines with several OpenCL platforms: two runtimes, one runtime twice, and broken ones beside a good one.

The loader finds runtimes by the files in OCL_ICD_VENDORS; a test starts a process with a folder of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ggmlb.core.enums import DeviceType
from tests.support.processes import COMMON, ROOT, finish, start
from tests.support.ptx.machine import compiler

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds libraries as Linux does")

SAME_DEVICES = """
import pyopencl as cl
found = [d for d in devices() if d.name.startswith("OpenCL")]
assert [d.name for d in found] == NAMES, found
assert len(cl.get_platforms()) == N_PLATFORMS, cl.get_platforms()
for device in found:
    with device.init_backend() as stream:
        a, y, graph = scaled(stream)
        a.set(np.ones(1000, np.float32))
        stream.graph_compute(graph)
        assert (y.to_numpy() == 2).all()
print("done")
"""

TWO_RUNTIMES = """
names = [d.name for d in devices() if d.name.startswith("OpenCL")]
assert len(set(names)) == len(names) == 2 * N_DEVICES, names
last = names[-1]
with init_by_name("OpenCL0") as first, init_by_name(last) as second, init_by_name("CPU") as cpu:
    assert first.device.cl_device.name == second.device.cl_device.name
    assert first.device.description != second.device.description
    assert first.device.context is not second.device.context
    a, y, graph = scaled(first)
    b, z, graph_b = scaled(second, 5.0)
    for i in range(5):
        a.set(np.full(1000, i, np.float32))
        first.graph_compute_async(graph)
        tensor_copy_async(first, second, y, b)
        second.graph_compute_async(graph_b)
        second.synchronize()
        assert (z.to_numpy() == 10 * i).all(), i
    assert not second.supports_buft(a.buffer.buft)
    try:
        second.event_wait(first.device.event_new())
    except BackendError as error:
        assert "OpenCL0" in str(error), error
    except Exception as error:
        assert "belongs to OpenCL0" in str(error), error

    streams, weights = (first, second), []
    for stream in streams:
        ctx = Context()
        weights.append(ctx.new_tensor(DType.F32, (64, 64)))
        alloc_ctx_tensors(ctx, stream).usage = BufferUsage.WEIGHTS
        weights[-1].set_array(np.eye(64, dtype=np.float32) * 3)
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(DType.F32, (64, 8)))
    y = ctx.set_output(ctx.mul_mat(weights[1], ctx.mul_mat(weights[0], x)))
    graph = Graph().build_forward_expand(y)
    with Scheduler([*streams, cpu]) as sched:
        sched.alloc_graph(graph)
        x.set_array(np.ones((8, 64), np.float32))
        sched.graph_compute(graph)
        assert np.allclose(y.to_numpy(), 9)
        assert [sched.get_tensor_backend(n).name for n in graph.nodes] == ["OpenCL0", last]
print("done")
"""


@pytest.fixture(scope="module")
def pocl() -> Path:
    """The library of the PoCL that PyOpenCL brings along."""
    pyopencl = pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")
    libraries = list((Path(pyopencl.__file__).parent / ".libs").glob("libpocl*.so*"))
    if len(libraries) != 1:
        pytest.skip("needs PyOpenCL with PoCL: pip install 'pyopencl[pocl]'")
    return libraries[0]


def install(pocl: Path, folder: Path, renamed: bool = False) -> dict[str, str]:
    """Copy the runtime; return the environment where it is found too, under another name if asked for.

    A link is not enough: the loader takes it for the same library.
    """
    library = folder / "runtime" / ".libs" / "libsecond.so"
    library.parent.mkdir(parents=True)
    (folder / "pocl_binary_distribution").symlink_to(pocl.parents[2] / "pocl_binary_distribution")
    # The loader would take a library for the other by the name that is written in it, too.
    soname = pocl.resolve().name.encode()
    content = pocl.read_bytes().replace(soname, soname.replace(b"lib", b"bil"))
    if renamed:
        content = content.replace(b"Portable Computi", b"portable computi")
    library.write_bytes(content)
    return vendors(folder, library)


def vendors(folder: Path, *libraries: Path) -> dict[str, str]:
    """Return the environment of a machine with these runtimes beside PyOpenCL's own."""
    (registered := folder / "vendors").mkdir()
    for i, library in enumerate(libraries):
        (registered / f"{i}.icd").write_text(f"{library}\n")
    return {"OCL_ICD_VENDORS": str(registered)}


def test_a_runtime_that_is_installed_twice_gives_each_device_once(pocl: Path, tmp_path: Path) -> None:
    code = COMMON + 'NAMES = ["OpenCL0"]\nN_PLATFORMS = 2\n' + SAME_DEVICES
    finish(start(code, POCL_DEVICES="pthread", **install(pocl, tmp_path)))


@pytest.mark.parametrize("n_devices", [1, 2])
def test_devices_of_the_same_name_on_two_platforms_work_side_by_side(
    pocl: Path, tmp_path: Path, n_devices: int
) -> None:
    env = install(pocl, tmp_path, renamed=True)
    code = f"{COMMON}\nN_DEVICES = {n_devices}\n{TWO_RUNTIMES}"
    finish(start(code, POCL_DEVICES=" ".join(["pthread"] * n_devices), **env))


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_broken_platforms_cost_no_device_of_a_good_one(pocl: Path, tmp_path: Path) -> None:
    library = tmp_path / "libbroken.so"
    source = ROOT / "tests" / "support" / "broken_icd.cpp"
    command = [compiler() or "g++", "-std=c++17", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    env = vendors(tmp_path, library)
    good = 'NAMES = ["OpenCL0", "OpenCL1"]\nN_PLATFORMS = 7\n'
    finish(start(COMMON + good + SAME_DEVICES, POCL_DEVICES="pthread pthread", **env))
    alone = """
import ggmlb
from ggmlb.backends.opencl import backend_reg
try:
    backend_reg().devices
except ggmlb.BackendUnavailable as error:
    for reason in ("ggmlb[opencl]", "INVALID_PLATFORM", "INVALID_DEVICE", "OUT_OF_HOST_MEMORY"):
        assert reason in str(error), error
    print("done")
"""
    finish(start(alone, POCL_DEVICES="none", **env))


@pytest.mark.parametrize("bits", range(16))
def test_a_device_that_says_several_types_is_of_one(bits: int) -> None:
    cl = pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")
    from ggmlb.backends.opencl.device import kind_of

    says_gpu, says_cpu = bits & cl.device_type.GPU, bits & cl.device_type.CPU
    expected = DeviceType.GPU if says_gpu else DeviceType.CPU if says_cpu else DeviceType.ACCEL
    assert kind_of(bits) is expected


@pytest.mark.skipif(shutil.which("oclgrind") is None, reason="needs Oclgrind: apt-get install oclgrind")
def test_a_simulator_of_all_types_is_a_gpu_to_all_who_ask() -> None:
    code = """
import subprocess, sys
import pyopencl as cl
from ggmlb import device_by_name
from ggmlb.core.enums import DeviceType
if "--inside" not in sys.argv:
    sys.exit(subprocess.call(["oclgrind", sys.executable, "-c", sys.orig_argv[-1], "--inside"]))
device = device_by_name("OpenCL0")
assert device.cl_device.type & cl.device_type.CPU and device.cl_device.type & cl.device_type.GPU
assert device.type in (DeviceType.GPU, DeviceType.IGPU) and not device.is_cpu
assert device.extra_bufts == (device.packed_buffer_type,)
with device.init_backend() as stream:
    assert not stream.target.on_cpu
print("done")
"""
    finish(start(code))
