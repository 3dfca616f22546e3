"""PoCL on a processor that its compiler does not know: posed by the name that it would then have."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from processes import python

pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")

POSE = """
import os, struct
import pyopencl as cl
from ggmlb.backends.opencl import pocl

(device,) = [d for p in cl.get_platforms() if p.name.strip() == pocl.NAME for d in p.get_devices()]
processor = device.version.rpartition("gnu-")[2].encode()
memory = os.open("/proc/self/mem", os.O_RDWR)
if processor != pocl.UNKNOWN:
    addresses = struct.unpack("=256Q", os.pread(memory, 2048, device.int_ptr))
    def text(address):
        try:
            return os.pread(memory, 64, address).partition(b"\\0")[0]
        except (OSError, OverflowError):
            return b""
    (at,) = {a for a in addresses if text(a) == processor}
    os.pwrite(memory, pocl.UNKNOWN + b"\\0", at)

def builds():
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
    return lambda code: python("-c", POSE + code, **only_pocl, **quiet)


def test_a_processor_that_pocl_does_not_know_gets_a_name_that_it_does(run) -> None:
    done = run("assert not builds() and pocl.name_processor(device) and builds()")
    assert done.returncode == 0, done.stderr


TWICE = """
import numpy as np
text = np.frombuffer(pocl.UNKNOWN + bytes(9), np.uint8).copy()
words = np.zeros(256, np.uint64)
words[[80, 136]] = text.ctypes.data
class Posing:
    int_ptr = words.ctypes.data
assert pocl.name_processor(Posing)
assert text.tobytes().partition(b"\\0")[0] in (b"haswell", b"x86-64")
"""


def test_a_name_whose_address_stands_twice_is_found(run) -> None:
    done = run(TWICE)
    assert done.returncode == 0, done.stderr


def test_memory_that_says_something_else_is_left_alone(run) -> None:
    done = run("pocl.UNKNOWN = b'no such'\nassert not pocl.name_processor(device) and not builds()")
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
