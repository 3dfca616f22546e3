"""PoCL: programs built quickly; a processor that its compiler does not know, posed by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

from ggmlb import Context, DType
from ggmlb.backends import gpu
from tests.support.gpus import OPENCL, device_fixture
from tests.support.processes import python

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")

POSE = """
import os, struct
import pyopencl as cl
from ggmlb.backends.opencl import pocl

devices = [d for p in cl.get_platforms() if pocl.is_pocl(p) for d in p.get_devices()]
memory = os.open("/proc/self/mem", os.O_RDWR)

def text(address):
    try:
        return os.pread(memory, 64, address).partition(b"\\0")[0]
    except (OSError, OverflowError):
        return b""

for device in devices:
    processor = device.version.rpartition("gnu-")[2].encode()
    if processor != pocl.UNKNOWN:
        addresses = struct.unpack("=128Q", os.pread(memory, 1024, device.int_ptr))
        at = next(a for a in addresses if text(a) == processor)
        os.pwrite(memory, pocl.UNKNOWN + b"\\0", at)

def builds(device=devices[0]):
    program = cl.Program(cl.Context([device]), "__kernel void f(__global float *x) { x[0] *= 2; }")
    try:
        program.build()
    except cl.RuntimeError as error:
        assert "unknown target CPU" in str(error), error
        return False
    return True
"""


@pytest.fixture
def run(only_pocl: dict[str, str], tmp_path: object) -> Callable[[str], CompletedProcess[str]]:
    quiet = {"POCL_CACHE_DIR": str(tmp_path), "PYOPENCL_NO_CACHE": "1", "PYTHONWARNINGS": "ignore"}
    return lambda code, n=1: python(
        "-c", POSE + code, **only_pocl, **quiet, POCL_DEVICES=" ".join(["pthread"] * n)
    )


def test_a_processor_that_pocl_does_not_know_gets_a_name_that_it_does(run) -> None:
    done = run("assert not builds() and pocl.name_processor(devices[0]) and builds()")
    assert done.returncode == 0, done.stderr


def test_each_of_several_devices_gets_its_own(run) -> None:
    """Their descriptions lie one behind the other, and what follows the last may hold anything."""
    code = """
assert len(devices) == 3 and not any(builds(device) for device in devices)
for i, device in enumerate(devices):
    assert pocl.name_processor(device)
    assert [builds(d) for d in devices] == [True] * (i + 1) + [False] * (2 - i)
"""
    done = run(code, 3)
    assert done.returncode == 0, done.stderr


TWICE = """
import numpy as np
text = np.frombuffer(pocl.UNKNOWN + bytes(9), np.uint8).copy()
words = np.zeros(256, np.uint64)
words[[80, 100]] = text.ctypes.data
class Posing:
    int_ptr = words.ctypes.data
assert pocl.name_processor(Posing)
assert text.tobytes().partition(b"\\0")[0] in (b"haswell", b"x86-64")
"""


def test_a_name_whose_address_stands_twice_is_found(run) -> None:
    done = run(TWICE)
    assert done.returncode == 0, done.stderr


def test_memory_that_says_something_else_is_left_alone(run) -> None:
    done = run("pocl.UNKNOWN = b'no such'\nassert not pocl.name_processor(devices[0]) and not builds()")
    assert done.returncode == 0, done.stderr


UNNAMED = """
from unittest.mock import patch
import ggmlb
with patch.object(pocl, "is_of_unknown_processor", return_value=True), \\
     patch.object(pocl, "name_processor", return_value=False):
    assert not [d for d in ggmlb.devices() if d.name.startswith("OpenCL")]
    (reason,) = [u.reason for u in ggmlb.unavailable() if u.name.casefold() == "opencl"]
    assert "PoCL does not know this processor" in reason, reason
"""


def test_a_device_that_builds_nothing_is_listed_with_the_reason(run) -> None:
    done = run(UNNAMED)
    assert done.returncode == 0, done.stderr


device = device_fixture(OPENCL)


@pytest.mark.parametrize("missing", ["nothing", "a declaration"])
def test_a_program_is_built_quickly_and_else_as_others_are(
    device: OpenClDevice, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ggmlb.backends.opencl import pocl, program

    if not pocl.is_pocl(device.cl_device.platform):
        pytest.skip("needs PoCL")
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    if missing == "a declaration":
        unknown = "DEVICE_FN float unknown(float x) { return cbrt(x); }\n"
        monkeypatch.setattr(program, "source", lambda *args, **flags: gpu.source(*args, **flags) + unknown)
    built: list[bool] = []
    compiled = program.Programs._compile

    def compile_(self: object, text: str, options: list[str]) -> object:
        built.append("-DOWN_BUILTINS" in options)
        return compiled(self, text, options)

    monkeypatch.setattr(program.Programs, "_compile", compile_)
    ctx = Context()
    (launch,) = gpu.lower(ctx.relu(ctx.new_tensor(DType.F32, (8, 8))), gpu.Target(True, 2, 1))
    keys = [(launch.kernel, launch.defines, launch.wg, True)]
    ((_, kernel),) = program.Programs(device.context, device.cl_device, "x").borrow(keys)
    assert kernel.function_name == "map"
    assert built == ([True] if missing == "nothing" else [True, False])
    assert not list(tmp_path.rglob("*.bin"))
