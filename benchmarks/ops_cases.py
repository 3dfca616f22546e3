"""Programs of one op each, which ggmlb and ggml build and compute alike."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType

F32, F16, I32 = DType.F32, DType.F16, DType.I32

PAGE = mmap.PAGESIZE

PATTERN_ROWS = 64
"""Rows of different values; a large leaf repeats them, because quantising takes long."""


@dataclass(frozen=True)
class Case:
    """A program of one op.

    Attributes:
        op: Its name.
        what: Types and sizes, for the table.
        build: Makes the leafs and the result, with a `Library`.
        target: The least ratio of ggml's time to ours; None where there is none but `LEAST`.
        nmse: The greatest error in relation to ggml; 0 asks for equality.
        storage: Name of the buffer type that has the leafs here.
        note: Why the ratio is what it is, where it is low.
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


class Library:
    """Makes tensors and computes a program; ops are methods, as in ggml.h without `ggml_` and ctx."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.data: list[tuple[Any, bytes]] = []

    def leaf(self, dtype: DType, *ne: int, values: Any = None, low: float = -1, high: float = 1) -> Any:
        """A tensor with given or random values."""
        if values is None:
            rows = int(np.prod(ne[1:]))
            values = self.random.uniform(low, high, (min(rows, PATTERN_ROWS), ne[0])).astype(np.float32)
            data = dtypes.quantize(values, dtype).tobytes()
            size = dtype.row_size(ne[0]) * rows
            data = (data * -(-size // len(data)))[:size]
        else:
            data = dtypes.quantize(np.asarray(values), dtype).tobytes()
        tensor = self.new_tensor(dtype, ne)
        self.data.append((tensor, data))
        return tensor

    def new_tensor(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        raise NotImplementedError


class Ggmlb(Library):
    def __init__(self, case: Case, threads: int) -> None:
        import ggmlb

        super().__init__()
        self._leafs, self._nodes = ggmlb.Context(), ggmlb.Context()
        self._backend = ggmlb.init_by_name(case.device)
        reg, device = self._backend.device.reg, self._backend.device
        set_n_threads = reg.get_proc_address("set_n_threads")
        if set_n_threads is not None:
            set_n_threads(self._backend, threads)
        self.result = case.build(self)
        self._graph = ggmlb.Graph().build_forward_expand(self.result)
        (buft,) = (t for t in self.memories(device) if t.name == case.storage)
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

    def new_tensor(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        # Only weights may lie in CPU_F32: what a program makes first is its weight.
        ctx = self._nodes if self.data else self._leafs
        return ctx.new_tensor(dtype, ne)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nodes, name)

    def run(self) -> None:
        self._backend.graph_compute(self._graph)

    def values(self) -> Any:
        return np.ascontiguousarray(self.result.to_numpy()).reshape(-1)

    def close(self) -> None:
        for buffer in self._memory:
            buffer.free()
        self._backend.free()


class Ggml(Library):
    def __init__(self, case: Case, threads: int) -> None:
        import ggml

        super().__init__()
        self._ggml = ggml
        self._weights, self._ctx = (
            ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 20, mem_buffer=None, no_alloc=True))
            for _ in range(2)
        )
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

    def new_tensor(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        shape = (ctypes.c_int64 * 4)(*ne, *(1,) * (4 - len(ne)))
        is_weight = self._peer != "CPU" and not self.data
        return self._ggml.ggml_new_tensor(self._weights if is_weight else self._ctx, int(dtype), 4, shape)

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._ggml, f"ggml_{name}"), self._ctx)

    def run(self) -> None:
        self._ggml.ggml_backend_graph_compute(self._backend, self._graph)

    def values(self) -> Any:
        tensor = self.result.contents
        dtype = DType(tensor.type).numpy
        memory = (ctypes.c_ubyte * self._ggml.ggml_nbytes(self.result)).from_address(tensor.data)
        return np.frombuffer(memory, dtype).copy()

    def close(self) -> None:
        for buffer in (self._buffer, self._weight):
            if buffer is not None:
                self._ggml.ggml_backend_buffer_free(buffer)
        self._ggml.ggml_backend_free(self._backend)
        self._ggml.ggml_free(self._ctx)
        self._ggml.ggml_free(self._weights)


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


# -- products --------------------------------------------------------------------------------------

M, K = 4096, 14336
PRODUCTS = {"F32": 2.0, "F16": 2.0, "BF16": None, "Q8_0": 1.2, "Q4_0": 1.2, "Q4_K": 0.7, "Q6_K": 0.7}
"""Types of weights, with the target for plain memory."""


def _mul_mat(dtype: DType, n: int, c: Any) -> Any:
    # Values whose products do not cancel: ggml rounds activations to the type that goes with the weight's.
    return c.mul_mat(c.leaf(dtype, K, M, low=-0.2), c.leaf(F32, K, n, low=-0.2))


def _why_slow(name: str) -> str:
    """Why products with one row are slow."""
    if name == "F32":
        return ""
    if name.endswith("16"):
        return "not tuned: each weight becomes a float32 first"
    return "not tuned: each weight becomes a float32 first, ggml multiplies the blocks as integers"


def _products() -> list[Case]:
    cases = []
    for n, is_tuned in ((512, True), (1, False)):
        for storage in ("CPU", "CPU_F32") if is_tuned else ("CPU",):
            for name, plain in PRODUCTS.items():
                target = plain if storage == "CPU" else 1.2
                cases.append(
                    Case(
                        "mul_mat",
                        f"{name.lower()} {K} x {M}, n = {n}",
                        partial(_mul_mat, DType[name], n),
                        target if is_tuned else None,
                        1e-6 if name == "F32" else 1e-3,
                        storage,
                        "" if is_tuned else _why_slow(name),
                    )
                )
    return cases


# -- the rest, on about a million elements ---------------------------------------------------------

ROWS = (4096, 256)


def _rope(c: Any) -> Any:
    positions = c.leaf(I32, 256, values=np.arange(256))
    return c.rope_ext(c.leaf(F32, 128, 32, 256), positions, None, 128, 2, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)


def _set_rows(c: Any) -> Any:
    order = np.random.default_rng(1).permutation(256)
    return c.set_rows(c.leaf(F16, *ROWS), c.leaf(F32, *ROWS), c.leaf(DType.I64, 256, values=order))


def _get_rows(dtype: DType, c: Any) -> Any:
    rows = np.random.default_rng(1).integers(0, 1024, 256)
    return c.get_rows(c.leaf(dtype, 4096, 1024), c.leaf(I32, 256, values=rows))


def _flash_attn(c: Any) -> Any:
    q, k, v = c.leaf(F32, 128, 256, 32), c.leaf(F16, 128, 512, 8), c.leaf(F16, 128, 512, 8)
    mask = np.where(np.arange(512) <= np.arange(256, 512)[:, None], 0, -np.inf).astype(np.float32)
    return c.flash_attn_ext(q, k, v, c.leaf(F16, 512, 256, values=mask), 128**-0.5, 0.0, 0.0)


def _mul_mat_id(c: Any) -> Any:
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(8), (256, 1)), axis=1)[:, :2]
    weight, x = c.leaf(F16, 1024, 2048, 8, low=-0.2), c.leaf(F32, 1024, 1, 256, low=-0.2)
    return c.mul_mat_id(weight, x, c.leaf(I32, 2, 256, values=np.ascontiguousarray(ids)))


def _argsort(c: Any) -> Any:
    values = np.random.default_rng(1).permuted(np.tile(np.arange(4096.0), (256, 1)), axis=1)
    return c.argsort(c.leaf(F32, *ROWS, values=values.astype(np.float32)), 0)


def _ssm_scan(c: Any) -> Any:
    state, dim, heads, tokens = 16, 64, 32, 512
    s, x, dt = (
        c.leaf(F32, state, dim, heads, 1),
        c.leaf(F32, dim, heads, tokens, 1),
        c.leaf(F32, heads, tokens, 1),
    )
    a = c.leaf(F32, 1, heads, low=-2, high=-0.1)
    b, d = c.leaf(F32, state, 1, tokens, 1), c.leaf(F32, state, 1, tokens, 1)
    return c.ssm_scan(s, x, dt, a, b, d, c.leaf(I32, 1, values=np.zeros(1, np.int32)))


def _rwkv(c: Any) -> Any:
    s, heads, tokens = 64, 32, 512
    k, v, r = (c.leaf(F32, s, heads, tokens, low=-0.2, high=0.2) for _ in range(3))
    first, decay = c.leaf(F32, s, heads), c.leaf(F32, s, heads, tokens, low=0.3)
    return c.rwkv_wkv6(k, v, r, first, decay, c.leaf(F32, s * s * heads, 1))


def _rows(op: str, *args: Any, n: int = 1, **values: float) -> Callable[[Any], Any]:
    """An op of `n` tensors of ROWS."""
    return lambda c: getattr(c, op)(*(c.leaf(F32, *ROWS, **values) for _ in range(n)), *args)


SIZE = "4096 x 256"
CALLS = "NumPy takes 1.6 times as long to add a row to each as to scale; waking a thread takes 0.03 ms"
EXP = "several passes of NumPy, whose exp takes 0.35 (AVX-512) to 1.6 ns a value; ggml and LLVM need one"
HALVES = "NumPy takes 3.2 ns of a thread to make a half; ggml has the processor's instruction"
HALF_ROWS = "seven passes over half rows of 64 values, and NumPy begins its loop anew for each of them"
PYTHON_STEPS = "tokens follow each other, so the state passes through some NumPy calls for each"

CASES = [
    *_products(),
    Case("add", SIZE, _rows("add", n=2), 0.8, note=CALLS),
    Case(
        "add", f"{SIZE}, row of 4096", lambda c: c.add(c.leaf(F32, *ROWS), c.leaf(F32, 4096)), 0.8, note=CALLS
    ),
    Case("mul", SIZE, _rows("mul", n=2), 0.8, note=CALLS),
    Case("scale", SIZE, _rows("scale", 0.7), 0.8),
    Case("silu", SIZE, _rows("silu"), 0.8, note=EXP),
    Case("gelu", SIZE, _rows("gelu"), 0.8, 5e-6),
    Case("gelu_erf", SIZE, _rows("gelu_erf"), 0.8),
    Case("swiglu", f"2 x {SIZE}", _rows("swiglu_split", n=2), 0.8, note=EXP),
    Case("norm", SIZE, _rows("norm", 1e-5), 0.8),
    Case("rms_norm", SIZE, _rows("rms_norm", 1e-5), 0.8),
    Case("soft_max", SIZE, _rows("soft_max"), 0.8, note=EXP),
    Case(
        "soft_max_ext",
        "512 x 256 x 8, f16 mask",
        lambda c: c.soft_max_ext(c.leaf(F32, 512, 256, 8), c.leaf(F16, 512, 256), 0.5, 0.0),
        0.8,
        note=EXP,
    ),
    Case("rope", "128 x 32 x 256, neox", _rope, note=HALF_ROWS),
    Case("get_rows", "f32, 256 of 4096 x 1024", partial(_get_rows, F32), nmse=0),
    Case("get_rows", "q4_0, 256 of 4096 x 1024", partial(_get_rows, DType.Q4_0)),
    Case("set_rows", f"f32 -> f16, {SIZE}", _set_rows, note=HALVES),
    Case("cpy", f"f32 -> f16, {SIZE}", lambda c: c.cpy(c.leaf(F32, *ROWS), c.leaf(F16, *ROWS)), note=HALVES),
    Case("flash_attn_ext", "128 x 256 x 32 on 512 f16, mask", _flash_attn, nmse=1e-5),
    Case("mul_mat_id", "f16 1024 x 2048 x 8, 2 of 8, n = 256", _mul_mat_id, nmse=1e-5),
    Case(
        "conv_2d",
        "f16 3 x 3 x 64 -> 64, 128 x 128",
        lambda c: c.conv_2d(c.leaf(F16, 3, 3, 64, 64), c.leaf(F32, 128, 128, 64), 1, 1, 1, 1, 1, 1),
        nmse=1e-5,
    ),
    Case(
        "im2col",
        "3 x 3 on 128 x 128 x 8, to f16",
        lambda c: c.im2col(
            c.leaf(F16, 3, 3, 8, 1), c.leaf(F32, 128, 128, 8), 1, 1, 1, 1, 1, 1, True, int(F16)
        ),
    ),
    Case(
        "pool_2d",
        "max 2 x 2 of 256 x 256 x 16",
        lambda c: c.pool_2d(c.leaf(F32, 256, 256, 16), 0, 2, 2, 2, 2, 0.0, 0.0),
    ),
    Case("argsort", SIZE, _argsort, nmse=0),
    Case("sum_rows", SIZE, _rows("sum_rows", low=0)),
    Case("cumsum", SIZE, _rows("cumsum", low=0)),
    Case("concat", f"2 x {SIZE}, rows", _rows("concat", 1, n=2), nmse=0),
    Case(
        "repeat",
        f"1024 x 64 to {SIZE}",
        lambda c: c.repeat(c.leaf(F32, 1024, 64), c.leaf(F32, *ROWS)),
        nmse=0,
    ),
    Case(
        "upscale", "256 x 256 x 4 by 2, nearest", lambda c: c.upscale(c.leaf(F32, 256, 256, 4), 2, 0), nmse=0
    ),
    Case("upscale", "256 x 256 x 4 by 2, bilinear", lambda c: c.upscale(c.leaf(F32, 256, 256, 4), 2, 1)),
    Case("ssm_scan", "state 16, 64 x 32, 512 tokens", _ssm_scan, note=PYTHON_STEPS),
    Case("rwkv_wkv6", "64 x 32, 512 tokens", _rwkv, note=PYTHON_STEPS),
]
CASES += [replace(case, device="LLVM", note="") for case in CASES if case.target and case.op != "mul_mat"]

LIBRARIES = {"ggmlb": Ggmlb, "ggml": Ggml}
