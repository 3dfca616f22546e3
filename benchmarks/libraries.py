"""Programs, and the libraries that build and compute them alike: ggmlb, ggml, and NumPy for some.

Ops and sizes are those of the kit's records (`ggmlb.testing.ops`), which `ggmlb test --mode perf` takes too.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np

from ggmlb.core import dtypes
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.ops.record import Perf
from ggmlb.testing.perf import leaf_data

PAGE = mmap.PAGESIZE
PATTERN_ROWS = 64
"""Rows of different values; a large leaf repeats them, because quantising takes long."""
SCALE = 2
"""Of the records' sizes. Mode `perf` takes 1 on a CPU, where caches hold more of the weights."""
ROUGH = {"mul_mat": 1e-3, "mul_mat_id": 1e-3, "flash_attn_ext": 2e-3, "conv_2d_direct": 1e-3, "gelu": 5e-6}
"""Errors beside ggml, which rounds operands to short types, sums the f16 values of one query in f16 (1.2e-3
with 4096 keys), and has tables of functions."""
UNORDERED = ("top_k",)
"""Ops whose results ggml gives in any order: they are not compared."""


@dataclass(frozen=True)
class Case:
    """A program, as a rule of one op.

    Attributes:
        op: Its name.
        what: Types and sizes, for the table.
        build: Makes the leafs and the result, with a `Library`.
        target: The least ratio of ggml's time to ours; None where there is none but `LEAST`.
        nmse: The greatest error in relation to ggml; 0 asks for equality.
        storage: Name of the buffer type that has the first leaf here.
        note: Why the ratio is what it is, where it is low, or what keeps the device from being faster.
        device: Name of the device that computes.
        peer: Memory of ggml's that has the first leaf there.
    """

    op: str
    what: str
    build: Callable[[Any], Any]
    target: float | None = None
    nmse: float = 1e-6
    storage: str = "CPU"
    note: str = ""
    device: str = "CPU"
    peer: str = "CPU"

    @classmethod
    def of(cls, perf: Perf, where: str = "", scale: int = SCALE, **facts: Any) -> Case:
        """Return the case of a record's size; `where` is added to its text."""
        error = float("inf") if perf.fn in UNORDERED else ROUGH.get(perf.fn, 1e-6)
        text = perf.text.replace(";", ", ").replace(",kv", ", kv").replace("=", " = ") + where
        return cls(perf.fn, text, lambda c: perf.build(c, scale), nmse=error, **facts)


def recorded(*fns: str) -> Iterator[Perf]:
    """Yield the sizes of the records of these functions; of all if none is named."""
    for record in RECORDS.values():
        yield from (perf for perf in record.perf if not fns or perf.fn in fns)


