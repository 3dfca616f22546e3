"""Cards and their memory, played by the host: every address is looked up, and belongs to one device."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggmlb.backends.cuda.driver import Driver, Facts, address_of
from ggmlb.interface.data import Bytes
from tests.support.host_streams import HostError

POISON = 0xFF
ALIGNMENT = 256


@dataclass(slots=True)
class Allocation:
    array: Bytes
    device: int
    cl_buffer: Any


class Owned(np.ndarray[Any, Any]):
    """An array that keeps the owner of its memory."""

    owner: object


def aligned(nbytes: int) -> Bytes:
    """Poisoned memory that begins at a multiple of `ALIGNMENT`."""
    whole = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
    start = -address_of(whole) % ALIGNMENT
    return whole[start : start + nbytes]


class HostMemory(Driver):
    """`n_devices` cards with `capacity` bytes each, whose memory is poisoned when allocated and when freed.

    Attributes:
        registered: Where host memory begins, and ends, that the driver was told of.
        fail: Names of calls that fail from now on.
    """

    def __init__(
        self, n_devices: int, capacity: int, capability: int, cl_buffer: Callable[[Bytes], Any]
    ) -> None:
        self._n, self._capacity, self._capability = n_devices, capacity, capability
        self._new_cl_buffer = cl_buffer
        self._local = threading.local()
        self._allocations: dict[int, Allocation] = {}
        self._graveyard: list[Allocation] = []
        self.registered: dict[int, int] = {}
        self.fail: set[str] = set()

    def _check(self, call: str, status: int = 1) -> None:
        if call in self.fail:
            raise HostError(f"{call} fails, as the test asked", status)

    # -- devices -------------------------------------------------------------------------------

    def device_count(self) -> int:
        return self._n

    def facts(self, device: int) -> Facts:
        return Facts("Host", f"0000:0{device}:00.0", self._capability, 2, False)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before = self._current_device
        self._local.device = device
        try:
            yield
        finally:
            self._local.device = before

    @property
    def _current_device(self) -> int | None:
        return getattr(self._local, "device", None)

    def _device(self) -> int:
        device = self._current_device
        assert device is not None, "called outside on(device)"
        return device

    def memory_info(self, device: int) -> tuple[int, int]:
        return self._capacity - self.used(device), self._capacity

    def used(self, device: int = 0) -> int:
        return sum(a.array.size for a in self._allocations.values() if a.device == device)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, HostError) and error.status == 2

    # -- memory --------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        device = self._device()
        assert nbytes > 0
        self._check("malloc", 2)
        if self.used(device) + nbytes > self._capacity:
            raise HostError("out of memory", 2)
        array = aligned(nbytes)
        address = address_of(array)
        self._allocations[address] = Allocation(array, device, self._new_cl_buffer(array))
        return address

    def free(self, address: int) -> None:
        gone = self._allocations.pop(address)
        gone.array[...] = POISON
        self._graveyard = [*self._graveyard[-20:], gone]

    def device_of(self, address: int) -> int:
        return self._allocations[self._find(address)[0]].device

    def _find(self, address: int) -> tuple[int, int]:
        """Return an allocation's base, and how far into it an address is."""
        bases = sorted(self._allocations)
        base = bases[bisect.bisect_right(bases, address) - 1] if bases else 0
        if base not in self._allocations or not 0 <= address - base < self._allocations[base].array.size:
            raise HostError(f"an illegal memory access at {address:#x}", 700)
        return base, address - base

    def array(self, address: int, nbytes: int, device: int, owner: object) -> Any:
        whole = self._allocations[address].array if nbytes else np.empty(0, np.uint8)
        array = whole.view(Owned)
        array.owner = owner
        return array

    def view(
        self, base: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
    ) -> Any:
        return Owned(shape, dtype, base, offset, strides)

    def pinned(self, nbytes: int) -> Bytes:
        self._check("pinned", 2)
        return aligned(nbytes)

    def register(self, array: Bytes) -> None:
        self._check("register")
        start, stop = address_of(array), address_of(array) + array.size
        if any(start < b and a < stop for a, b in self.registered.items()):
            raise HostError("part or all of the requested memory range is already mapped", 712)
        self.registered[start] = stop

    def unregister(self, array: Bytes) -> None:
        del self.registered[address_of(array)]
