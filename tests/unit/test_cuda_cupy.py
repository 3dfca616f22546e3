"""What is asked of CuPy is in CuPy, and takes what it is given. Needs CuPy, not a card."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")

from ggmlb.backends.cuda import CudaReg, cupy_driver  # noqa: E402
from ggmlb.backends.cuda.driver import OPTIONS, CopyKind, Driver  # noqa: E402
from ggmlb.core.dtypes import DType  # noqa: E402
from ggmlb.core.errors import BackendError, BackendUnavailable  # noqa: E402
from tests.support.gpus import DRIVER_CALLS  # noqa: E402
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


def calls(driver: Driver) -> dict[str, Callable[[], object]]:
    """Return a call of each method that asks CUDA for something, with numbers as the backend gives them."""
    p, host = 1 << 40, np.zeros(64, np.uint8)
    return {
        "facts": lambda: driver.facts(0),
        "on": lambda: driver.on(0).__enter__(),
        "memory_info": lambda: driver.memory_info(0),
        "malloc": lambda: driver.malloc(100),
        "free": lambda: driver.free(p),
        "trim": driver.trim,
        "device_of": lambda: driver.device_of(p),
        "pinned": lambda: driver.pinned(100),
        "register": lambda: driver.register(host),
        "unregister": lambda: driver.unregister(host),
        "stream_new": driver.stream_new,
        "stream_free": lambda: driver.stream_free(p),
        "is_pinned": lambda: driver.is_pinned(host),
        "stream_done": lambda: driver.stream_done(p),
        "stream_synchronize": lambda: driver.stream_synchronize(p),
        "stream_wait": lambda: driver.stream_wait(p, p),
        "event_new": lambda: driver.event_new(timed=True),
        "event_free": lambda: driver.event_free(p),
        "event_record": lambda: driver.event_record(p, p),
        "event_done": lambda: driver.event_done(p),
        "event_synchronize": lambda: driver.event_synchronize(p),
        "event_elapsed": lambda: driver.event_elapsed(p, p),
        "copy": lambda: driver.copy(p, p, 100, CopyKind.TO_DEVICE, p),
        "copy_2d": lambda: driver.copy_2d(p, 10, p, 10, 5, 3, CopyKind.TO_HOST, p),
        "copy_peer": lambda: driver.copy_peer(p, 0, p, 1, 5, p),
        "enable_peer": lambda: driver.enable_peer(0, 1),
        "disable_peer": lambda: driver.disable_peer(0, 1),
        "fill": lambda: driver.fill(p, 255, 10, p),
        "capture_begin": lambda: driver.capture_begin(p),
        "capture_end": lambda: driver.capture_end(p),
        "graph_free": lambda: driver.graph_free(p),
        "exec_new": lambda: driver.exec_new(p),
        "exec_launch": lambda: driver.exec_launch(p, p),
        "exec_free": lambda: driver.exec_free(p),
    }


WITHOUT_CUDA = {"array", "device_count", "is_out_of_memory", "view"}
"""Methods that ask CUDA for nothing, or are tested below."""
OF_OTHER_LIBRARIES = {"prepare", "bind", "blas", "collective", "exec_update"}


@no_card
def test_cupys_bindings_take_the_arguments_and_fail_for_want_of_a_driver_only() -> None:
    driver = cupy_driver.CupyDriver()
    todo = calls(driver)
    assert todo.keys() | WITHOUT_CUDA | OF_OTHER_LIBRARIES == DRIVER_CALLS
    for what, do in todo.items():
        with pytest.raises(cupy_driver.rt.CUDARuntimeError) as raised:
            do()
        assert raised.value.status == 35, what  # cudaErrorInsufficientDriver


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