class Library:
    """Makes tensors and computes a program; ops are methods, as in ggml.h without `ggml_` and ctx."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.data: list[tuple[Any, bytes]] = []

    def new_tensor(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        """A tensor with the values that mode `perf` gives it."""
        return self._keep(dtype, ne, leaf_data(dtype, ne).tobytes())

    def leaf(self, dtype: DType, *ne: int, values: Any = None, low: float = -1, high: float = 1) -> Any:
        """A tensor with given or random values."""
        if values is None:
            rows = int(np.prod(ne[1:]))
            values = self.random.uniform(low, high, (min(rows, PATTERN_ROWS), ne[0])).astype(np.float32)
            data = np.resize(dtypes.quantize(values, dtype), dtype.row_size(ne[0]) * rows).tobytes()
        else:
            data = dtypes.quantize(np.asarray(values), dtype).tobytes()
        return self._keep(dtype, ne, data)

    def _keep(self, dtype: DType, ne: tuple[int, ...], data: bytes) -> Any:
        tensor = self._make(dtype, ne)
        self.data.append((tensor, data))
        return tensor

    def _make(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        raise NotImplementedError


class Ggmlb(Library):
    params: dict[str, Any] | None = None
    """Of its stream."""

    def __init__(self, case: Case, threads: int) -> None:
        import ggmlb

        super().__init__()
        self._leafs, self._nodes = ggmlb.Context(), ggmlb.Context()
        self._backend = ggmlb.init_by_name(case.device, self.params)
        use_threads(self._backend, threads)
        self.result = case.build(self)
        self._graph = ggmlb.Graph().build_forward_expand(self.result)
        (buft,) = (t for t in self.memories(self._backend.device) if t.name == case.storage)
        self._memory = [
            ggmlb.alloc_ctx_tensors(self._leafs, buft),
            ggmlb.alloc_ctx_tensors(self._nodes, self._backend),
        ]
        self._memory[0].usage = ggmlb.BufferUsage.WEIGHTS
        for tensor, data in self.data:
            tensor.set(np.frombuffer(data, np.uint8))

    def memories(self, device: Any) -> list[Any]:
        extra_bufts = device.reg.get_proc_address("dev_get_extra_bufts")
        return [device.buffer_type, *(extra_bufts(device) if extra_bufts is not None else ())]

    def _make(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        # Only weights may lie in CPU_F32: what a program makes first is its weight.
        ctx = self._nodes if self.data else self._leafs
        return ctx.new_tensor(dtype, ne)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nodes, name)

    def run(self) -> None:
        self._backend.graph_compute(self._graph)

    def values(self) -> Any:
        return np.ascontiguousarray(self.result.to_numpy(), np.float32).reshape(-1)

    def close(self) -> None:
        for buffer in self._memory:
            buffer.free()
        self._backend.free()


def use_threads(backend: Any, threads: int) -> None:
    """Let a stream use so many threads, if its device has threads to be chosen."""
    set_n_threads = backend.device.reg.get_proc_address("set_n_threads")
    if set_n_threads is not None:
        set_n_threads(backend, threads)


class GgmlContext:
    """A context of ggml: its functions without the `ggml_` before the name and without the context argument.

    Args:
        nbytes: Room for the tensors' descriptions [bytes].
    """

    def __init__(self, nbytes: int) -> None:
        import ggml

        self._ggml = ggml
        params = ggml.ggml_init_params(mem_size=nbytes, mem_buffer=None, no_alloc=True)
        self.ctx = ggml.ggml_init(params)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(self._ggml, f"ggml_{name}"), self.ctx)

    def new_tensor(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        return getattr(self._ggml, f"ggml_new_tensor_{len(ne)}d")(self.ctx, int(dtype), *ne)

    def weight(self, dtype: DType, *ne: int) -> Any:
        """Return a tensor that counts as placed."""
        tensor = self.new_tensor(dtype, ne)
        tensor.contents.data = 4096  # not null
        return tensor

    def set_input(self, tensor: Any) -> Any:
        self._ggml.ggml_set_input(tensor)
        return tensor

    def set_output(self, tensor: Any) -> Any:
        self._ggml.ggml_set_output(tensor)
        return tensor

    def free(self) -> None:
        self._ggml.ggml_free(self.ctx)


@cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(Context, name))


def c_arguments(name: str, *args: Any) -> list[Any]:
    """Return the arguments of an op as C takes them: all, also those that have a default here."""
    bound = _signature(name).bind(None, *args)
    bound.apply_defaults()
    _, *values = bound.arguments.values()
    return [int(value) if isinstance(value, IntEnum) else value for value in values]


class Ggml(Library):
    def __init__(self, case: Case, threads: int) -> None:
        import ggml

        super().__init__()
        self._ggml = ggml
        self._weights, self._ctx = (GgmlContext(1 << 20).ctx for _ in range(2))
        self._peer = case.peer
        self._backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self.result = case.build(self)
        self._graph = ggml.ggml_new_graph(self._ctx)
        ggml.ggml_build_forward_expand(self._graph, self.result)
        self._buffer = ggml.ggml_backend_alloc_ctx_tensors(self._ctx, self._backend)
        _use_huge_pages(ggml.ggml_backend_buffer_get_base(self._buffer), self._nbytes())
        self._weight = None
        for i, (tensor, data) in enumerate(self.data):
            if i == 0 and case.peer != "CPU":
                buft = extra_bufts(ggml, self._backend)[case.peer]
                self._weight = ggml.ggml_backend_alloc_ctx_tensors_from_buft(self._weights, buft)
                ggml.ggml_backend_buffer_set_usage(self._weight, ggml.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
                ggml.ggml_backend_tensor_set(tensor, data, 0, len(data))
                if not ggml.ggml_backend_supports_op(self._backend, self.result):
                    raise RuntimeError(f"ggml does not compute '{case.what}' with weights in {case.peer}")
            else:
                ctypes.memmove(tensor.contents.data, data, len(data))

    def _nbytes(self) -> int:
        return int(self._ggml.ggml_backend_buffer_get_size(self._buffer))

    def _make(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        shape = (ctypes.c_int64 * 4)(*ne, *(1,) * (4 - len(ne)))
        is_weight = self._peer != "CPU" and not self.data
        return self._ggml.ggml_new_tensor(self._weights if is_weight else self._ctx, int(dtype), 4, shape)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ggml, f"ggml_{name}")
        return lambda *args: function(self._ctx, *c_arguments(name, *args))

    def run(self) -> None:
        self._ggml.ggml_backend_graph_compute(self._backend, self._graph)

    def values(self) -> Any:
        tensor = self.result.contents
        memory = (ctypes.c_ubyte * self._ggml.ggml_nbytes(self.result)).from_address(tensor.data)
        return dtypes.dequantize(np.frombuffer(memory, np.uint8), DType(tensor.type))

    def close(self) -> None:
        for buffer in (self._buffer, self._weight):
            if buffer is not None:
                self._ggml.ggml_backend_buffer_free(buffer)
        self._ggml.ggml_backend_free(self._backend)
        self._ggml.ggml_free(self._ctx)
        self._ggml.ggml_free(self._weights)


class OnGgml(Ggmlb):
    """ggml by the device `ggml:CPU`, of any library that `ggmlb` finds; a graph crosses in microseconds."""

    def __init__(self, case: Case, threads: int) -> None:
        storage = "CPU" if case.peer == "CPU" else f"ggml:{case.peer}"
        super().__init__(replace(case, device="ggml:CPU", storage=storage), threads)


def extra_bufts(ggml: Any, backend: Any) -> dict[str, Any]:
    """The kinds of memory that ggml's CPU has for weights, by name."""
    device = ggml.ggml_backend_get_device(backend)
    reg = ggml.ggml_backend_dev_backend_reg(device)
    address = ggml.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
    pointers = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
    found = {}
    for i in itertools.count():
        if not pointers[i]:
            return found
        found[ggml.ggml_backend_buft_name(pointers[i]).decode()] = pointers[i]


