"""What the backend asks of CUDA, and nothing more: memory, streams, events, copies, launches, graphs.

`CupyDriver` is the real one. All else in this package is written against `Driver`, so that it runs, with the
same plans, arguments and order of work, over anything that can do these few things.

Streams, events, graphs and addresses are plain integers, as CUDA's own: Python's collection and exit order
cannot touch them. Each is released by a call here, and by nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy.typing as npt

from ggmlb.backends.gpu import Launch
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError
from ggmlb.interface import BufferType
from ggmlb.interface.data import Bytes
from ggmlb.system.process import LibraryGuard

guard: Final = LibraryGuard("CUDA")

Call = Callable[[int], Any]
"""A piece of work with everything bound but the stream that it is queued on."""


class CopyKind(IntEnum):
    """Which way a copy goes: cudaMemcpyKind."""

    TO_DEVICE = 1
    TO_HOST = 2
    ON_DEVICE = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card is.

    Attributes:
        name: The maker's name for it.
        pci_bus_id: As `0000:01:00.0`.
        capability: Compute capability times ten: 90 for 9.0.
        n_units: Multiprocessors.
        is_integrated: It shares the host's memory.
    """

    name: str
    pci_bus_id: str
    capability: int
    n_units: int
    is_integrated: bool


class Collective(Protocol):
    """Devices that sum together."""

    def all_reduce(self, places: Sequence[tuple[int, int]], n: int, dtype: DType) -> None:
        """Queue the sum of `n` elements at each device's address, in place, on each device's stream."""

    def free(self) -> None:
        """Disconnect."""


class Driver(ABC):
    """CUDA as the backend sees it.

    Calls on memory and streams are made inside `on(device)`. Failures raise one of `errors`.

    Attributes:
        errors: What the calls raise.
    """

    errors: tuple[type[Exception], ...]

    # -- devices -------------------------------------------------------------------------------

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices there are; `CUDA_VISIBLE_DEVICES` limits them."""

    @abstractmethod
    def facts(self, device: int) -> Facts:
        """Return what a device is."""

    @abstractmethod
    def on(self, device: int) -> AbstractContextManager[None]:
        """Make a device this thread's current one, and the one before it afterwards."""

    @abstractmethod
    def memory_info(self, device: int) -> tuple[int, int]:
        """Return free and total memory [bytes]."""

    @abstractmethod
    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether one of `errors` says that memory ran out."""

    # -- memory --------------------------------------------------------------------------------

    @abstractmethod
    def malloc(self, nbytes: int) -> int:
        """Return the address of new memory on the current device."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Release what `malloc` gave; nothing may use it any more."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what the array library keeps of the current device's memory for later."""

    @abstractmethod
    def array(self, address: int, nbytes: int, device: int, owner: object) -> Any:
        """View device memory as a flat uint8 array of CuPy, which keeps `owner` alive."""

    @abstractmethod
    def view(
        self, base: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
    ) -> Any:
        """View a part of what `array` gave under another shape and type."""

    @abstractmethod
    def device_of(self, address: int) -> int:
        """Return the device that an address is on."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Bytes:
        """Return page-locked host memory, for all devices; it lives as long as views of it."""

    @abstractmethod
    def register(self, array: Bytes) -> None:
        """Page-lock an array's memory where it lies."""

    @abstractmethod
    def unregister(self, array: Bytes) -> None:
        """Undo `register`."""

    # -- streams and events --------------------------------------------------------------------

    @abstractmethod
    def stream_new(self) -> int:
        """Return a new stream of the current device, which does not wait for the default stream."""

    @abstractmethod
    def stream_free(self, stream: int) -> None:
        """Release a stream."""

    @abstractmethod
    def stream_synchronize(self, stream: int) -> None:
        """Block until the stream's work is done."""

    @abstractmethod
    def stream_wait(self, stream: int, event: int) -> None:
        """Let what is queued on the stream from now on wait for an event, of any device."""

    @abstractmethod
    def event_new(self, timed: bool = False) -> int:
        """Return a new event of the current device."""

    @abstractmethod
    def event_free(self, event: int) -> None:
        """Release an event."""

    @abstractmethod
    def event_record(self, event: int, stream: int) -> None:
        """Move the event to the end of a stream's work."""

    @abstractmethod
    def event_done(self, event: int) -> bool:
        """Whether the event is reached."""

    @abstractmethod
    def event_synchronize(self, event: int) -> None:
        """Block until the event is reached."""

    @abstractmethod
    def event_elapsed(self, start: int, end: int) -> float:
        """Return the time between two timed events that are reached [s]."""

    # -- copies --------------------------------------------------------------------------------

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        """Queue a copy."""

    @abstractmethod
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

    @abstractmethod
    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        """Queue a copy between devices: directly where they reach each other, else by way of the host."""

    @abstractmethod
    def enable_peer(self, device: int, peer: int) -> bool:
        """Let a device reach a peer's memory, if it can; return whether it can."""

    @abstractmethod
    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Queue setting every byte to a value."""

    # -- work ----------------------------------------------------------------------------------

    def prepare(self, launches: Sequence[Launch], device: int) -> None:  # noqa: B027 (an optional hook)
        """Compile the kernels of launches that `bind` will be called with."""

    @abstractmethod
    def bind(self, launch: Launch, block: bytes, device: int) -> Call:
        """Return the call that runs a launch with an argument block; its kernel is compiled now."""

    @abstractmethod
    def blas(self) -> Any:
        """Return the functions of cuBLAS (`cublas.library`).

        Raises:
            BackendUnavailable: It cannot be loaded.
        """

    @abstractmethod
    def collective(self, devices: Sequence[int]) -> Collective | None:
        """Connect devices, each named once; `None` where NCCL is missing."""

    # -- graphs --------------------------------------------------------------------------------

    @abstractmethod
    def capture_begin(self, stream: int) -> None:
        """Collect what is queued on the stream into a graph, instead of running it."""

    @abstractmethod
    def capture_end(self, stream: int) -> int:
        """Return the graph collected since `capture_begin`."""

    @abstractmethod
    def graph_free(self, graph: int) -> None:
        """Release a graph."""

    @abstractmethod
    def exec_new(self, graph: int) -> int:
        """Make a graph executable."""

    @abstractmethod
    def exec_update(self, executable: int, graph: int) -> bool:
        """Give an executable graph the arguments of another of the same topology; say whether it could."""

    @abstractmethod
    def exec_launch(self, executable: int, stream: int) -> None:
        """Queue an executable graph."""

    @abstractmethod
    def exec_free(self, executable: int) -> None:
        """Release an executable graph; a run that is queued ends first."""


@contextmanager
def cuda_errors(driver: Driver, call: str, buft: BufferType | None = None, nbytes: int = 0) -> Iterator[None]:
    """Turn CUDA's errors into a BackendError, or an AllocationError where memory ran out.

    Args:
        driver: Whose errors.
        call: What was being done.
        buft: The memory type that is being allocated from.
        nbytes: The bytes asked for.
    """
    guard.enter(call)
    try:
        yield
    except driver.errors as error:
        if buft is not None and driver.is_out_of_memory(error):
            raise buft.out_of_memory(nbytes, str(error)) from None
        raise BackendError(f"{call}: {error}") from None
    finally:
        guard.leave()


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where a NumPy array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address
