"""Driver: the interface to CUDA, with the few calls that the backend needs.

`CupyDriver` implements it for cards; tests have an implementation without one. All other modules of this
package use only this interface.

Streams, events, graphs and addresses are plain integers, as in CUDA, independent of garbage collection
and exit order. Each is released only by a call here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy.typing as npt

from ggmlb.backends.gpu import Defines, Kernel, Launch, source
from ggmlb.backends.gpu.source import HEAD
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType
from ggmlb.interface.data import Bytes
from ggmlb.system.process import LibraryGuard

guard: Final = LibraryGuard("CUDA")

Call = Callable[[int], Any]
"""Queues a piece of work on a stream."""


class CopyKind(IntEnum):
    """Direction of a copy (cudaMemcpyKind)."""

    TO_DEVICE = 1
    TO_HOST = 2
    ON_DEVICE = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a card, as queried from CUDA.

    Attributes:
        name: Product name.
        pci_bus_id: As `0000:01:00.0`.
        capability: Compute capability times ten: 90 for 9.0.
        n_units: Number of multiprocessors.
        shared: Shared memory of a multiprocessor [bytes].
        nbytes: Its memory [bytes].
        is_integrated: Whether it shares the host's memory.
    """

    name: str
    pci_bus_id: str
    capability: int
    n_units: int
    shared: int
    nbytes: int
    is_integrated: bool


class Collective(Protocol):
    """A group of devices for all-reduce sums."""

    def all_reduce(self, places: Sequence[tuple[int, int]], n: int, dtype: DType) -> None:
        """Queue an in-place all-reduce sum of `n` elements; `places`: each device's address and stream."""

    def free(self) -> None:
        """Release the group."""


class Driver(Protocol):
    """Interface to CUDA, implemented over CuPy and, for tests without a card, in memory.

    Calls must be made inside `on(device)`, except those on devices and on host memory: else libcuda would
    refuse them, and the runtime would create a context on device 0. Failures raise one of `errors`.
    """

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exception types that the driver's functions raise."""

    # -- devices -------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Return the number of devices visible by `CUDA_VISIBLE_DEVICES`."""

    def facts(self, device: int) -> Facts:
        """Return the properties of a device."""

    def on(self, device: int) -> AbstractContextManager[None]:
        """Context manager that makes `device` this thread's current one; others get no CUDA context."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return free and total memory [bytes]."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an exception, one of `errors`, reports a lack of memory."""

    # -- memory --------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        """Return the address of new memory on the current device."""

    def free(self, address: int) -> None:
        """Free memory of `malloc`; queued work must not use it."""

    def trim(self) -> None:
        """Free the memory that CuPy's pools cache on the current device."""

    def array(self, address: int, nbytes: int, device: int, owner: object) -> Any:
        """View device memory as a flat uint8 CuPy array; the array keeps the object `owner` alive."""

    def view(
        self, base: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
    ) -> Any:
        """View `base`, an array from `array`, from byte `offset` on with another shape, type and strides."""

    def device_of(self, address: int) -> int:
        """Return the device that an address is on."""

    def pinned(self, nbytes: int) -> Bytes:
        """Return page-locked host memory for all devices, freed with the last view of it."""

    def is_pinned(self, array: Bytes) -> bool:
        """Whether an array's memory is page-locked; copies of pageable memory may block."""

    def register(self, array: Bytes) -> None:
        """Page-lock an array's memory in place."""

    def unregister(self, array: Bytes) -> None:
        """Undo `register`: unlock the array's memory."""

    # -- streams and events --------------------------------------------------------------------

    def stream_new(self) -> int:
        """Return a new stream of the current device, which does not wait for the default stream."""

    def stream_free(self, stream: int) -> None:
        """Release a stream."""

    def stream_synchronize(self, stream: int) -> None:
        """Block until the stream's work is done."""

    def stream_done(self, stream: int) -> bool:
        """Whether the stream's queued work is done; the stream must not be capturing."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Queue a wait: the stream's later work starts after an event of any device."""

    def event_new(self, timed: bool = False) -> int:
        """Return a new event of the current device."""

    def event_free(self, event: int) -> None:
        """Release an event."""

    def event_record(self, event: int, stream: int) -> None:
        """Record the event after the work queued so far on a stream (cudaEventRecord)."""

    def event_done(self, event: int) -> bool:
        """Whether the work before the recorded event is done (cudaEventQuery)."""

    def event_synchronize(self, event: int) -> None:
        """Block until the work before the recorded event is done."""

    def event_elapsed(self, start: int, end: int) -> float:
        """Return the time between two recorded events that are reached, both created as `timed` [s]."""

    # -- copies --------------------------------------------------------------------------------

    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        """Queue a copy of `nbytes` bytes from `src` to `dst`."""

    def copy_2d(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        n: int,
        kind: CopyKind,
        stream: int,
    ) -> None:
        """Queue a copy of `n` pieces of `width` bytes, `src_pitch` apart, to places `dst_pitch` apart."""

    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        """Queue a copy between devices: directly if they are peers, else through the host."""

    def enable_peer(self, device: int, peer: int) -> bool:
        """Let a device access a peer's memory; return whether CUDA supports it."""

    def disable_peer(self, device: int, peer: int) -> None:
        """Undo `enable_peer`: the device can no longer access the peer's memory."""

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Queue setting every byte to a value."""

    # -- work ----------------------------------------------------------------------------------

    def prepare(self, launches: Sequence[Launch], device: int) -> None:
        """Compile the launches' kernels ahead of `bind`, with a progress display."""

    def bind(self, launch: Launch, block: bytes, device: int) -> Call:
        """Compile a launch's kernel; return the call that runs it with `block`, its packed arguments."""

    def blas(self) -> Any:
        """Return the functions of cuBLAS (`cublas.library`).

        Raises:
            BackendUnavailable: It cannot be loaded.
        """

    def collective(self, devices: Sequence[int]) -> Collective | None:
        """Connect distinct devices for all-reduce sums; `None` if NCCL is missing."""

    # -- graphs --------------------------------------------------------------------------------

    def capture_begin(self, stream: int) -> None:
        """Capture later calls on the stream into a graph instead of running them."""

    def capture_end(self, stream: int) -> int:
        """Return the graph captured since `capture_begin`."""

    def graph_free(self, graph: int) -> None:
        """Release a graph."""

    def exec_new(self, graph: int) -> int:
        """Make a graph executable."""

    def exec_update(self, executable: int, graph: int) -> bool:
        """Update an executable graph to another graph of the same topology; return whether it succeeded."""

    def exec_launch(self, executable: int, stream: int) -> None:
        """Queue an executable graph."""

    def exec_free(self, executable: int) -> None:
        """Release an executable graph; a queued run still finishes."""


