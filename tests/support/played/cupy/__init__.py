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
VisibleDeprecationWarning = np.exceptions.VisibleDeprecationWarning


class ndarray(NDArrayOperatorsMixin):
    """An array over memory of the played card, and no NumPy array; what computes with it runs at once."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        assert memptr is None or isinstance(memptr, MemoryPointer)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        item = np.dtype(dtype).itemsize
        span = item * int(np.prod(shape))
        if strides is not None and span:
            span = item + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memptr = memptr or cuda.alloc(span)
        self._memory = memptr.mem
        self._values: Any = np.ndarray(shape, dtype, raw(memptr.ptr, span), 0, strides)

    def _other(self, values: Any) -> Any:
        """Return an array of values, or a view that keeps the same memory."""
        if not isinstance(values, np.ndarray):
            return values
        if not np.may_share_memory(values, self._values):
            made = ndarray(values.shape, values.dtype)
            made._values[...] = values
            return made
        view = ndarray.__new__(ndarray)
        view._memory, view._values = self._memory, values
        return view

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        if out:
            options["out"] = tuple(_plain(a) for a in out)
        found = getattr(ufunc, method)(*(_plain(a) for a in inputs), **options)
        return out[0] if out else self._other(found)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        found = func(*_plain(args), **{key: _plain(value) for key, value in kwargs.items()})
        out = kwargs.get("out")
        return self._other(found) if out is None else out

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, key: Any) -> Any:
        return self._other(self._values[_plain(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._values[_plain(key)] = _plain(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._values, name)
        if not callable(found):
            return self._other(found)
        return lambda *args, **options: self._other(
            found(*_plain(args), **{key: _plain(value) for key, value in options.items()})
        )

    @property
    def data(self) -> MemoryPointer:
        address = self._values.__array_interface__["data"][0]
        return MemoryPointer(self._memory, address - self._memory.ptr)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        return self._values.copy()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": 1,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._memory.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        assert stream is None or stream >= -1
        return self


def _plain(value: Any) -> Any:
    """Return NumPy's arrays for ours, in tuples and lists too."""
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(v) for v in value)
    return value._values if isinstance(value, ndarray) else value


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    return a.get()


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> Any:
    """Of what has the interface, as CuPy reads it: memory, and the stream to wait for."""
    interface = a.__cuda_array_interface__
    address, read_only = interface["data"]
    assert not read_only
    if interface.get("stream") is not None:
        runtime.streamSynchronize(interface["stream"])
    memory = cuda.UnownedMemory(address, 0, a, 0)
    return ndarray(
        interface["shape"], np.dtype(interface["typestr"]), MemoryPointer(memory, 0), interface.get("strides")
    )


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> Any:
    kind, _ = array.__dlpack_device__()
    assert kind == 2, "not on CUDA"
    return array.__dlpack__(stream=1, max_version=(1, 0), copy=copy)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    values = np.arange(start, stop, step, dtype=dtype)
    made = ndarray(values.shape, values.dtype)
    made[...] = values
    return made


class RawModule:
    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Any = None,
        jitify: Any = None,
    ) -> None:
        assert isinstance(code, str)
        assert isinstance(options, tuple)
        self._code = code

    def get_function(self, name: str) -> Any:
        if "compile" in HOST.fail:
            log = f"{name}.cu(3): warning: no\n{name}.cu(7): error: identifier is undefined\n1 error detected"
            raise compiler.CompileException(log, self._code, name, ())
        return function_of(self._code, name)


class RawKernel:
    """The tests' only one: it spins for as many cycles as its argument says."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: Any = None,
    ) -> None:
        assert name == "spin"

    def __call__(self, grid: Any, block: Any, args: Any, **kwargs: Any) -> None:
        (cycles,) = args
        HOST.put(cuda.get_current_stream().ptr, Op("spin", lambda: time.sleep(cycles / 2e9)))


class _Pool:
    def free_all_blocks(self, stream: Any = None) -> None:
        HOST.trim()


def get_default_memory_pool() -> _Pool:
    return _Pool()


def get_default_pinned_memory_pool() -> _Pool:
    return _Pool()


def __getattr__(name: str) -> Any:
    return getattr(np, name)
