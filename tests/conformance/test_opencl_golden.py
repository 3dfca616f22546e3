"""The golden programs on OpenCL: every case that the device does not decline must be what ggml computed.

On a CPU-type device such as PoCL, the work split of GPUs is run too: the kernels are the same text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ggmlb import alloc_ctx_tensors, device_by_name
from ggmlb.testing.programs import Case, load_cases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ggmlb.interface import Backend

CASES = load_cases(Path(__file__).parents[1] / "golden/programs")
FAMILIES = sorted({case.family for case in CASES})

CLAIMED = {
    "binary": 75, "get_rows": 25, "glu": 37, "misc": 10, "mul_mat": 86, "mul_mat_id": 19, "norm": 27,
    "programs": 5, "set_rows_cpy": 103, "softmax": 13, "unary": 126,
}  # fmt: skip
"""How many cases of each family the kernels compute, at least."""


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def stream(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with device_by_name("OpenCL0").init_backend({"work_split": request.param}) as backend:
        yield backend


def run(case: Case, backend: Backend) -> str | None:
    """Return what is wrong with a case's outputs, if anything."""
    built = case.build()
    with alloc_ctx_tensors(built.ctx, backend) as buffer:
        buffer.clear(0xFF)  # NaN, whatever is not written
        built.upload()
        backend.graph_compute(built.graph)
        bad = {name: v.reason for name, v in built.compare().items() if not v.ok}
    return f"{case.id}: {bad}" if bad else None


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, stream: Backend) -> None:
    claimed = [
        case
        for case in CASES
        if case.family == family and all(map(stream.supports_op, case.build().graph.nodes))
    ]
    assert len(claimed) >= CLAIMED.get(family, 0)
    wrong = [why for case in claimed if (why := run(case, stream))]
    assert not wrong, "\n".join(wrong)
