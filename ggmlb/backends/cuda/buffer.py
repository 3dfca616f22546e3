"""Device memory: one allocation for each buffer, with tensors at byte offsets."""

from __future__ import annotations

import warnings
import weakref
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.backends.cuda.driver import CopyKind, address_of, cuda_errors
from ggmlb.backends.cuda.stream import BorrowedMemory
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes, Pieces
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.stream import Stream

ALIGNMENT = 256
"""Alignment of tensors [bytes]: that of cudaMalloc, and more than any kernel or cuBLAS needs."""

PATTERN_NBYTES = 1 << 20
"""Bytes that are sent between cards to try direct copies."""


class CudaBufferType(BufferType):
    """The memory of a CUDA device."""

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device, device.name, ALIGNMENT)

    def _alloc_buffer(self, nbytes: int) -> CudaBuffer:
        if not nbytes:
            return CudaBuffer(self, 0, 0)
        device = self.device
        device.check_process(f"allocate {nbytes:,} bytes on {self.name}")
        with cuda_errors(device.driver, f"allocate {nbytes:,} bytes on {self.name}", self, nbytes):
            return CudaBuffer(self, device.memory_pool.allocate(nbytes), nbytes)


class _Memory:
    """Owner of an allocation, held by its buffer until freed, and by arrays over it."""

    __slots__ = ("__weakref__",)


