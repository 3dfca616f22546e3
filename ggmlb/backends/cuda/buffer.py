"""Device memory, one allocation for each buffer with tensors at byte offsets; and pinned host memory."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.backends.cuda.driver import CopyKind, address_of, cuda_errors, guard
from ggmlb.backends.gpu.buffer import GpuBuffer, PinnedBuffer, PinnedBufferType
from ggmlb.core.errors import AllocationError
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType
from ggmlb.interface.data import Bytes, Pieces
from ggmlb.interface.host import allocate
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.cuda.cupy_driver import CupyDriver
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.stream import Stream

ALIGNMENT = 256
"""Alignment of tensors [bytes]: that of cuMemAlloc, and more than any kernel or cuBLAS needs."""

PATTERN_NBYTES = 1 << 20
"""Size of the pattern that tests peer-to-peer copies [bytes]."""


class CudaBufferType(BufferType):
    """The memory of a CUDA device."""

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device, device.name, ALIGNMENT)

    def _alloc_buffer(self, nbytes: int) -> CudaBuffer:
        if not nbytes:
            return CudaBuffer(self, 0, 0)
        device = self.device
        with cuda_errors(device.driver, f"allocate {nbytes:,} bytes on {self.name}", self, nbytes):
            return CudaBuffer(self, device.memory_pool.allocate(nbytes), nbytes)


class _Memory:
    """Owner of an allocation, held by its buffer until freed, and by arrays over it."""

    __slots__ = ("__weakref__",)


class CudaBuffer(GpuBuffer):
    """An allocation in the memory of a CUDA device.

    Attributes:
        address: Device address; 0 for a size of 0.
        streams: Streams whose work uses it.

    Args:
        owner: Owner of memory allocated by others.
    """

    device: CudaDevice

    def __init__(self, buft: CudaBufferType, address: int, nbytes: int, owner: object = None) -> None:
        super().__init__(buft, nbytes)
        self.device = buft.device
        self.address = address
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._array: Any = None
        self._memory: object = None
        if address:
            self._memory = _Memory()
            pool, streams = self.device.memory_pool, self.streams
            free = partial(self.device.driver.free, address)
            leave = (
                partial(pool.give_back, free) if owner is None else partial(pool.give_back_borrowed, owner)
            )
            weakref.finalize(self._memory, leave, streams).atexit = False

    @property
    def base(self) -> Any:
        """The memory as a flat uint8 CuPy array."""
        if self._array is None:
            driver, index = self.device.driver, self.device.index
            self._array = driver.array(self.address, self.size, index, self._memory)
        return self._array

    def exported(self, tensor: Tensor, call: str) -> Any:
        """Return the tensor as an array, after all work that uses the buffer: importers read it at once."""
        with cuda_errors(self.device.driver, f"{call} of {tensor.describe()}"), self.device.on():
            for stream in [s for s in self.streams if s.handle]:
                stream.synchronize()
        return super().exported(tensor, call)

    def _as_array(
        self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        return self.device.driver.view(self.base, shape, dtype, tensor.offset, strides)

    def queue(
        self, kind: CopyKind, start: int, host: npt.NDArray[Any], where: int | Pieces, stream: int
    ) -> None:
        """Queue a copy of `host` to or from the buffer at byte `start + where`, or in 2D pieces (`where`)."""
        driver, is_write = self.device.driver, kind is CopyKind.TO_DEVICE
        there, here = self.address + start, address_of(host)
        if isinstance(where, int):
            there += where
            driver.copy(*((there, here) if is_write else (here, there)), host.nbytes, kind, stream)
            return
        offset, size, n, *pitches = where
        ends = [(there + offset, pitches[0]), (here, pitches[1])]
        to, source = ends if is_write else ends[::-1]
        driver.copy_2d(to, source, size, n, kind, stream)

    def copy(
        self,
        call: str,
        kind: CopyKind,
        start: int,
        host: npt.NDArray[Any],
        where: int | Pieces = 0,
        after: Sequence[Stream] | None = None,
    ) -> None:
        """Copy `host` to or from the buffer, and return when the copy is done.

        It follows the work queued on the streams `after`; by default, all work that uses the buffer.
        """
        after = list(self.streams) if after is None else after
        self._transfer(call, lambda stream: self.queue(kind, start, host, where, stream), after)

    def _move(self, call: str, kind: CopyKind, tensor: Tensor, host: Bytes, where: int | Pieces) -> None:
        self.copy(f"{call} on {tensor.describe()}", kind, tensor.offset, host, where)

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        self._move("set_tensor", CopyKind.TO_DEVICE, tensor, data, offset)

    def _set_tensor_2d(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        if not can_pitch(pieces):
            return super()._set_tensor_2d(tensor, data, pieces)
        return self._move("set_tensor_2d", CopyKind.TO_DEVICE, tensor, data, pieces)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        self._move("get_tensor", CopyKind.TO_HOST, tensor, out, offset)

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        if not can_pitch(pieces):
            return super()._get_tensor_2d(tensor, out, pieces)
        return self._move("get_tensor_2d", CopyKind.TO_HOST, tensor, out, pieces)

    def _fill(self, value: int, offset: int, nbytes: int) -> None:
        driver = self.device.driver
        self._transfer(
            f"fill {nbytes:,} bytes on {self.name}",
            lambda stream: driver.fill(self.address + offset, value, nbytes, stream),
            list(self.streams),
        )

    def can_copy(self, src: Tensor, dst: Tensor) -> bool:
        """Whether one command copies `src` to `dst`: `src` is in a CUDA buffer, and they do not overlap."""
        return isinstance(src.buffer, CudaBuffer) and not overlap(src, dst)

    def _copy_from(self, src: Tensor, dst: Tensor) -> None:
        source = src.buffer
        assert isinstance(source, CudaBuffer)
        self.device.peers.enable(source.device, self.device)
        what = f"copy {src.describe()} to {dst.describe()}"
        streams = [*self.streams, *source.streams]
        self._transfer(what, lambda stream: queue_copy(src, dst, stream), streams)

    def _transfer(self, call: str, queue: Any, after: Sequence[Stream]) -> None:
        """Queue a transfer after the work queued on streams, and wait for it."""
        device = self.device
        with cuda_errors(device.driver, call), device.on():
            stream = device.transfers
            stream.wait_for(after)
            queue(stream.handle)
            stream.synchronize()

    def _free(self) -> None:
        self._array = None
        self._memory = None


class MappedBuffer(CudaBuffer):
    """Page-locked host memory that kernels access in place: its address is the same on host and device.

    Attributes:
        memory: The memory, set to 0.
    """

    def __init__(self, buft: CudaBufferType, memory: Bytes) -> None:
        super().__init__(buft, address_of(memory), memory.size, owner=memory)
        self.memory = memory
        self._clear(0)

    def _clear(self, value: int) -> None:
        self.memory[:] = value


class PeerAccess:
    """Peer-to-peer copies between cards with GGMLB_CUDA_P2P=1; without, CUDA copies through the host.

    `cuDeviceCanAccessPeer` is not enough: where an IOMMU translates, peer copies report success and corrupt
    the data. So each pair of cards is tested by copies of a pattern before use.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._works: dict[tuple[int, int], bool] = {}

    def enable(self, a: CudaDevice, b: CudaDevice) -> None:
        """Enable peer copies between two cards when first needed; the caller must hold no stream's lock."""
        if a is b or not env.flag("GGMLB_CUDA_P2P", default=False):
            return
        first, second = sorted((a, b), key=lambda device: device.index)
        with self._lock:
            pair = first.index, second.index
            if pair not in self._works:
                self._works[pair] = False  # also if the test raises
                self._works[pair] = self._try(first, second)

    def _try(self, a: CudaDevice, b: CudaDevice) -> bool:
        driver, ways = a.driver, [(a, b), (b, a)]
        with cuda_errors(driver, f"let {a.name} and {b.name} access each other's memory"):
            enabled = [(x, y) for x, y in ways if driver.enable_peer(x.index, y.index)]
            if len(enabled) == 2 and _arrives(a, b) and _arrives(b, a):
                return True
            for x, y in enabled:
                driver.disable_peer(x.index, y.index)
        why = "direct copies corrupt the data" if len(enabled) == 2 else "CUDA offers no direct copies"
        warnings.warn(
            f"GGMLB_CUDA_P2P=1, but between {a.name} and {b.name} {why}: they go by way of the host",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def _arrives(source: CudaDevice, target: CudaDevice) -> bool:
    """Whether a peer copy of a pattern arrives unchanged."""
    pattern = np.random.default_rng(0).integers(1, 256, PATTERN_NBYTES, np.uint8)
    out, driver = np.zeros_like(pattern), source.driver
    with (
        source.buffer_type.alloc_buffer(out.nbytes) as src,
        target.buffer_type.alloc_buffer(out.nbytes) as dst,
    ):
        assert isinstance(src, CudaBuffer)
        assert isinstance(dst, CudaBuffer)
        src.copy("write a pattern", CopyKind.TO_DEVICE, 0, pattern)
        dst.copy("write no pattern", CopyKind.TO_DEVICE, 0, out)
        ends = dst.address, target.index, src.address, source.index
        dst._transfer("copy a pattern", lambda stream: driver.copy_peer(*ends, out.nbytes, stream), [])
        dst.copy("read a pattern", CopyKind.TO_HOST, 0, out)
    return np.array_equal(out, pattern)


def can_pitch(where: int | Pieces) -> bool:
    """Whether a copy is one CUDA command: contiguous, or 2D with pitches that cuMemcpy2DAsync accepts."""
    if isinstance(where, int):
        return True
    return all(where.size <= pitch < 1 << 31 for pitch in (where.stride_tensor, where.stride_data))


def queue_copy(src: Tensor, dst: Tensor, stream: int) -> None:
    """Queue a copy between tensors in CUDA buffers of the same or different devices."""
    source, target = src.buffer, dst.buffer
    assert isinstance(source, CudaBuffer)
    assert isinstance(target, CudaBuffer)
    driver, here, there = target.device.driver, source.device.index, target.device.index
    start, to = source.address + src.offset, target.address + dst.offset
    if here == there:
        driver.copy(to, start, src.nbytes, CopyKind.ON_DEVICE, stream)
    else:
        driver.copy_peer(to, there, start, here, src.nbytes, stream)


def pins_memory() -> bool:
    """Whether host buffers should be page-locked: unless GGMLB_CUDA_NO_PINNED=1."""
    return not env.flag("GGMLB_CUDA_NO_PINNED", default=False)


class CudaHostBufferType(PinnedBufferType):
    """Page-locked host memory, copied fast by all CUDA devices; the CPU backend computes with its tensors.

    Attributes:
        registrations: Page-locked memory of callers.
    """

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device, "CUDA_Host", ALIGNMENT)
        self.registrations = Registrations(device.driver)

    def _alloc_buffer(self, nbytes: int) -> PinnedBuffer:
        if not pins_memory():
            return PinnedBuffer(self, allocate(self, nbytes), "GGMLB_CUDA_NO_PINNED is set")
        return super()._alloc_buffer(nbytes)

    def _pinned(self, nbytes: int) -> Bytes:
        guard.check(f"allocate {nbytes:,} bytes of {self.name} memory")
        driver = self.device.driver
        try:
            return driver.pinned(nbytes)
        except driver.errors as error:
            raise AllocationError(str(error)) from None


