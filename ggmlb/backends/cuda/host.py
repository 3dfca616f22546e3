"""Pinned host memory, for fast and asynchronous transfers."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.backends.cuda.buffer import ALIGNMENT
from ggmlb.backends.cuda.driver import address_of, cuda_errors
from ggmlb.interface.data import Bytes
from ggmlb.interface.host import HostBuffer, HostBufferType, allocate
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.driver import Driver


def pins_memory() -> bool:
    """Whether host buffers should be page-locked."""
    return not env.flag("GGMLB_CUDA_NO_PINNED", default=False)


class CudaHostBufferType(HostBufferType):
    """Page-locked host memory for all CUDA devices; the CPU computes in it.

    Attributes:
        registrations: Page-locked memory of callers.
    """

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        # Aligned like the device's memory, so that tensors have equal offsets in both.
        super().__init__(device, "CUDA_Host", ALIGNMENT)
        self.registrations = Registrations(device.driver)

    def _alloc_buffer(self, nbytes: int) -> CudaHostBuffer:
        driver = self.device.driver
        if nbytes and pins_memory():
            self.device.check_process(f"allocate {nbytes:,} bytes of {self.name} memory")
            try:
                return CudaHostBuffer(self, driver.pinned(nbytes), is_pinned=True)
            except driver.errors:
                pass  # systems limit what a process may lock; other memory works too
        return CudaHostBuffer(self, allocate(self, nbytes), is_pinned=False)


class CudaHostBuffer(HostBuffer):
    """A buffer in host memory, which stays allocated while a transfer uses it, also after `free`.

    Attributes:
        is_pinned: Whether it is page-locked. If not (the system refused), transfers use a staging copy
            and may block.
    """

    def __init__(self, buft: CudaHostBufferType, array: Bytes, *, is_pinned: bool) -> None:
        super().__init__(buft, array)
        self.is_pinned = is_pinned


class Pages:
    """A page-locked memory range with its number of users.

    Attributes:
        array: The memory, kept alive while locked.
    """

    def __init__(self, array: Bytes) -> None:
        self.array = array
        self.start = address_of(array)
        self.stop = self.start + array.size
        self.n_users = 1

    def hold(self, array: Bytes) -> bool:
        """Whether it contains an array, and is writable if the array is."""
        start = address_of(array)
        may_be_used = self.array.flags.writeable or not array.flags.writeable
        return may_be_used and self.start <= start and start + array.size <= self.stop


class Registrations:
    """Callers' memory that is page-locked in place (cudaHostRegister), for all cards.

    CUDA cannot lock a byte twice. Arrays within locked memory share its lock until the last is removed;
    an array that is partly in locked memory is not locked.

    Attributes:
        pages: The locked ranges.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = Lock()
        self._dropped: deque[Pages] = deque()
        self._added: dict[int, list[Pages]] = {}
        self.pages: list[Pages] = []

    def add(self, array: Bytes) -> bool:
        """Lock an array's pages until as many calls of `remove`; return whether the system allowed it.

        Source: ggml_backend_cuda_register_host_buffer.
        """
        pages = self._take(array)
        if pages is not None:
            self._added.setdefault(address_of(array), []).append(pages)
        return pages is not None

    def remove(self, address: int) -> None:
        """Undo an `add` of an array at an address (ggml_backend_cuda_unregister_host_buffer)."""
        added = self._added.get(address)
        if added:
            self._let_go(added.pop())

    def buffer(self, buft: CudaHostBufferType, array: Bytes) -> CudaHostBuffer:
        """Use an array's memory as a host buffer, locked if the system allows it.

        It is unlocked with the last view of it; a running transfer holds one.
        """
        pages = self._take(array) if array.size else None
        if pages is None:
            return CudaHostBuffer(buft, array, is_pinned=False)
        memory: Any = (ctypes.c_ubyte * array.size).from_address(address_of(array))
        weakref.finalize(memory, self._let_go, pages).atexit = False
        seen: Bytes = np.frombuffer(memory, np.uint8)
        seen.flags.writeable = array.flags.writeable
        return CudaHostBuffer(buft, seen, is_pinned=True)

    def _take(self, array: Bytes) -> Pages | None:
        """Return the locked range of an array, with one more user; `None` if it cannot be locked."""
        new = Pages(array)
        try:
            with self._lock:
                for pages in self.pages:
                    if pages.hold(array):
                        pages.n_users += 1
                        return pages
                    if new.start < pages.stop and pages.start < new.stop:
                        return None
                try:
                    self._driver.register(array)
                except self._driver.errors:
                    return None
                self.pages.append(new)
                return new
        finally:
            self._unlock_dropped()

    def _let_go(self, pages: Pages) -> None:
        """Remove a user of a range; called by any thread and by garbage collection."""
        self._dropped.append(pages)
        self._unlock_dropped()

    def _unlock_dropped(self) -> None:
        """Unlock unused ranges, unless another thread is doing so."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    pages = self._dropped.popleft()
                    pages.n_users -= 1
                    if not pages.n_users:
                        self.pages.remove(pages)
                        with cuda_errors(self._driver, "unlock a caller's memory"):
                            self._driver.unregister(pages.array)
            finally:
                self._lock.release()
