"""CUDA's runtime as CuPy binds it: its functions' names, parameters and results, over the played driver."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np

from ggmlb.backends.cuda.driver import CopyKind, address_of

from .._host import HOST, HostError, raw

# Constants of CuPy's.
hostAllocPortable = 1
streamNonBlocking = 1
streamCaptureModeRelaxed = 2
eventDefault = 0
eventDisableTiming = 2

NOT_READY = 600
PEER_ALREADY_ENABLED = 704
LEGACY = 1
"""The handle of the default stream, which has nothing to do here."""

_peers: set[tuple[int, int]] = set()
_pinned: dict[int, Any] = {}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(f"cudaError{status}: {text}")
        self.status = status


def getDeviceCount() -> int:
    return HOST.device_count()


def getDevice() -> int:
    """The current device; -1 where none was set, so that it is set to none again, and its use is noticed."""
    current = HOST._current_device
    return -1 if current is None else current


def setDevice(device: int) -> None:
    HOST._local.device = None if device < 0 else device


def getDeviceProperties(device: int) -> dict[str, Any]:
    facts = HOST.facts(device)
    domain, bus, slot = facts.pci_bus_id.removesuffix(".0").split(":")
    return {
        "name": facts.name.encode(),
        "major": facts.capability // 10,
        "minor": facts.capability % 10,
        "multiProcessorCount": facts.n_units,
        "integrated": int(facts.is_integrated),
        "pciDomainID": int(domain, 16),
        "pciBusID": int(bus, 16),
        "pciDeviceID": int(slot, 16),
    }


def deviceGetPCIBusId(device: int) -> str:
    return HOST.facts(device).pci_bus_id


def deviceSynchronize() -> None:
    for stream in list(HOST.streams):
        HOST.stream_synchronize(stream)


def driverGetVersion() -> int:
    return 13000


def runtimeGetVersion() -> int:
    return 13020


def memGetInfo() -> tuple[int, int]:
    return HOST.memory_info(HOST._device())


def malloc(size: int) -> int:
    return HOST.malloc(size)


def free(ptr: int) -> None:
    HOST.free(ptr)


def pointerGetAttributes(ptr: int) -> Any:
    try:
        return SimpleNamespace(type=2, device=HOST.device_of(ptr))
    except HostError:
        return SimpleNamespace(type=0, device=-2)  # host memory that CUDA knows nothing of


def hostAlloc(size: int, flags: int) -> int:
    array = HOST.pinned(size)
    _pinned[address_of(array)] = array
    return address_of(array)


def freeHost(ptr: int) -> None:
    _pinned.pop(ptr)[...] = 0xFF


def hostRegister(ptr: int, size: int, flags: int) -> None:
    HOST.register(raw(ptr, size))


def hostUnregister(ptr: int) -> None:
    HOST.unregister(raw(ptr, 1))


def streamCreateWithFlags(flags: int) -> int:
    assert flags == streamNonBlocking
    return HOST.stream_new()


def streamDestroy(stream: int) -> None:
    HOST.stream_free(stream)


def streamSynchronize(stream: int) -> None:
    if stream > LEGACY or stream in HOST.streams:
        HOST.stream_synchronize(stream)


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    HOST.stream_wait(stream, event)


def streamBeginCapture(stream: int, mode: int = streamCaptureModeRelaxed) -> None:
    HOST.capture_begin(stream)


def streamEndCapture(stream: int) -> int:
    return HOST.capture_end(stream)


def eventCreateWithFlags(flags: int) -> int:
    return HOST.event_new(flags == eventDefault)


def eventDestroy(event: int) -> None:
    HOST.event_free(event)


def eventRecord(event: int, stream: int) -> None:
    HOST.event_record(event, stream)


def eventQuery(event: int) -> int:
    return 0 if HOST.event_done(event) else NOT_READY


def eventSynchronize(event: int) -> None:
    HOST.event_synchronize(event)


def eventElapsedTime(start: int, end: int) -> float:
    return HOST.event_elapsed(start, end) * 1e3


def _check_way(dst: int, src: int, kind: int) -> None:
    """Refuse a copy that goes another way than it says."""
    to_device, from_device = ((pointerGetAttributes(address).type == 2) for address in (dst, src))
    if (from_device, to_device) != (
        kind in (CopyKind.TO_HOST, CopyKind.ON_DEVICE),
        kind in (CopyKind.TO_DEVICE, CopyKind.ON_DEVICE),
    ):
        raise HostError(f"an invalid direction of a copy: {kind}", 21)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    _check_way(dst, src, kind)
    with HOST.on(max(getDevice(), 0)):
        HOST.copy(dst, src, size, CopyKind(kind), stream)


def memcpy2DAsync(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    _check_way(dst, src, kind)
    HOST.copy_2d(dst, dpitch, src, spitch, width, height, CopyKind(kind), stream)


def memcpyPeerAsync(dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:
    HOST.copy_peer(dst, dstDevice, src, srcDevice, size, stream)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    HOST.fill(ptr, value, size, stream)


def deviceCanAccessPeer(device: int, peerDevice: int) -> int:
    return int(HOST.peers)


def deviceEnablePeerAccess(peerDevice: int) -> None:
    HOST._check("peer", 711)  # cudaErrorTooManyPeers
    pair = HOST._device(), peerDevice
    if pair in _peers:
        raise HostError("peer access is already enabled", PEER_ALREADY_ENABLED)
    _peers.add(pair)


def graphInstantiate(graph: int) -> int:
    return HOST.exec_new(graph)


def graphDestroy(graph: int) -> None:
    HOST.graph_free(graph)


def graphLaunch(graphExec: int, stream: int) -> None:
    HOST.exec_launch(graphExec, stream)


def graphExecDestroy(graphExec: int) -> None:
    HOST.exec_free(graphExec)


def _as_cupy(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for arg in (*args, *options.values()):
            assert isinstance(arg, (int, np.integer)), f"{function.__name__} takes numbers, not {arg!r}"
        try:
            return function(*args, **options)
        except HostError as error:
            raise CUDARuntimeError(error.status, str(error)) from None

    return call


for _name, _function in list(globals().items()):
    if inspect.isfunction(_function) and not _name.startswith("_") and _function.__module__ == __name__:
        globals()[_name] = _as_cupy(_function)
