"""Random sequences of graphs over fake devices that decline ops give what the CPU alone gives."""

from __future__ import annotations

import random

import pytest

from ggmlb.interface.registry import device_by_name
from ggmlb.testing.fake import FakeReg
from tests.support.sequences import limit, run_sequence

N_SEQUENCES, N_STEPS = 40, 15


@pytest.mark.parametrize("part", [0, *[pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20)]])
def test_split_over_devices_gives_what_the_cpu_gives(part: int) -> None:
    for seed in range(part * N_SEQUENCES, (part + 1) * N_SEQUENCES):
        draw = random.Random(seed)
        reg = FakeReg(2, async_copies=draw.random() < 0.5)
        for device in reg.devices:
            limit(device, draw)
        run_sequence(seed, [*reg.devices, device_by_name("CPU")], N_STEPS)
        assert all(d.used == 0 and d.n_buffers == 0 for d in reg.devices)
