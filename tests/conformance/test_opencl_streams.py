"""OpenCL devices, streams and plans: what is OpenCL's alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError
from tests.support.gpus import OPENCL, Gate, device_fixture

if TYPE_CHECKING:
    from ggmlb.backends.opencl.backend import OpenClBackend
    from ggmlb.backends.opencl.device import OpenClDevice

device = device_fixture(OPENCL)


def test_the_device_tells_what_it_is(device: OpenClDevice) -> None:
    props = device.props
    assert props.type in (DeviceType.GPU, DeviceType.IGPU, DeviceType.ACCEL)
    assert props.caps.async_
    assert props.caps.events
    assert props.caps.host_buffer
    assert 0 < props.memory_free <= props.memory_total
    assert device.buffer_type.alignment == 128
    with pytest.raises(ArgumentError, match="known: work_split"):
        device.init_backend({"n_threads": 3})
    with pytest.raises(ArgumentError, match="'cpu' or 'gpu'"):
        device.init_backend({"work_split": "tpu"})


def test_an_event_lets_other_threads_run_while_waiting(stream: OpenClBackend) -> None:
    gate = Gate(stream)
    event = stream.device.event_new()
    stream.event_record(event)
    opener = gate.open_later()
    event.synchronize()
    opener.join()
