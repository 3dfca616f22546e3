"""cuBLAS is called as its own headers say. Needs the headers, which come with the library; no card."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from ggmlb.backends.cuda import cublas

pathfinder = pytest.importorskip("cuda.pathfinder", reason="needs cuBLAS: pip install 'cupy-cuda13x[ctk]'")


def header(name: str, library: str) -> str:
    folder = pathfinder.find_nvidia_header_directory(library)
    file = Path(folder or "") / name
    if not file.is_file():
        pytest.skip(f"needs {name}: pip install 'cupy-cuda13x[ctk]'")
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read_text(encoding="utf-8"), flags=re.S)


def kind(parameter: str) -> object:
    """Return what ctypes must hand over for a parameter of C: handles are pointers, enums are ints."""
    if "*" in parameter or "[]" in parameter or re.match(r"(cublasHandle_t|cudaStream_t)\b", parameter):
        return ctypes.c_void_p
    word = parameter.removeprefix("const ").rpartition(" ")[0]
    return {"size_t": ctypes.c_size_t, "long long int": ctypes.c_longlong}.get(word, ctypes.c_int)


@pytest.mark.parametrize("name", cublas._SIGNATURES)
def test_functions_take_what_they_are_given(name: str) -> None:
    text = header("cublas_api.h", "cublas")
    told = re.search(rf"CUBLASWINAPI {name}\((.*?)\);", text, re.S)
    assert told is not None
    assert [kind(" ".join(p.split())) for p in told[1].split(",")] == cublas._SIGNATURES[name]


def test_numbers_are_those_of_the_headers() -> None:
    text = header("cublas_api.h", "cublas")
    numbers = {name: int(value) for name, value in re.findall(r"(CUBLAS_\w+) *= *(-?\d+)", text)}
    assert numbers["CUBLAS_COMPUTE_32F"] == cublas._COMPUTE_32F
    assert numbers["CUBLAS_COMPUTE_32F_FAST_TF32"] == cublas._COMPUTE_32F_FAST_TF32
    assert numbers["CUBLAS_GEMM_DEFAULT"] == cublas._DEFAULT_ALGORITHM
    assert numbers["CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION"] == cublas._NO_REDUCED_PRECISION_SUMS
    assert (numbers["CUBLAS_OP_N"], numbers["CUBLAS_OP_T"]) == (cublas._N, cublas._T)
    types = dict(re.findall(r"(CUDA_R_\w+) *= *(\d+)", header("library_types.h", "cudart")))
    names = {"f32": "CUDA_R_32F", "f16": "CUDA_R_16F", "bf16": "CUDA_R_16BF"}
    assert {t.name.lower(): value for t, value in cublas._TYPES.items()} == {
        t: int(types[name]) for t, name in names.items()
    }


def test_the_library_is_found_and_refuses_a_handle_where_there_is_no_card() -> None:
    header("cublas_api.h", "cublas")
    library = cublas.library()
    handle = ctypes.c_void_p()
    status = library.cublasCreate_v2(ctypes.byref(handle))
    assert (status == 0) == bool(handle.value)
    if not status:
        assert library.cublasDestroy_v2(handle) == 0
