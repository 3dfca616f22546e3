"""OpenCL devices, streams and plans: what is OpenCL's alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ggmlb.backends.opencl.plan import OpenClPlan
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError, FreedError
from tests.support.gpus import OPENCL, Gate, device_fixture, scaled

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


def test_two_plans_share_no_kernel_object_and_give_theirs_back(stream: OpenClBackend) -> None:
    a, y, graph = scaled(stream)
    b, z, graph_b = scaled(stream, 3.0)
    a.set(np.ones(1000, np.float32))
    b.set(np.full(1000, 10, np.float32))
    plan, plan_b = stream.graph_plan_create(graph), stream.graph_plan_create(graph_b)
    assert isinstance(plan, OpenClPlan)
    assert isinstance(plan_b, OpenClPlan)
    kernels = [step[0] for step in plan.steps]
    assert kernels
    assert not any(k is step[0] for k in kernels for step in plan_b.steps)
    stream.graph_plan_compute(plan)
    stream.graph_plan_compute(plan_b)
    stream.synchronize()
    assert (y.to_numpy()[0], z.to_numpy()[0]) == (2, 30)
    stream.graph_plan_free(plan)
    again = stream.graph_plan_create(graph)
    assert isinstance(again, OpenClPlan)
    assert again.steps[0][0] is kernels[0]
    with pytest.raises(FreedError):
        stream.graph_plan_compute(plan)
