"""Kernels loaded without LLVM compute as those that LLVM loads; what cannot be loaded so is declined."""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from llvmlite import binding, ir

from ggmlb.backends.llvm.codegen import host, loader
from ggmlb.backends.llvm.codegen.emit import Emitter
from ggmlb.backends.llvm.codegen.library import Library, function, optimised
from ggmlb.backends.llvm.kernels import convert
from ggmlb.core.dtypes import DType, quantize
from ggmlb.core.errors import BackendError

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="LLVM loads the code of others"
)

SYMBOL = "kernel"


def compiled(dtype: str) -> bytes:
    """A kernel that converts blocks to f32, with tables among its constants."""
    return Library(host.target_for(None)).compile(convert.copy, ("f32", dtype), SYMBOL)


def converted(address: int, dtype: str) -> np.ndarray[Any, Any]:
    blocks = quantize(np.random.default_rng(0).standard_normal((9, 256), np.float32), DType.parse(dtype))
    out = np.zeros((9, 256), np.float32)
    row = blocks.view(np.uint8).reshape(9, -1).strides[0]
    rows = [256, 9, 1, 1, 1, out.ctypes.data, 1024, 0, 0, blocks.ctypes.data, row, 0, 0]
    args = np.array(rows, np.int64)
    function(address, 4)(args.ctypes.data, 0, 1, 0)
    return out


@pytest.mark.parametrize("dtype", ["iq4_nl", "q4_k", "f16"])
def test_as_llvm_loads(dtype: str) -> None:
    code = compiled(dtype)
    ours = loader.load(code, SYMBOL)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), host.target_for(None).machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    assert ours is not None
    found = converted(ours, dtype)
    assert found.any()
    np.testing.assert_array_equal(found, converted(engine.get_function_address(SYMBOL), dtype))


def test_other_processors_are_left_to_llvm() -> None:
    neon = next(level for level in host.LEVELS if level.name == "neon")
    target = host.CompileTarget(neon, "generic", "+neon,+dotprod", "aarch64-unknown-linux-gnu")
    machine = target.machine(jit=False)
    code = machine.emit_object(optimised(target, machine, convert.copy, ("f32", "f16"), SYMBOL))
    assert loader.load(code, SYMBOL) is None


def calls_a_library(k: Emitter) -> None:
    k.call("sched_yield", ir.VoidType())


def test_calls_of_libraries_are_left_to_llvm() -> None:
    library = Library(host.target_for(None))
    assert loader.load(library.compile(calls_a_library, (), SYMBOL), SYMBOL) is None
    function(library.address(calls_a_library), 4)(0, 0, 1, 0)


def test_a_missing_function_is_left_to_llvm() -> None:
    assert loader.load(compiled("f16"), "another") is None


def test_no_executable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.mmap, "PROT_EXEC", 1 << 20)  # which no system gives
    with pytest.raises(BackendError, match="no executable memory"):
        loader.load(compiled("f16"), SYMBOL)
