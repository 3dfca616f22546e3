"""CUDA's runtime as CuPy binds it: its functions' names, parameters and results, over the played driver."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

NOT_READY, PEER_ALREADY_ENABLED, TOO_MANY_PEERS = 600, 704, 711
LEGACY = 1
"""The handle of the default stream, which has nothing to do here."""

_peers: set[tuple[int, int]] = set()
_pinned: dict[int, Any] = {}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(f"cudaError{status}: {text}")
        self.status = status


def _setDevice(device: int) -> None:
    HOST._local.device = None if device < 0 else device


def _properties(device: int) -> dict[str, Any]:
    facts = HOST.facts(device)
    major, minor = divmod(facts.capability, 10)
    domain, bus, slot = (int(part, 16) for part in facts.pci_bus_id.removesuffix(".0").split(":"))
    place = {"pciDomainID": domain, "pciBusID": bus, "pciDeviceID": slot}
    about = {"name": facts.name.encode(), "integrated": int(facts.is_integrated)}
    return {**about, **place, "major": major, "minor": minor, "multiProcessorCount": facts.n_units}


def _new_stream(flags: int) -> int:
    assert flags == streamNonBlocking
    return HOST.stream_new()


def _synchronize(stream: int) -> None:
    if stream > LEGACY or stream in HOST.streams:
        HOST.stream_synchronize(stream)


def _attributes(ptr: int) -> SimpleNamespace:
    try:
        return SimpleNamespace(type=2, device=HOST.device_of(ptr))
    except HostError:
        return SimpleNamespace(type=0, device=-2)  # host memory that CUDA knows nothing of


def _pin(size: int) -> int:
    array = HOST.pinned(size)
    _pinned[address_of(array)] = array
    return address_of(array)


def _copy(dst: int, dpitch: int, src: int, spitch: int, width: int, n: int, kind: int, stream: int) -> None:
    """Queue a copy, which must go the way that it says."""
    from_device, to_device = (_attributes(address).type == 2 for address in (src, dst))
    if (from_device, to_device) != (kind != CopyKind.TO_DEVICE, kind != CopyKind.TO_HOST):
        raise HostError(f"an invalid direction of a copy: {kind}", 21)
    with HOST.on(HOST.current_device or 0):
        HOST.copy_2d(dst, dpitch, src, spitch, width, n, CopyKind(kind), stream)


def _enable_peer(peer: int) -> None:
    HOST._check("peer", TOO_MANY_PEERS)
    pair = HOST._device(), peer
    if pair in _peers:
        raise HostError("peer access is already enabled", PEER_ALREADY_ENABLED)
    _peers.add(pair)


CALLS: dict[str, Callable[..., Any]] = {
    "driverGetVersion": lambda: 13000,
    "runtimeGetVersion": lambda: 13020,
    "getDeviceCount": lambda: HOST.device_count(),
    # -1 where none was set, so that it is set to none again, and its use is noticed
    "getDevice": lambda: -1 if HOST.current_device is None else HOST.current_device,
    "setDevice": lambda device: _setDevice(device),
    "getDeviceProperties": lambda device: _properties(device),
    "deviceSynchronize": lambda: [*map(HOST.stream_synchronize, list(HOST.streams))],
    "deviceCanAccessPeer": lambda device, peerDevice: int(HOST.peers),
    "deviceEnablePeerAccess": lambda peerDevice: _enable_peer(peerDevice),
    "memGetInfo": lambda: HOST.memory_info(HOST._device()),
    "malloc": lambda size: HOST.malloc(size),
    "free": lambda ptr: HOST.free(ptr),
    "pointerGetAttributes": lambda ptr: _attributes(ptr),
    "hostAlloc": lambda size, flags: _pin(size),
    "freeHost": lambda ptr: _pinned.pop(ptr).fill(0xFF),
    "hostRegister": lambda ptr, size, flags: HOST.register(raw(ptr, size)),
    "hostUnregister": lambda ptr: HOST.unregister(raw(ptr, 1)),
    "streamCreateWithFlags": lambda flags: _new_stream(flags),
    "streamDestroy": lambda stream: HOST.stream_free(stream),
    "streamSynchronize": lambda stream: _synchronize(stream),
    "streamWaitEvent": lambda stream, event, flags=0: HOST.stream_wait(stream, event),
    "streamBeginCapture": lambda stream, mode=streamCaptureModeRelaxed: HOST.capture_begin(stream),
    "streamEndCapture": lambda stream: HOST.capture_end(stream),
    "eventCreateWithFlags": lambda flags: HOST.event_new(flags == eventDefault),
    "eventDestroy": lambda event: HOST.event_free(event),
    "eventRecord": lambda event, stream: HOST.event_record(event, stream),
    "eventQuery": lambda event: 0 if HOST.event_done(event) else NOT_READY,
    "eventSynchronize": lambda event: HOST.event_synchronize(event),
    "eventElapsedTime": lambda start, end: HOST.event_elapsed(start, end) * 1e3,
    "memcpyAsync": lambda dst, src, size, kind, stream: _copy(dst, size, src, size, size, 1, kind, stream),
    "memcpy2DAsync": lambda dst, dpitch, src, spitch, width, height, kind, stream: _copy(
        dst, dpitch, src, spitch, width, height, kind, stream
    ),
    "memcpyPeerAsync": lambda dst, dstDevice, src, srcDevice, size, stream: HOST.copy_peer(
        dst, dstDevice, src, srcDevice, size, stream
    ),
    "memsetAsync": lambda ptr, value, size, stream: HOST.fill(ptr, value, size, stream),
    "graphInstantiate": lambda graph: HOST.exec_new(graph),
    "graphDestroy": lambda graph: HOST.graph_free(graph),
    "graphLaunch": lambda graphExec, stream: HOST.exec_launch(graphExec, stream),
    "graphExecDestroy": lambda graphExec: HOST.exec_free(graphExec),
}
"""What answers each function, with CuPy's names of its parameters."""


def __getattr__(name: str) -> Any:
    if name not in CALLS:
        raise AttributeError(name)

    @functools.wraps(CALLS[name])
    def call(*args: Any, **options: Any) -> Any:
        for arg in (*args, *options.values()):
            assert isinstance(arg, (int, np.integer)), f"{name} takes numbers, not {arg!r}"
        try:
            return CALLS[name](*args, **options)
        except HostError as error:
            raise CUDARuntimeError(error.status, str(error)) from None

    return call