class Pages:
    """A page-locked memory range, unlocked when nothing refers to it.

    Attributes:
        start: Its address.
        stop: The address after its last byte.
    """

    def __init__(self, array: Bytes) -> None:
        self.start = address_of(array)
        self.stop = self.start + array.size
        self._is_writeable = array.flags.writeable

    def holds(self, other: Pages) -> bool:
        """Whether this range contains `other`; if it is read-only, `other` must be read-only too."""
        may_be_used = self._is_writeable or not other._is_writeable
        return may_be_used and self.start <= other.start and other.stop <= self.stop


class Registrations:
    """Callers' memory that is page-locked in place (cuMemHostRegister), for all cards.

    CUDA cannot lock a byte twice. Arrays within locked memory share its lock until the last is removed;
    an array that is partly in locked memory is not locked.

    Attributes:
        pages: The locked ranges.
    """

    def __init__(self, driver: CupyDriver) -> None:
        self._driver = driver
        self._lock = Lock()
        self._added: dict[int, list[Pages]] = {}
        self.pages: weakref.WeakSet[Pages] = weakref.WeakSet()

    def add(self, array: Bytes) -> bool:
        """Page-lock an array's memory; return whether the system allowed it. Each `add` needs a `remove`.

        Source: ggml_backend_cuda_register_host_buffer.
        """
        pages = self._locked(array)
        if pages is not None:
            self._added.setdefault(address_of(array), []).append(pages)
        return pages is not None

    def remove(self, address: int) -> None:
        """Undo one `add` of the array at `address` (ggml_backend_cuda_unregister_host_buffer)."""
        added = self._added.get(address)
        if added:
            added.pop()

    def buffer(self, buft: CudaHostBufferType, array: Bytes) -> PinnedBuffer:
        """Return a host buffer over an array's memory, page-locked if the system allows it.

        It is unlocked with the last view of it; a running transfer holds one.
        """
        pages = self._locked(array) if array.size else None
        if pages is None:
            return PinnedBuffer(buft, array, "the system does not page-lock it")
        memory: Any = (ctypes.c_ubyte * array.size).from_address(address_of(array))
        memory.pages = pages
        seen: Bytes = np.frombuffer(memory, np.uint8)
        seen.flags.writeable = array.flags.writeable
        return PinnedBuffer(buft, seen)

    def _locked(self, array: Bytes) -> Pages | None:
        """Return the locked range that an array is in; `None` if it cannot be locked."""
        new = Pages(array)
        with self._lock:
            for pages in list(self.pages):
                if pages.holds(new):
                    return pages
                if new.start < pages.stop and pages.start < new.stop:
                    return None
            try:
                self._driver.register(array)
            except self._driver.errors:
                return None
            self.pages.add(new)
            weakref.finalize(new, self._unlock, array).atexit = False
            return new

    def _unlock(self, array: Bytes) -> None:
        with cuda_errors(self._driver, "unlock a caller's memory"):
            self._driver.unregister(array)