def _use_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages under untouched memory, as NumPy does for its arrays, which hold our tensors."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    first, last = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if madvise is not None and hasattr(mmap, "MADV_HUGEPAGE") and last > first:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)


class Numpy(Library):
    """Plain NumPy; weights are float32 before anything is measured."""

    def __init__(self, case: Case, threads: int) -> None:
        super().__init__()
        case.build(self)

    def _keep(self, dtype: DType, ne: tuple[int, ...], data: bytes) -> Any:
        rows = np.frombuffer(data, np.uint8).reshape(*ne[:0:-1], -1)
        return rows.view(np.int32) if dtype is DType.I32 else dtypes.dequantize(rows, dtype)

    def mul_mat(self, a: Any, b: Any) -> None:
        out, transposed = np.empty((b.shape[0], a.shape[0]), np.float32), a.T
        self.run = lambda: np.matmul(b, transposed, out=out)
        self._out = out

    def rms_norm(self, a: Any, eps: float) -> None:
        out = np.empty_like(a)

        def run() -> None:
            mean = np.einsum("ij,ij->i", a, a) / np.float32(a.shape[1])
            np.multiply(a, (1 / np.sqrt(mean + np.float32(eps)))[:, None], out=out)

        self.run, self._out = run, out

    def soft_max_ext(self, a: Any) -> None:
        out = np.empty_like(a)

        def run() -> None:
            np.subtract(a, a.max(1, keepdims=True), out=out)
            np.exp(out, out=out)
            np.divide(out, out.sum(1, keepdims=True), out=out)

        self.run, self._out = run, out

    def mul_mat_id(self, a: Any, b: Any, ids: Any) -> None:
        out = np.empty((*ids.shape, a.shape[1]), np.float32)

        def run() -> None:
            for expert, weight in enumerate(a):
                tokens, slots = np.nonzero(ids == expert)
                out[tokens, slots] = b[tokens, slots % b.shape[1]] @ weight.T

        self.run, self._out = run, out

    def flash_attn_ext(self, q: Any, k: Any, v: Any, mask: Any, scale: float) -> None:
        n_head, n_row, size = q.shape
        out = np.empty((n_row, n_head, size), np.float32)
        grouped = q.reshape(len(k), -1, n_row, size)

        def run() -> None:
            scores = grouped @ k[:, None].swapaxes(-1, -2)
            scores *= np.float32(scale)
            scores += mask
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            out[...] = (scores @ v[:, None]).reshape(n_head, n_row, size).swapaxes(0, 1)

        self.run, self._out = run, out

    def values(self) -> Any:
        return self._out.reshape(-1)

    def close(self) -> None:
        pass
