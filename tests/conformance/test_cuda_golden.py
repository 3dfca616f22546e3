"""The golden programs on CUDA: every case that the device does not decline must be what ggml computed.

On the played driver, whose kernels are compiled for the host, those run that reach a kernel, or a type of its
first operand, for the first time; `slow` adds the rest. On a card, all run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ggmlb import alloc_ctx_tensors
from ggmlb.backends.cuda.kernels import Lowering
from ggmlb.kernels import Launch, declines
from ggmlb.testing.programs import Case, load_cases

if TYPE_CHECKING:
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.device import CudaDevice

CASES = load_cases(Path(__file__).parents[1] / "golden/programs")
FAMILIES = sorted({case.family for case in CASES})

CLAIMED = {
    "binary": 77, "conv": 42, "flash_attn": 12, "get_rows": 25, "glu": 37, "loss_opt": 8, "misc": 12,
    "mul_mat": 86, "mul_mat_id": 19, "norm": 32, "out_prod": 5, "pool": 12, "programs": 18, "reduce": 26,
    "rope": 39, "set_rows_cpy": 105, "shape": 37, "softmax": 21, "ssm": 12, "unary": 126, "upscale": 20,
}  # fmt: skip
"""How many cases of each family the device computes, at least."""


def claimed(device: CudaDevice, family: str) -> list[Case]:
    cases = [case for case in CASES if case.family == family]
    return [case for case in cases if all(map(device.supports_op, case.build().graph.nodes))]


def wrong(case: Case, stream: CudaBackend, n_runs: int) -> str | None:
    """Return what is wrong with a case's outputs, if anything; each run starts from the same memory."""
    built = case.build()
    with alloc_ctx_tensors(built.ctx, stream) as buffer:
        plan = stream.graph_plan_create(built.graph)
        for i in range(n_runs):  # by steps, captured, replayed
            buffer.clear(0xFF)  # NaN, whatever is not written
            built.upload()
            stream.graph_plan_compute(plan)
            stream.synchronize()
            bad = {name: v.reason for name, v in built.compare().items() if not v.ok}
            if bad:
                return f"{case.id}, run {i}: {bad}"
    return None


def test_what_is_claimed(cuda_device: CudaDevice) -> None:
    found = {family: len(claimed(cuda_device, family)) for family in FAMILIES}
    assert {family: n for family, n in CLAIMED.items() if found[family] < n} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, cuda_device: CudaDevice, stream: CudaBackend) -> None:
    cases = claimed(cuda_device, family)
    if cuda_device.driver.xp.__name__ == "numpy":
        cases = first_of_their_kind(cases, cuda_device)
    bad = [why for case in cases if (why := wrong(case, stream, n_runs=3))]
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_family(family: str, cuda_device: CudaDevice, stream: CudaBackend) -> None:
    bad = [why for case in claimed(cuda_device, family) if (why := wrong(case, stream, n_runs=1))]
    assert not bad, "\n".join(bad)


def first_of_their_kind(cases: list[Case], device: CudaDevice) -> list[Case]:
    seen: set[object] = set()
    chosen = []
    for case in cases:
        nodes = case.build().graph.nodes
        lowering = Lowering(device.target, device.facts.capability)
        kinds: set[object] = {node.op for node in nodes if declines(node)}
        for node in nodes:
            if declines(node) is None:
                kinds |= {
                    (r.kernel.name, dict(r.defines).get("a_T")) if isinstance(r, Launch) else "gemm"
                    for r in lowering.lower(node)
                }
        if not kinds <= seen:
            seen |= kinds
            chosen.append(case)
    return chosen
