"""Random sequences of graphs on one scheduler over devices of several kinds; cards are played."""

from __future__ import annotations

import pytest

from ggmlb import Device, device_by_name
from ggmlb.backends.cuda import CudaReg
from ggmlb.testing.fake import FakeReg
from tests.support.gpus import host_driver
from tests.support.sequences import run_sequence

N_SEQUENCES, N_STEPS = 8, 25


@pytest.mark.parametrize("part", [0, *[pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5)]])
@pytest.mark.parametrize(
    "names",
    [
        "Fake0 Fake1",
        "LLVM CPU",
        "OpenCL0 LLVM CPU",
        "Fake0 OpenCL0 LLVM ggml:CPU CPU",
        "CUDA0 CUDA1 LLVM CPU",
    ],
)
def test_graphs_give_the_same_on_a_scheduler_that_had_others(names: str, part: int) -> None:
    made: dict[str, Device] = {device.name: device for device in FakeReg(2).devices}
    if "CUDA0" in names:
        made |= {device.name: device for device in CudaReg(host_driver(n_devices=2)).devices}
    devices = [made.get(name) or device_by_name(name) for name in names.split()]
    for seed in range(part * N_SEQUENCES, (part + 1) * N_SEQUENCES):
        run_sequence(seed, devices, N_STEPS)