class CudaBuffer(Buffer):
    """An allocation on a device.

    Synchronous transfers run on the device's transfer stream, after queued work that uses this buffer, and
    independent of other work.

    Attributes:
        device: The device it belongs to.
        address: Device address; 0 for a size of 0.
        streams: Streams whose work uses it.

    Args:
        owner: Owner of memory allocated by others.
    """

    def __init__(self, buft: CudaBufferType, address: int, nbytes: int, owner: object = None) -> None:
        super().__init__(buft, nbytes)
        self.device = buft.device
        self.address = address
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._array: Any = None
        self._memory: object = None
        if address:
            self._memory = _Memory()
            memory = address if owner is None else BorrowedMemory(owner)
            give_back = self.device.memory_pool.give_back
            weakref.finalize(self._memory, give_back, memory, self.streams).atexit = False

    @property
    def base(self) -> Any:
        """The memory as a flat uint8 array of the array library."""
        if self._array is None:
            driver, index = self.device.driver, self.device.index
            self._array = driver.array(self.address, self.size, index, self._memory)
        return self._array

    def exported(self, tensor: Tensor, call: str) -> Any:
        """Wait for queued work first, because the protocols allow immediate reads."""
        with cuda_errors(self.device.driver, f"{call} of {tensor.describe()}"), self.device.on():
            for stream in [s for s in self.streams if s.handle]:
                stream.synchronize()
        return super().exported(tensor, call)

    def _as_array(
        self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        return self.device.driver.view(self.base, shape, dtype, tensor.offset, strides)

    def queue(
        self, kind: CopyKind, at: int, host: npt.NDArray[Any], stream: int, pieces: Pieces | None
    ) -> None:
        """Queue a copy between an offset in the buffer and host memory, of all of that or of pieces."""
        driver, is_write = self.device.driver, kind is CopyKind.TO_DEVICE
        there, here = self.address + at, address_of(host)
        if pieces is None:
            driver.copy(*((there, here) if is_write else (here, there)), host.nbytes, kind, stream)
            return
        offset, size, n, *pitches = pieces
        ends = [(there + offset, pitches[0]), (here, pitches[1])]
        to, start = ends if is_write else ends[::-1]
        driver.copy_2d(*to, *start, size, n, kind, stream)

    def copy(
        self, call: str, kind: CopyKind, at: int, host: npt.NDArray[Any], pieces: Pieces | None = None
    ) -> None:
        """As `queue`, after the work that uses the buffer, and wait for it."""
        self._transfer(call, lambda stream: self.queue(kind, at, host, stream, pieces))

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        self.copy(f"set_tensor on {tensor.describe()}", CopyKind.TO_DEVICE, tensor.offset + offset, data)

    def _set_tensor_2d(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        if can_pitch(pieces):
            what = f"set_tensor_2d on {tensor.describe()}"
            self.copy(what, CopyKind.TO_DEVICE, tensor.offset, data, pieces)
        else:
            super()._set_tensor_2d(tensor, data, pieces)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        self.copy(f"get_tensor on {tensor.describe()}", CopyKind.TO_HOST, tensor.offset + offset, out)

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        if can_pitch(pieces):
            what = f"get_tensor_2d on {tensor.describe()}"
            self.copy(what, CopyKind.TO_HOST, tensor.offset, out, pieces)
        else:
            super()._get_tensor_2d(tensor, out, pieces)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._fill(value, tensor.offset + offset, size)

    def _clear(self, value: int) -> None:
        self._fill(value, 0, self.size)

    def _fill(self, value: int, offset: int, nbytes: int) -> None:
        driver = self.device.driver
        self._transfer(
            f"fill {nbytes:,} bytes on {self.name}",
            lambda stream: driver.fill(self.address + offset, value, nbytes, stream),
        )

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        source = src.buffer
        if not isinstance(source, CudaBuffer) or overlap(src, dst):
            return False
        self.device.reg.peers.enable(source.device, self.device)
        self._transfer(
            f"copy {src.describe()} to {dst.describe()}",
            lambda stream: queue_copy(src, dst, stream),
            source,
        )
        return True

    def _transfer(self, call: str, queue: Any, *others: CudaBuffer) -> None:
        """Queue a transfer after the work that uses the buffers, and wait for it."""
        device = self.device
        device.check_process(call)
        with cuda_errors(device.driver, call), device.on():
            stream = device.transfers
            for buffer in (self, *others):
                stream.wait_for(list(buffer.streams))
            queue(stream.handle)
            stream.synchronize()

    def _free(self) -> None:
        self._array = None
        self._memory = None


class PeerAccess:
    """Direct copies between cards with GGMLB_CUDA_P2P=1; without, CUDA copies by way of the host.

    CUDA's own word is not enough: where an IOMMU translates, direct copies report success and damage the
    data. So a pattern is sent both ways before a pair is used.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._works: dict[tuple[int, int], bool] = {}

    def enable(self, a: CudaDevice, b: CudaDevice) -> None:
        """Enable direct copies of two cards at their first copy; not to be called with a stream's lock."""
        if a is b or not env.flag("GGMLB_CUDA_P2P", default=False):
            return
        first, second = sorted((a, b), key=lambda device: device.index)
        with self._lock:
            pair = first.index, second.index
            if pair not in self._works:
                self._works[pair] = False  # also if the trial fails
                self._works[pair] = self._try(first, second)

    def _try(self, a: CudaDevice, b: CudaDevice) -> bool:
        driver, ways = a.driver, [(a, b), (b, a)]
        with cuda_errors(driver, f"let {a.name} and {b.name} access each other's memory"):
            enabled = [(x, y) for x, y in ways if driver.enable_peer(x.index, y.index)]
            if len(enabled) == 2 and _arrives(a, b) and _arrives(b, a):
                return True
            for x, y in enabled:
                driver.disable_peer(x.index, y.index)
        why = "direct copies damage the data" if len(enabled) == 2 else "CUDA offers no direct copies"
        warnings.warn(
            f"GGMLB_CUDA_P2P=1, but between {a.name} and {b.name} {why}: they go by way of the host",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def _arrives(source: CudaDevice, target: CudaDevice) -> bool:
    """Whether a direct copy of a pattern arrives unchanged."""
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
        dst._transfer("copy a pattern", lambda stream: driver.copy_peer(*ends, out.nbytes, stream), src)
        dst.copy("read a pattern", CopyKind.TO_HOST, 0, out)
    return np.array_equal(out, pattern)


def can_pitch(pieces: Pieces) -> bool:
    """Whether a strided copy is one CUDA command: pieces do not overlap, and the pitch is within limits."""
    return all(pieces.size <= pitch < 1 << 31 for pitch in (pieces.stride_tensor, pieces.stride_data))


def queue_copy(src: Tensor, dst: Tensor, stream: int) -> None:
    """Queue a copy between tensors in CUDA buffers, of one device or two."""
    source, target = src.buffer, dst.buffer
    assert isinstance(source, CudaBuffer)
    assert isinstance(target, CudaBuffer)
    driver, here, there = target.device.driver, source.device.index, target.device.index
    start, to = source.address + src.offset, target.address + dst.offset
    if here == there:
        driver.copy(to, start, src.nbytes, CopyKind.ON_DEVICE, stream)
    else:
        driver.copy_peer(to, there, start, here, src.nbytes, stream)
