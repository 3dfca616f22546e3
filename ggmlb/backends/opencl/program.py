"""Programs: built once for a device and a set of macros; and kernel objects, each of which one step owns."""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyopencl as cl
import pyopencl.invoker

from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.kernels import Defines, Kernel, source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ggmlb.kernels import Launch

_Key = tuple[Kernel, Defines, int, bool]

_ARG_TYPES = {
    "tensor": (None, np.int64, *(np.int32,) * 4, *(np.int64,) * 4),
    "int": (np.int32,),
    "float": (np.float32,),
}


_making = threading.Lock()
_invokers: dict[Any, Any] = {}


@contextmanager
def _invokers_in_memory() -> Iterator[None]:
    """Keep the Python code that PyOpenCL makes for kernels with the same parameters.

    For every kernel object, PyOpenCL reads that code from a data base on disk, which takes a millisecond:
    a hundred times more than all else. The lock `_making` must be held.
    """
    module: Any = pyopencl.invoker
    generate = module.generate_enqueue_and_set_args

    def remembered(*args: Any, **kwargs: Any) -> Any:
        # As in PyOpenCL's own key, the devices make no difference.
        key = args, tuple((name, value) for name, value in kwargs.items() if name != "devs")
        if key not in _invokers:
            _invokers[key] = generate(*args, **kwargs)
        return _invokers[key]

    module.generate_enqueue_and_set_args = remembered
    try:
        yield
    finally:
        module.generate_enqueue_and_set_args = generate


class Programs:
    """Builds the kernels of launches, and lends kernel objects to plans; those given back serve again.

    Compiled code is kept on disk by the driver, or by PyOpenCL where the driver does not.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self._context = context
        self._device = device
        self._built: dict[_Key, cl.Program] = {}
        self._idle: dict[_Key, list[cl.Kernel]] = {}

    def borrow(self, launch: Launch, on_cpu: bool) -> tuple[_Key, cl.Kernel]:
        """Return a kernel object that nobody else uses, after the key to give it back by."""
        key = (launch.kernel, launch.defines, launch.wg, on_cpu)
        idle = self._idle.setdefault(key, [])
        try:
            return key, idle.pop()
        except IndexError:
            return key, self._make(key)

    def give_back(self, loans: list[tuple[_Key, cl.Kernel]]) -> None:
        """Take back kernel objects; commands that are queued keep the arguments they were queued with."""
        for key, kernel in loans:
            self._idle[key].append(kernel)
        loans.clear()

    def _make(self, key: _Key) -> cl.Kernel:
        kernel = key[0]
        with cl_errors(f"build kernel {kernel.name} with {dict(key[1])}"), _making, _invokers_in_memory():
            program = self._built.get(key)
            if program is None:
                program = self._built[key] = self._build(key)
            made = cl.Kernel(program, kernel.name)
            made.set_scalar_arg_dtypes([t for p in kernel.params for t in _ARG_TYPES[p.kind]])
        return made

    def _build(self, key: _Key) -> cl.Program:
        kernel, defines, wg, on_cpu = key
        options = ["-w", "-cl-std=CL1.2", f"-DWG={wg}", *(f"-D{name}={value}" for name, value in defines)]
        if on_cpu:
            options.append("-DON_CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # PoCL logs even when it has nothing to say
            program = cl.Program(self._context, source(kernel, "opencl"))
            program.build(options, devices=[self._device])
        return program
