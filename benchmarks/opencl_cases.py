"""Ops for `opencl.py`, what they move and compute, and the libraries that compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ops_cases import F32, Ggml, Ggmlb, Library, _flash_attn, _mul_mat, _mul_mat_id
from ops_cases import Case as Program

from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType

M, K = 4096, 14336
SIZE = 1024


@dataclass(frozen=True)
class Case(Program):
    """A program, and what it has to do.

    Attributes:
        gbytes: Read and written, each tensor once.
        gflop: Computed.
        limit: What keeps OpenCL from being faster.
    """

    device: str = "OpenCL0"
    gbytes: float = 0.0
    gflop: float = 0.0
    limit: str = ""


class OpenCl(Ggmlb):
    def memories(self, device: Any) -> list[Any]:
        return [device.buffer_type, device.packed_buffer_type]  # on a CPU it is not offered by itself


class Numpy(Library):
    """Plain NumPy; weights are float32 before anything is measured."""

    def __init__(self, case: Case, threads: int) -> None:
        super().__init__()
        self._steps: list[Callable[[], Any]] = []
        case.build(self)
        self._values = None

    def leaf(self, dtype: DType, *ne: int, **given: Any) -> Any:
        if dtype is DType.I32:
            return np.asarray(given["values"])
        _, data = super().leaf(dtype, *ne, **given), self.data.pop()[1]
        rows = np.frombuffer(data, np.uint8).reshape(*ne[:0:-1], -1)
        return np.ascontiguousarray(dtypes.dequantize(rows, dtype), np.float32)

    def new_tensor(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        return None

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

    def soft_max(self, a: Any) -> None:
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
                out[tokens, slots] = b[tokens, 0] @ weight.T

        self.run, self._out = run, out

    def flash_attn_ext(self, q: Any, k: Any, v: Any, mask: Any, scale: float, *_: float) -> None:
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


LIBRARIES = {"OpenCL": OpenCl, "NumPy": Numpy, "ggml": Ggml}


def _product(name: str, limit: str, storage: str = "OpenCL0") -> Case:
    dtype = DType[name]
    gbytes = dtype.row_size(K) * M / 1e9
    nmse = 1e-6 if name == "F32" else 1e-3  # ggml rounds activations to the type that goes with the weight's
    return Case(
        "mul_mat", f"{name.lower()} {K} x {M}, n = 1", partial(_mul_mat, dtype, 1), None, nmse, storage,
        gbytes=gbytes, gflop=2 * K * M / 1e9, limit=limit,
    )  # fmt: skip


ROWS = (4096, 256)
DECODE = "arithmetic: unpacking a block takes more instructions than its products"
CASES = [
    _product("F32", "memory"),
    _product("F16", "memory"),
    _product("Q8_0", "memory"),
    _product("Q4_0", DECODE),
    _product("Q4_K", DECODE),
    _product("Q8_0", "memory", "OpenCL0_Packed"),
    _product("Q4_0", DECODE, "OpenCL0_Packed"),
    Case(
        "mul_mat", f"f32 {SIZE} x {SIZE}, n = {SIZE}",
        lambda c: c.mul_mat(c.leaf(F32, SIZE, SIZE, low=-0.2), c.leaf(F32, SIZE, SIZE, low=-0.2)),
        None, 1e-6, "OpenCL0",
        gbytes=3 * 4 * SIZE**2 / 1e9, gflop=2 * SIZE**3 / 1e9,
        limit="arithmetic: vectors of 8 floats; the processor has 16",
    ),
    Case(
        "rms_norm", "4096 x 256", lambda c: c.rms_norm(c.leaf(F32, *ROWS), 1e-5), None, 1e-6, "OpenCL0",
        gbytes=2 * 4 * 2**20 / 1e9, gflop=4 * 2**20 / 1e9,
        limit="memory (cache), and the start of the kernel",
    ),
    Case(
        "soft_max", "4096 x 256", lambda c: c.soft_max(c.leaf(F32, *ROWS)), None, 1e-6, "OpenCL0",
        gbytes=2 * 4 * 2**20 / 1e9, gflop=20 * 2**20 / 1e9, limit="arithmetic: exp as a polynomial",
    ),
    Case(
        "mul_mat_id", "f16 1024 x 2048 x 8, 2 of 8, n = 256", _mul_mat_id, None, 1e-5, "OpenCL0",
        gbytes=2 * 1024 * 2048 * 8 / 1e9, gflop=2 * 1024 * 2048 * 512 / 1e9, limit="arithmetic",
    ),
    Case(
        "flash_attn_ext", "128 x 256 x 32 on 512 f16, mask", _flash_attn, None, 1e-5, "OpenCL0",
        gbytes=2 * 2 * 128 * 512 * 8 / 1e9, gflop=4 * 128 * 256 * 512 * 32 * 0.75 / 1e9,
        limit="arithmetic",
    ),
]  # fmt: skip
