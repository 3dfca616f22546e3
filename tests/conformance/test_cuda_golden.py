"""The golden programs on CUDA: every case that the device does not decline must be what ggml computed.

On the played driver, whose kernels are compiled for the host, those run that reach a kernel, or a type of its
first operand, for the first time; `slow` adds the rest. On a card, all run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from golden import FAMILIES, claimed, first_of_their_kind, too_few, wrong
from gpus import CUDA, device_fixture, is_played

from ggmlb.backends.cuda.kernels import Lowering
from ggmlb.kernels import Launch, declines

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ggmlb import Graph
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.device import CudaDevice

device = device_fixture(*CUDA)

CLAIMED = {
    "binary": 77, "conv": 42, "flash_attn": 12, "get_rows": 25, "glu": 37, "loss_opt": 8, "misc": 12,
    "mul_mat": 86, "mul_mat_id": 19, "norm": 32, "out_prod": 5, "pool": 12, "programs": 18, "reduce": 26,
    "rope": 39, "set_rows_cpy": 105, "shape": 37, "softmax": 21, "ssm": 12, "unary": 126, "upscale": 20,
}  # fmt: skip
"""How many cases of each family the device computes, at least."""


def test_what_is_claimed(device: CudaDevice) -> None:
    assert too_few(device, CLAIMED) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, device: CudaDevice, stream: CudaBackend) -> None:
    def kernels(graph: Graph) -> set[Hashable]:
        lowering = Lowering(device.target, device.facts.capability)
        found: set[Hashable] = {node.op for node in graph.nodes if declines(node)}
        for node in graph.nodes:
            if declines(node) is None:
                found |= {
                    (r.kernel.name, dict(r.defines).get("a_T")) if isinstance(r, Launch) else "gemm"
                    for r in lowering.lower(node)
                }
        return found

    cases = claimed(device, family)
    if is_played(stream):
        cases = first_of_their_kind(cases, kernels)
    assert not (why := wrong(cases, stream, n_runs=3)), why  # by steps, captured, replayed


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_family(family: str, device: CudaDevice, stream: CudaBackend) -> None:
    assert not (why := wrong(claimed(device, family), stream)), why
