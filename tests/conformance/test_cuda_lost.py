"""A card that is lost: whatever is asked of it then is answered by our error, and none of CUDA's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggmlb import BackendError
from ggmlb.backends.cuda import CudaReg
from ggmlb.core.errors import BackendBroken, BackendUnavailable
from ggmlb.interface import tensor_copy, tensor_copy_async
from tests.support.gpus import first, host_driver, scaled


def actions(device: Any) -> dict[str, Callable[[], object]]:
    """Return what a user may do with a device that worked until now."""
    stream, other = device.init_backend(), device.init_backend()
    a, y, graph = scaled(stream)
    b, _, _ = scaled(other)
    _, _, new = scaled(stream, 3.0)
    event, out = device.event_new(), np.zeros(1000, np.float32)
    a.set(out)
    for _ in range(2):
        stream.graph_compute(graph)
    stream.event_record(event)
    assert y.buffer is not None
    freed = device.buffer_type.alloc_buffer(256)
    host = np.zeros(4096, np.uint8)
    return {
        "set": lambda: a.set(out),
        "get": y.get,
        "memset": lambda: a.memset(0),
        "set_async": lambda: stream.set_tensor_async(a, out),
        "get_async": lambda: stream.get_tensor_async(y, out),
        "copy": lambda: tensor_copy(a, b),
        "copy_async": lambda: tensor_copy_async(stream, other, a, b),
        "compute": lambda: stream.graph_compute(graph),
        "plan": lambda: stream.graph_plan_compute(stream.graph_plan_create(new)),
        "record": lambda: stream.event_record(event),
        "wait": lambda: other.event_wait(event),
        "event synchronize": event.synchronize,
        "event_new": device.event_new,
        "free an event": event.free,
        "clear": y.buffer.clear,
        "free and allocate": lambda: (freed.free(), device.buffer_type.alloc_buffer(256)),
        "memory": lambda: device.memory,
        "init_backend": device.init_backend,
        "buffer_from_host_ptr": lambda: device.buffer_from_host_ptr(host),
        "synchronize": stream.synchronize,
        "free": other.free,
    }


def test_a_lost_card_is_told_by_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGMLB_CUDA_REGISTER_HOST", raising=False)
    device = first("played")
    todo = actions(device)
    device.driver.cards.lost = True
    for what, do in todo.items():
        with pytest.raises(BackendError) as raised:
            do()
        assert type(raised.value).__module__ == "ggmlb.core.errors", what


def test_host_memory_is_given_without_the_card() -> None:
    device = first("played")
    device.driver.cards.lost = True
    with pytest.warns(RuntimeWarning, match="CUDA_Host: the runtime gave no pinned memory"):
        assert device.host_buffer_type.alloc_buffer(4096).why_not_pinned is not None
    with pytest.warns(RuntimeWarning, match="no pinned memory"):
        device.host_buffer_type.alloc_buffer(4096).free()


@pytest.mark.parametrize(("status", "why"), [(700, "illegal memory"), (802, "fabricmanager")])
def test_a_card_that_cannot_be_asked_is_a_broken_backend(status: int, why: str) -> None:
    from tests.support.host_driver import HostDriver

    class Silent(HostDriver):
        def facts(self, device: int) -> Any:
            raise self.errors[0](status)

    with pytest.raises(BackendBroken, match=why):
        _ = CudaReg(Silent()).devices


def test_a_driver_older_than_cupys_cuda_is_unavailable() -> None:
    driver = host_driver()
    driver.cards.version = 12090
    with pytest.raises(BackendUnavailable, match="older than this CuPy's CUDA"):
        _ = CudaReg(driver).devices


def test_an_array_on_a_lost_card_is_refused() -> None:
    device = first("played")
    device.driver.cards.lost = True

    class Array:
        __cuda_array_interface__ = {"data": (1 << 40, False), "stream": 1}  # noqa: RUF012

    with pytest.raises(BackendError, match="use an array's memory on CUDA0"):
        device.adopt(Array())
