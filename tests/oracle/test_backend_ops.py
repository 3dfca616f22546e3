"""One case of each op of ggml's own test-backend-ops, on each device; `make test-ggml` runs all cases."""

from __future__ import annotations

import pytest

import ggmlb
from tests.support.ggml_bridge import suite
from tests.support.outcomes import OK

if not (suite.FOLDER / "libtest-backend-ops.so").exists():
    pytest.skip("ggml's test is not built: python scripts/build_ggml_tests.py", allow_module_level=True)

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def first_cases() -> list[str]:
    """The first case of each op."""
    first: dict[str, str] = {}
    for case in suite.Worker("CPU").names():
        first.setdefault(case.partition("(")[0], case)
    return list(first.values())


@pytest.mark.parametrize("device", ["CPU", "LLVM", "OpenCL0", pytest.param("CUDA0", marks=pytest.mark.gpu)])
def test_the_first_case_of_each_op(device: str, first_cases: list[str]) -> None:
    try:
        ggmlb.device_by_name(device)
    except ggmlb.Error as error:
        pytest.skip(str(error))
    outcomes = suite.run(device, first_cases, n_workers=1)
    unexplained, gone = suite.judge(outcomes, suite.load_faults())
    assert not unexplained
    assert not gone
    assert sum(outcome.status == OK for outcome in outcomes) > 40
