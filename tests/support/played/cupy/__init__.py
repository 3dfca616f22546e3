"""CuPy played by the host, for a process that has this folder before others on its path.

It has what the CUDA backend, its tests on a card and its benchmark ask of CuPy, with CuPy's own names and
parameters (`tests/unit/test_cuda_cupy.py` compares them), over the played driver. So what else runs on a card
only is run without one: `CupyDriver`, `tests/gpu`, `scripts/test_gpu.py`, `benchmarks/gpu.py`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from . import cuda
from ._host import HOST, Op, function_of, raw
from .cuda import MemoryPointer, compiler, runtime

__version__ = "played"


class ndarray(NDArrayOperatorsMixin):
    """An array over memory of the played card, and no NumPy array: it has views, and computes in place."""

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        span = np.dtype(dtype).itemsize * int(np.prod(shape))
        if strides is not None and span:
            span = np.dtype(dtype).itemsize
            span += sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        memptr = memptr or cuda.alloc(span)
        self._memory = memptr.mem
        self._values: Any = np.ndarray(shape, dtype, raw(memptr.ptr, span), 0, strides)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._values, name)
        if callable(found):
            return lambda *args: self._view(found(*args))
        return self._view(found) if isinstance(found, np.ndarray) else found

    def __getitem__(self, key: Any) -> ndarray:
        return self._view(self._values[key])

    def _view(self, values: Any) -> ndarray:
        assert np.may_share_memory(values, self._values)
        return ndarray(values.shape, values.dtype, self._at(values), values.strides)

    def _at(self, values: Any) -> MemoryPointer:
        return MemoryPointer(self._memory, values.__array_interface__["data"][0] - self._memory.ptr)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: tuple[ndarray]) -> ndarray:
        plain = (a._values if isinstance(a, ndarray) else a for a in inputs)
        getattr(ufunc, method)(*plain, out=out[0]._values)
        return out[0]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    @property
    def data(self) -> MemoryPointer:
        return self._at(self._values)

    def get(self) -> Any:
        return self._values.copy()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self.data.ptr if self.size else 0, False
        strides = None if self.flags.c_contiguous else self.strides
        facts = {"shape": self.shape, "typestr": self.dtype.str, "strides": strides, "data": data}
        return {**facts, "descr": self.dtype.descr, "stream": 1, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._memory.device_id

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        assert stream is None or stream >= -1
        return self


def asarray(a: Any) -> ndarray:
    """Of what has the interface, as CuPy reads it: memory, and the stream to wait for."""
    interface = a.__cuda_array_interface__
    address, read_only = interface["data"]
    assert not read_only
    if interface.get("stream") is not None:
        runtime.streamSynchronize(interface["stream"])
    place = MemoryPointer(cuda.UnownedMemory(address, 0, a, 0), 0)
    return ndarray(interface["shape"], np.dtype(interface["typestr"]), place, interface.get("strides"))


def from_dlpack(array: Any) -> Any:
    assert array.__dlpack_device__()[0] == 2, "not on CUDA"
    return array.__dlpack__(stream=1, max_version=(1, 0), copy=None)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    values = np.arange(start, stop, step, dtype=dtype)
    made = ndarray(values.shape, values.dtype)
    made._values[...] = values
    return made


class RawModule:
    def __init__(
        self, *, code: str, path: Any = None, options: tuple[str, ...] = (), backend: str = "nvrtc"
    ) -> None:
        assert isinstance(code, str) and isinstance(options, tuple)
        self._code = code

    def get_function(self, name: str) -> Any:
        if "compile" in HOST.fail:
            log = f"{name}.cu(3): warning: no\n{name}.cu(7): error: identifier is undefined\n1 error detected"
            raise compiler.CompileException(log, self._code, name, ())
        return function_of(self._code, name)


class RawKernel:
    """The tests' only one: it spins for as many cycles as its argument says."""

    def __init__(self, code: str, name: str) -> None:
        assert name == "spin"

    def __call__(self, grid: Any, block: Any, args: Any) -> None:
        (cycles,) = args
        HOST.put(cuda.get_current_stream().ptr, Op("spin", lambda: time.sleep(cycles / 2e9)))


class _Pool:
    def free_all_blocks(self) -> None:
        HOST.trim()


def get_default_memory_pool() -> _Pool:
    return _Pool()


def get_default_pinned_memory_pool() -> _Pool:
    return _Pool()


def __getattr__(name: str) -> Any:
    return getattr(np, name)
