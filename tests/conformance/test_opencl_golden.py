"""The golden programs on OpenCL: every case that the device does not decline must be what ggml computed.

All of them run with the device's own work split. With the other one, which the same kernels serve, those run
that reach a kernel, or a type of its first operand, for the first time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ggmlb import alloc_ctx_tensors, device_by_name
from ggmlb.backends.opencl.backend import OpenClBackend
from ggmlb.backends.opencl.device import OpenClDevice
from ggmlb.kernels import Target, lower
from ggmlb.testing.programs import Case, load_cases

if TYPE_CHECKING:
    from ggmlb.interface import Backend

CASES = load_cases(Path(__file__).parents[1] / "golden/programs")

CLAIMED = {
    "binary": 77, "conv": 42, "flash_attn": 12, "get_rows": 26, "glu": 37, "misc": 12, "mul_mat": 89,
    "mul_mat_id": 19, "norm": 30, "pool": 12, "programs": 18, "reduce": 26, "rope": 39, "set_rows_cpy": 105,
    "shape": 37, "softmax": 19, "ssm": 12, "unary": 126, "upscale": 20,
}  # fmt: skip
"""How many cases of each family the kernels compute, at least."""


@pytest.fixture(scope="module")
def device() -> OpenClDevice:
    found = device_by_name("OpenCL0")
    assert isinstance(found, OpenClDevice)
    return found


def claimed(device: OpenClDevice, family: str) -> list[Case]:
    cases = [case for case in CASES if case.family == family]
    return [case for case in cases if all(map(device.supports_op, case.build().graph.nodes))]


def run(case: Case, backend: Backend) -> str | None:
    """Return what is wrong with a case's outputs, if anything."""
    built = case.build()
    with alloc_ctx_tensors(built.ctx, backend) as buffer:
        buffer.clear(0xFF)  # NaN, whatever is not written
        built.upload()
        backend.graph_compute(built.graph)
        bad = {name: v.reason for name, v in built.compare().items() if not v.ok}
    return f"{case.id}: {bad}" if bad else None


@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_family(family: str, device: OpenClDevice) -> None:
    cases = claimed(device, family)
    assert len(cases) >= CLAIMED.get(family, 0)
    with device.init_backend() as stream:
        wrong = [why for case in cases if (why := run(case, stream))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", sorted(CLAIMED))
def test_family_with_the_other_work_split(family: str, device: OpenClDevice) -> None:
    with device.init_backend({"work_split": "gpu" if device.is_cpu else "cpu"}) as stream:
        assert isinstance(stream, OpenClBackend)
        cases = first_of_their_kind(claimed(device, family), stream.target)
        assert cases
        wrong = [why for case in cases if (why := run(case, stream))]
    assert not wrong, "\n".join(wrong)


def first_of_their_kind(cases: list[Case], target: Target) -> list[Case]:
    seen: set[tuple[str, str | None]] = set()
    chosen = []
    for case in cases:
        launches = [launch for node in case.build().graph.nodes for launch in lower(node, target)]
        kinds = {(launch.kernel.name, dict(launch.defines).get("a_T")) for launch in launches}
        if not kinds <= seen:
            seen |= kinds
            chosen.append(case)
    return chosen
