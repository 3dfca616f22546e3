"""What is asked of CuPy is in CuPy, and takes what it is given. Needs CuPy, not a card."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")

from ggmlb.backends.cuda import CudaReg, cupy_driver  # noqa: E402
from ggmlb.backends.cuda.driver import OPTIONS  # noqa: E402
from ggmlb.core.dtypes import DType  # noqa: E402
from ggmlb.core.errors import BackendError, BackendUnavailable  # noqa: E402
from tests.support.ptx import OF_CUPY  # noqa: E402

ROOT = Path(__file__).parents[2]
NAMES = {"rt": cupy_driver.rt, "cu": cupy_driver.cu, "cupy": cupy}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # where there is no NCCL
    from cupy.cuda import nccl  # noqa: F401
USERS = [
    "ggmlb/backends/cuda/cupy_driver.py",
    "tests/support/gpus.py",
    "scripts/test_gpu.py",
    "benchmarks/gpu_measure.py",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/gpu").glob("test_*.py"))),
]

no_card = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a card")


def found(node: ast.AST) -> Any:
    """Return what an expression such as `cupy.cuda.Stream` names; None where it begins otherwise."""
    if isinstance(node, ast.Name):
        return NAMES.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = found(node.value)
        return None if owner is None else getattr(owner, node.attr)
    return None


def parameters(thing: Any) -> list[inspect.Parameter] | None:
    """Return what a function or class of CuPy takes, by its own word or its docstring's; None if untold."""
    try:
        return [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    except (TypeError, ValueError):
        pass
    line = (getattr(thing, "__doc__", "") or "").strip().split("\n")[0]
    told = re.match(r"\w+(?:\.\w+)*\((.*?)\)( ->.*)?$", line)
    if told is None:
        return None
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parts = [p.split("=") for p in told[1].split(", ") if p not in ("", "*", "\\\\*", "/", "self")]
    return [
        inspect.Parameter(p[0].split()[-1], kind, default=p[1] if len(p) > 1 else inspect.Parameter.empty)
        for p in parts
    ]


@pytest.mark.parametrize("file", USERS)
def test_names_are_there_and_calls_fit_them(file: str) -> None:
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        thing = found(node.func) if isinstance(node, ast.Call) else found(node)  # raises if there is none
        if not isinstance(node, ast.Call) or (told := parameters(thing)) is None:
            continue
        if any(p.kind is p.VAR_POSITIONAL for p in told) or any(
            isinstance(a, ast.Starred) for a in node.args
        ):
            continue
        required = sum(p.default is p.empty for p in told)
        n_given = len(node.args) + len(node.keywords)
        assert required <= n_given <= len(told), ast.unparse(node)
        assert {k.arg for k in node.keywords} <= {p.name for p in told}, ast.unparse(node)


@no_card
def test_a_missing_library_of_the_driver_is_an_error_of_cuda() -> None:
    driver = cupy_driver.CupyDriver()
    for call in (driver.device_count, driver.stream_new, lambda: driver.free(1), lambda: driver.on(0)):
        with pytest.raises(cupy_driver.rt.CUDARuntimeError) as raised:
            call()
        assert raised.value.status == 35  # cudaErrorInsufficientDriver


def test_arrays_lie_where_they_should() -> None:
    driver = cupy_driver.CupyDriver()
    owner = object()
    base = driver.array(1 << 40, 100, 0, owner)
    assert (base.shape, base.dtype, base.data.ptr) == ((100,), np.uint8, 1 << 40)
    view = driver.view(base, (2, 3), np.dtype(np.float32), 8, (16, 4))
    assert (view.shape, view.strides, view.data.ptr) == ((2, 3), (16, 4), (1 << 40) + 8)
    assert view.data.mem._owner is owner


@pytest.mark.parametrize("dtype", [t for t in DType if not t.is_quantized], ids=lambda t: t.name)
def test_arrays_are_of_every_type_that_holds_numbers(dtype: DType) -> None:
    driver, item = cupy_driver.CupyDriver(), dtype.numpy.itemsize
    view = driver.view(driver.array(1 << 40, 100, 0, None), (3, 2), dtype.numpy, 8, (2 * item, item))
    assert (view.dtype, view.strides) == (dtype.numpy, (2 * item, item))
    empty = driver.view(driver.array(0, 0, 0, None), (0, 2), dtype.numpy, 0, (2 * item, item))
    assert (empty.size, empty.dtype) == (0, dtype.numpy)


def test_kernels_are_compiled_with_the_options_that_cupy_adds() -> None:
    from cupy._core import core
    from cupy.cuda import compiler

    try:
        options = core.assemble_cupy_compiler_options(OPTIONS)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert {o.lstrip("-") for o in options if not o.startswith("-I")} <= {
        o.lstrip("-") for o in (*OPTIONS, *OF_CUPY)
    }
    of_compiler = inspect.getsource(compiler)
    assert all(f"-{o}" in options or f"options += ('{o}',)" in of_compiler for o in OF_CUPY)


def test_an_argument_block_is_found_where_the_driver_looks_for_it() -> None:
    packet = cupy_driver._Packet(b"abc")
    assert list(packet._extra)[::2] == [1, 2, None]  # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
    assert packet.address % 8 == 0


@no_card
def test_what_the_compiler_says_becomes_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ggmlb import Context
    from ggmlb.backends.gpu import Target, lower

    driver, ctx = cupy_driver.CupyDriver(), Context()
    (launch, *_) = lower(ctx.relu(ctx.new_tensor(DType.F32, (4,))), Target(False, 2, 128))
    monkeypatch.setattr(driver, "on", lambda device: memoryview(b""))
    log = "map.cu(3): warning: odd\nmap.cu(7): error: identifier is undefined"
    for capability, error, advice in (
        (90, cupy_driver.CompileException(log, "", "map.cu", ()), "9.0: map.cu.7.: error: identifier"),
        (70, cupy_driver.CompileException("nvrtc: error: invalid value", "", "", ()), r"7\.5 on; .*cuda12"),
        (90, RuntimeError("Failed to find CUDA headers"), r"ggmlb\[cuda\]"),
    ):
        facts = cupy_driver.Facts("", "", capability, 1, 0, 0, False)
        monkeypatch.setattr(driver, "facts", lambda device, facts=facts: facts)

        class Module:
            def __init__(self, error: Exception = error, **_: Any) -> None:
                self.error = error

            def get_function(self, name: str) -> Any:
                raise self.error

        monkeypatch.setattr(cupy, "RawModule", Module)
        with pytest.raises(BackendError, match=advice):
            driver.prepare([launch], 0)


@no_card
def test_without_a_card_it_is_unavailable_with_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match="driver"):
        _ = CudaReg().devices