class cuda_errors:
    """Context manager that turns CUDA's errors in `call` into BackendError or, given `buft`, AllocationError.

    Args:
        driver: The driver that raises the errors.
        call: The operation, for the message.
        buft: The buffer type of the allocation.
        nbytes: The requested bytes.
        tensor: The tensor that the operation is on; described in the message, which is made only if needed.
    """

    __slots__ = ("_buft", "_call", "_driver", "_nbytes", "_tensor")

    def __init__(
        self,
        driver: Driver,
        call: str,
        buft: BufferType | None = None,
        nbytes: int = 0,
        tensor: Tensor | None = None,
    ) -> None:
        self._driver, self._call, self._buft, self._nbytes, self._tensor = driver, call, buft, nbytes, tensor

    def __enter__(self) -> None:
        guard.enter(self._call)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        guard.leave()
        if error is None or not isinstance(error, self._driver.errors):
            return
        if self._buft is not None and self._driver.is_out_of_memory(error):
            raise self._buft.out_of_memory(self._nbytes, str(error)) from None
        on = "" if self._tensor is None else f" on {self._tensor.describe()}"
        raise BackendError(f"{self._call}{on}: {error}") from None


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of a NumPy array's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def grid(launch: Launch, resident: Callable[[], int]) -> tuple[int, int, int]:
    """Return a launch's grid; of a persistent kernel, only as many blocks as the device runs at once."""
    x, y, z = launch.groups
    return (min(x, max(1, -(-resident() // (y * z)))) if launch.persistent else x), y, z


OPTIONS: Final = ("-diag-suppress=177",)  # functions that a kernel does not use
"""NVRTC's options, equal for all kernels, because CuPy queries the compiler's version for each set."""


def text(kernel: Kernel, defines: Defines, wg: int, dependent: bool = False) -> str:
    """Return the CUDA C++ text of a kernel, preceded by macros: `defines`, and WG, the block size.

    If it is `dependent`, for programmatic dependent launches, it begins with the wait for the one before.
    """
    macros = "".join(f"#define {name} {value}\n" for name, value in (*defines, ("WG", wg)))
    found = macros + source(kernel, "cuda", defines)
    return HEAD.sub(r"\g<0>    wait_for_previous_kernel();\n", found) if dependent else found
