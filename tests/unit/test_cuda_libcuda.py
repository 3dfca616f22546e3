"""libcuda is called as its own header says. Needs the header, which comes with CUDA; no card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ggmlb.backends.cuda.driver import ARGUMENTS

pathfinder = pytest.importorskip("cuda.pathfinder", reason="needs cuda.h: pip install 'cupy-cuda13x[ctk]'")
cupy_driver = pytest.importorskip("ggmlb.backends.cuda.cupy_driver", reason="needs CuPy")

NUMBERS = {
    "PORTABLE": "CU_MEMHOSTALLOC_PORTABLE", "READ_ONLY": "CU_MEMHOSTREGISTER_READ_ONLY",
    "NON_BLOCKING": "CU_STREAM_NON_BLOCKING", "TIMED": "CU_EVENT_DEFAULT",
    "NOT_TIMED": "CU_EVENT_DISABLE_TIMING", "RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "HOST": "CU_MEMORYTYPE_HOST", "DEVICE": "CU_MEMORYTYPE_DEVICE",
    "MEMORY_TYPE": "CU_POINTER_ATTRIBUTE_MEMORY_TYPE", "ORDINAL": "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "N_UNITS": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", "INTEGRATED": "CU_DEVICE_ATTRIBUTE_INTEGRATED",
    "MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "SHARED": "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "PROGRAMMATIC_STREAM_SERIALIZATION": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    "INVALID_VALUE": "CUDA_ERROR_INVALID_VALUE", "OUT_OF_MEMORY": "CUDA_ERROR_OUT_OF_MEMORY",
    "NOT_READY": "CUDA_ERROR_NOT_READY", "PEER_ALREADY_ENABLED": "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
}  # fmt: skip
POINTERS = ("CUcontext", "CUdeviceptr", "CUevent", "CUfunction", "CUgraph", "CUgraphExec", "CUstream")
KINDS = {"unsigned int": "u", "unsigned char": "b", "size_t": "l", "unsigned long long": "l"}


@pytest.fixture(scope="module")
def header() -> str:
    file = Path(pathfinder.find_nvidia_header_directory("cudart") or "") / "cuda.h"
    if not file.is_file():
        pytest.skip("needs cuda.h: pip install 'cupy-cuda13x[ctk]'")
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read_text(encoding="utf-8"), flags=re.S)


def kind(parameter: str) -> str:
    """Return the letter of a C parameter, as in `ARGUMENTS`; devices and enums are ints."""
    word = parameter.strip().removeprefix("const ").rpartition(" ")[0]
    return "p" if "*" in parameter or word in POINTERS else KINDS.get(word, "i")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_functions_take_what_they_are_given(name: str, header: str) -> None:
    renamed = re.findall(r"#define\s+(cu\w+)\s+(?:__CUDA_API_PT\w+\()?(cu\w+)", header)
    declared = next((short for short, exported in renamed if exported == name), name)
    told = re.search(rf"CUDAAPI {declared}\((.*?)\);", header, re.S)
    assert told is not None
    assert "".join(map(kind, told[1].split(","))) == ARGUMENTS[name]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_of_the_header(name: str, header: str) -> None:
    found = re.search(rf"\b{NUMBERS[name]}\s*=?\s*(\w+)", header)
    assert found is not None
    assert getattr(cupy_driver, name) == int(found[1], 0)
