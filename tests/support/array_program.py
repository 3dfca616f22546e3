"""Leafs with values, and what an op makes of them on the CPU: for tests of the array rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Status
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.runtime.alloc import alloc_ctx_tensors

POISON = 0xFF  # NaN in every float type, so that an element that is not written shows


class Program:
    """Leafs with values, and their results."""

    def __init__(self, seed: int = 0) -> None:
        self.ctx = Context()
        self.values: dict[Tensor, np.ndarray] = {}
        self.rng = np.random.default_rng(seed)

    def leaf(
        self,
        ne: Sequence[int],
        dtype: DType = DType.F32,
        values: npt.ArrayLike | None = None,
        low: float = -1.0,
        high: float = 1.0,
    ) -> Tensor:
        tensor = self.ctx.new_tensor(dtype, ne)
        if values is None:
            values = self.rng.uniform(low, high, tensor.ne[::-1]).astype(np.float32)
        self.values[tensor] = np.asarray(values).reshape(tensor.ne[::-1])
        return tensor

    def array(self, tensor: Tensor) -> np.ndarray:
        return self.values[tensor]

    def compute(self, backend: Backend, *results: Tensor) -> Any:
        graph = Graph().build_forward_expand(*results)
        with alloc_ctx_tensors(self.ctx, backend) as buffer:
            buffer.clear(POISON)
            for tensor, values in self.values.items():
                tensor.set_array(values)
            assert backend.graph_compute(graph) is Status.SUCCESS
            arrays = [t.to_numpy().reshape(t.ne[::-1]) for t in results]
        return arrays[0] if len(arrays) == 1 else arrays


def close(got: np.ndarray, expected: np.ndarray, error: float = 1e-6) -> None:
    assert got.shape == expected.shape
    scale = np.abs(expected).max(initial=0) or 1
    np.testing.assert_allclose(got, expected, rtol=0, atol=error * scale)
