"""Our own devices pass the conformance kit."""

from __future__ import annotations

import pytest

from ggmlb.errors import BackendUnavailable, RegistryError
from ggmlb.registry import device_by_name
from ggmlb.testing.run import Runner, Selection, tasks
from ggmlb.testing.xfail import ExpectedFailures

SAMPLE = 2
"""Cases of an op that are tested by default; `make test-all` takes all."""

RUNS = [
    *((device, mode, 0) for device in ("CPU", "OpenCL0") for mode in ("behaviour",)),
    *(("CPU", mode, 0) for mode in ("test", "support")),
    *(("OpenCL0", mode, SAMPLE) for mode in ("test", "support")),
    *(pytest.param("OpenCL0", mode, 0, marks=pytest.mark.slow) for mode in ("test", "support")),
]


@pytest.mark.parametrize(("name", "mode", "limit"), RUNS)
def test_it_passes(name, mode, limit):
    try:
        device = device_by_name(name)
    except (RegistryError, BackendUnavailable) as error:
        pytest.skip(str(error))
    known = ExpectedFailures.of(device)
    with Runner() as runner:
        results = [known.judge(r) for t in tasks(name, Selection(mode, limit=limit)) for r in runner.run(t)]
    assert sum(r.outcome.ran for r in results) > len(results) // 2
    wrong = [f"{r.family}: {r.id}: {r.reason}" for r in results if r.outcome.is_bad]
    assert not wrong, "\n".join(wrong)
