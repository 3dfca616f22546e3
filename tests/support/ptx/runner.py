"""Steps of the CUDA lowering, run on the host: launches by the PTX machine, products by `HostBlas`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ggmlb import Context, cpu_buffer_from_ptr, tensor_alloc, view_init
from ggmlb.backends.cuda.cublas import CuBlas, Gemm
from ggmlb.backends.cuda.kernels import Step
from ggmlb.backends.gpu import Launch
from tests.support.ptx import FORWARD, Memory, alone
from tests.support.ptx.blas import HostBlas


class Runner:
    """Memory, a library, and the tables that were uploaded."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory or Memory()
        self.blas = HostBlas()
        self.workspace = alone(1024)
        self.cublas = CuBlas(self.blas, self.workspace.ctypes.data // 256 * 256 + 256, 512)
        self._tables: list[Any] = []

    def upload(self, table: np.ndarray[Any, Any]) -> int:
        """Keep a table, and return where it lies."""
        self._tables.append(table)
        return int(table.ctypes.data)

    def addresses(self, gemm: Gemm) -> list[int]:
        """Return where the operands and the result of a product lie."""
        return [self.memory.address(mem) for mem in gemm.mems]

    def run(self, steps: Iterable[Step], order: bool = FORWARD) -> None:
        """Run steps one after another."""
        for step in steps:
            if isinstance(step, Launch):
                self.memory.run(step, order)
            else:
                self.cublas.bind(step, self.addresses(step), self.upload)(7)


def place(ctx: Context) -> None:
    """Give each tensor of a context alone memory of its own, full of NaN."""
    for t in ctx.tensors:
        if t.view_src is None:
            tensor_alloc(cpu_buffer_from_ptr(alone(t.nbytes)), t, 0)
        else:
            view_init(t)
