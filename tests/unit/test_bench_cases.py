"""The programs of the benchmarks run on the devices that they are meant for, and give what NumPy gives."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("device", ["OpenCL0", "CPU", "LLVM"])
@pytest.mark.parametrize("op", ["rms_norm", "soft_max_ext"])
def test_a_program_gives_what_numpy_gives(op: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    ours = importlib.import_module("opencl" if device == "OpenCL0" else "ops")
    numpy = importlib.import_module("libraries").Numpy
    case = next(c for c in ours.CASES if c.op == op and device in (c.device, "OpenCL0"))
    values = []
    for library in (next(iter(ours.LIBRARIES.values())), numpy):
        program = library(case, 2)
        program.run()
        values.append(np.array(program.values()))
        program.close()
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)
