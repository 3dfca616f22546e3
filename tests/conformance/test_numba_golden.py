"""The golden programs on the Numba device, with every instruction set that this processor runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ggmlb import alloc_ctx_tensors
from ggmlb.testing.programs import Case, load_cases

pytest.importorskip("llvmlite")

from ggmlb.backends.numba import backend_reg
from ggmlb.backends.numba.llvm.host import levels_here

if TYPE_CHECKING:
    from ggmlb.interface import Backend

CASES = load_cases(Path(__file__).parents[1] / "golden/programs")
DEVICE = backend_reg().devices[0]
LEVELS = [level.name for level in levels_here()]

CLAIMED = {
    "binary": 54, "flash_attn": 11, "get_rows": 21, "glu": 37, "misc": 6, "mul_mat": 74, "mul_mat_id": 19,
    "norm": 25, "programs": 6, "rope": 39, "set_rows_cpy": 83, "softmax": 13, "unary": 126,
}  # fmt: skip
"""How many cases of each family the kernels compute, at least."""


def claimed(family: str) -> list[Case]:
    cases = [case for case in CASES if case.family == family]
    return [case for case in cases if all(map(DEVICE.supports_op, case.build().graph.nodes))]


def run(case: Case, backend: Backend) -> str | None:
    """Return what is wrong with a case's outputs, if anything."""
    built = case.build()
    with alloc_ctx_tensors(built.ctx, backend) as buffer:
        buffer.clear(0xFF)  # NaN, whatever is not written
        built.upload()
        backend.graph_compute(built.graph)
        bad = {name: v.reason for name, v in built.compare().items() if not v.ok}
    return f"{case.id}: {bad}" if bad else None


@pytest.mark.parametrize("simd", LEVELS)
@pytest.mark.parametrize("family", sorted(CLAIMED))
def test_family(family: str, simd: str) -> None:
    cases = claimed(family)
    assert len(cases) >= CLAIMED[family]
    if simd != LEVELS[0]:
        cases = cases[::8]
    with DEVICE.init_backend({"simd": simd, "n_threads": 3}) as stream:
        wrong = [why for case in cases if (why := run(case, stream))]
    assert not wrong, "\n".join(wrong)
