"""Devices and streams: of each GPU backend, unless a module says `device = device_fixture(...)`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ggmlb import Device
from tests.support.gpus import CUDA, OPENCL, Gate, device_fixture

device = device_fixture(OPENCL, *CUDA)


@pytest.fixture
def stream(device: Device) -> Iterator[Any]:
    with device.init_backend() as backend:
        yield backend
        while Gate.closed:  # where a test failed
            Gate.closed[0].open()


@pytest.fixture
def other(device: Device) -> Iterator[Any]:
    with device.init_backend() as backend:
        yield backend


@pytest.fixture(scope="session")
def only_pocl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which PoCL is the only OpenCL runtime: POCL_DEVICES says what it shows."""
    pyopencl = pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")
    folder = tmp_path_factory.mktemp("vendors")
    if (Path(pyopencl.__file__).parent / ".libs" / "pocl.icd").exists():
        return {"OCL_ICD_VENDORS": str(folder)}  # PyOpenCL has its own
    for file in Path(os.environ.get("OCL_ICD_VENDORS", "/etc/OpenCL/vendors")).glob("*.icd"):
        if "pocl" in file.read_text():
            shutil.copy(file, folder)
    return {"OCL_ICD_VENDORS": str(folder)}
