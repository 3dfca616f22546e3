"""Node: the remote end of a connection. It owns the devices of a machine, and runs the driver's commands.

A message is a list of commands, each a name and arguments, and the data to write. Buffers, streams and plans
are identified by handles, random numbers that are never reused. Handles and ranges are checked before use.

The commands of a message run in order, and are complete when the call returns. After one fails, only commands
that free something still run.
"""

from __future__ import annotations

import pickle
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from ggmlb.backends.ray.files import SharedFiles
from ggmlb.backends.ray.wire import (
    MAX_EXTENT,
    Bytes,
    Records,
    number_below,
    packed,
    read_graph,
    read_node,
    refuse,
    unpacked,
)
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage, Status
from ggmlb.core.errors import BackendBroken, BackendError, Error, FreedError, one_line
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Backend, Buffer, BufferType, Device, GraphPlan, registry, tensor_copy

Message = Sequence[Sequence[Any]]

PROTOCOL: Final = 5
"""Version of the message format."""

APART: Final = 1 << 16
"""Size from which data are separate objects in Ray's object store [bytes]."""

NOTHING: Final = np.empty(0, np.uint8)

RELEASES: Final = ("free", "wait")
"""Commands that run even after a failure."""

T = TypeVar("T")


def versions() -> dict[str, Any]:
    """Return the versions (such as ggmlb's and Python's) that must be equal on driver and node."""
    return {
        "protocol": PROTOCOL,
        "ggmlb": metadata.version("ggmlb"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "byte order": sys.byteorder,
    }


class Stored(NamedTuple):
    """How a buffer type stores a tensor: allocation size [bytes], type, byte strides, packing and more."""

    nbytes: int
    dtype: DType
    nb: Ne
    packing: str
    suits: bool
    is_readable: bool


class Node:
    """The devices of a machine, and the buffers, streams and plans of a driver on them.

    Attributes:
        aborted: Number of the computation to stop, set from another thread.

    Args:
        driver: `versions` of the driver.
        names: Names of the devices; default: all of the machine.
        shared: Folders whose files it may read.

    Raises:
        BackendBroken: The driver's versions differ.
        Error: A device cannot be used.
    """

    def __init__(
        self, driver: Mapping[str, Any], names: Sequence[str] | None = None, shared: Sequence[str] = ()
    ) -> None:
        if driver != (own := versions()):
            raise BackendBroken(
                f"the driver has {_listed(driver)}; {platform.node()} has {_listed(own)}: install the same "
                "versions on all machines"
            )
        devices = registry.devices() if names is None else [registry.device_by_name(name) for name in names]
        self.aborted = 0
        self._devices = {device.name: device for device in devices}
        self._files = SharedFiles(shared)
        self._things: dict[int, Buffer | Backend | GraphPlan] = {}
        self._busy: dict[int, Backend] = {}
        self._inbox, self._outbox = _Inbox(NOTHING, ()), _Outbox()
        self._commands = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_do_")}

    def facts(self) -> list[dict[str, Any]]:
        """Return name, type, buffer types and more of each device."""
        return [_facts_of(device) for device in self._devices.values()]

    def run(self, message: bytes, *apart: Any) -> Any:
        """Run the commands of a message.

        Args:
            message: The commands and the small data to write (`packed`).
            *apart: Data to write that are separate objects, then objects that are only waited for.

        Returns:
            The commands' results and the small data read (`packed`), as one object; then each array that is
            at least `APART` bytes, or for another node, as a separate object.

        Raises:
            Error: The error of the first command that failed.
        """
        commands, blob = unpacked(message)
        self._inbox = _Inbox(blob, apart)
        self._outbox = _Outbox()
        results: list[Any] = []
        failure: Error | None = None
        for name, *args in (*commands, ("wait",)):
            try:
                if name not in ("read", "wait"):
                    self._outbox.copy()
                if failure is None or name in RELEASES:
                    result = self._commands[name](*args)
                    if result is not None:
                        results.append(result)
            except Error as error:
                failure = failure or error
            except Exception as error:
                failure = failure or BackendError(f"{name!r} failed on {platform.node()}: {one_line(error)}")
        self._inbox, outbox, self._outbox = _Inbox(NOTHING, ()), self._outbox, _Outbox()
        if failure is not None:
            failure.__traceback__ = None  # its frames would keep buffers alive
            raise failure
        first = packed(pickle.dumps(results) if results else b"", outbox.small)
        return (first, *outbox.apart) if outbox.apart else first

    # -- look-ups ------------------------------------------------------------------------------

    def _of(self, kind: type[T], handle: int) -> T:
        found = self._things.get(handle)
        if found is None or not isinstance(found, kind):
            refuse(f"{handle!r} is not a handle of a {kind.__name__} here (it may have been freed)")
        return found

    def _buffer(self, handle: int) -> Buffer:
        return self._of(Buffer, handle)  # type: ignore[type-abstract]

    def _span(self, place: int | Records, offset: int, nbytes: int) -> tuple[Tensor, int, int]:
        """Return a tensor, and a range of bytes in it.

        Args:
            place: A buffer's handle; or a tensor's record, if the buffer repacks tensors.
            offset: Offset in the buffer, or in the tensor [bytes].
            nbytes: Size of the range [bytes].
        """
        n, start = number_below(nbytes, MAX_EXTENT, "a size"), number_below(offset, MAX_EXTENT, "an offset")
        if isinstance(place, tuple):
            return read_node(place, self._buffer), start, n
        buffer = self._buffer(place)
        if start + n > buffer.size:
            refuse(f"bytes {start} to {start + n} of a buffer of {buffer.size}")
        span = Tensor(DType.I8, (n, 1, 1, 1))
        span.buffer, span.offset = buffer, start
        return span, 0, n

    def _memory(self, device: str, number: int) -> BufferType:
        """Return a device's buffer type number `number`: 0 is the default, others are extra ones."""
        return _memories(self._devices[device])[number]

    def _add(self, thing: Buffer | Backend | GraphPlan) -> int:
        handle = secrets.randbits(63)
        self._things[handle] = thing
        return handle

    def _do_wait(self) -> None:
        """Wait for queued computations."""
        while self._busy:
            _, stream = self._busy.popitem()
            stream.synchronize()

    # -- devices -------------------------------------------------------------------------------

    def _do_features(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for reg in {device.reg: None for device in self._devices.values()}:
            get_features = reg.get_proc_address("get_features")
            if get_features is not None:
                found += ((f"{reg.name}_{name}", value) for name, value in get_features(reg))
        return found

    def _do_memory(self, device: str) -> tuple[int, int]:
        return self._devices[device].memory

    def _do_declines(self, device: str, node: Records) -> str:
        return self._devices[device].declines(read_node(node, self._buffer)) or ""

    def _do_stores(self, device: str, memory: int, tensor: Records) -> Stored:
        buft, t = self._memory(device, memory), read_node(tensor, self._buffer)
        layout = buft.stored_layout(t)
        return Stored(buft.alloc_size(t), *layout, buft.packing(t), buft.suits(t), buft.is_readable(t))

    # -- memory --------------------------------------------------------------------------------

    def _do_alloc(self, device: str, memory: int, nbytes: int) -> int:
        return self._add(self._memory(device, memory).alloc_buffer(nbytes))

    def _do_usage(self, handle: int, usage: BufferUsage) -> None:
        self._buffer(handle).usage = usage

    def _do_clear(self, handle: int, value: int) -> None:
        buffer = self._buffer(handle)
        self._do_wait()
        buffer.clear(value)

    def _do_init(self, tensor: Records) -> None:
        read_node(tensor, self._buffer)  # calls the buffer's `init_tensor`

    def _do_write(self, place: int | Records, offset: int, nbytes: int, is_apart: bool) -> None:
        tensor, start, n = self._span(place, offset, nbytes)
        data = self._inbox.take(n, is_apart)
        self._do_wait()
        tensor.set(data, start)

    def _do_add(self, place: int | Records, offset: int, nbytes: int, n_before: int, n_after: int) -> None:
        """Write the float32 sum of `n_before` received arrays, the array here, `n_after` received ones."""
        tensor, start, n = self._span(place, offset, nbytes)
        before, after = ([self._inbox.take(n, True) for _ in range(count)] for count in (n_before, n_after))
        self._do_wait()
        first, *rest = (part.view(np.float32) for part in (*before, tensor.get(start, n), *after))
        total = first.copy()
        for part in rest:
            total += part
        tensor.set(total.view(np.uint8), start)

    def _do_load(self, place: int | Records, offset: int, nbytes: int, *part: Any) -> None:
        """Write a part of a shared file."""
        tensor, start, n = self._span(place, offset, nbytes)
        data = self._files.read(n, *part)
        self._do_wait()
        tensor.set(data, start)

    def _do_fill(self, place: int | Records, offset: int, nbytes: int, value: int) -> None:
        tensor, start, n = self._span(place, offset, nbytes)
        self._do_wait()
        tensor.memset(value, start, n)

    def _do_read(self, place: int | Records, offset: int, nbytes: int, is_apart: bool) -> None:
        tensor, start, n = self._span(place, offset, nbytes)
        self._do_wait()
        buffer = tensor.buffer
        if isinstance(place, int) and buffer is not None and buffer.is_host:
            self._outbox.add(buffer.base[tensor.offset : tensor.offset + n], is_apart)
        else:
            self._outbox.add(tensor.get(start, n), is_apart)

    def _do_copy(self, src: int, src_offset: int, dst: int, dst_offset: int, nbytes: int) -> None:
        (source, *_), (target, *_) = self._span(src, src_offset, nbytes), self._span(dst, dst_offset, nbytes)
        self._do_wait()
        tensor_copy(source, target)

    # -- streams and plans ---------------------------------------------------------------------

    def _do_open(self, device: str, params: dict[str, Any]) -> int:
        return self._add(self._devices[device].init_backend(params))

    def _do_threads(self, handle: int, n: int) -> None:
        stream = self._of(Backend, handle)  # type: ignore[type-abstract]
        set_n_threads = stream.device.reg.get_proc_address("set_n_threads")
        if set_n_threads is not None:
            set_n_threads(stream, n)

    def _do_plan(self, stream: int, graph: tuple[Records, list[int]]) -> int:
        backend = self._of(Backend, stream)  # type: ignore[type-abstract]
        return self._add(backend.graph_plan_create(read_graph(graph, self._buffer)))

    def _do_free(self, handle: int) -> None:
        """Release a buffer, a stream or a plan."""
        thing: Any = self._of(object, handle)
        self._do_wait()
        del self._things[handle]
        if isinstance(thing, GraphPlan):
            with suppress(FreedError):  # its stream may have been freed before
                thing.backend.graph_plan_free(thing)
        else:
            thing.free()

    def _do_compute(self, handle: int, number: int | None = None) -> bool | None:
        """Compute a plan.

        Args:
            handle: The plan.
            number: Number by which `aborted` stops the computation; `None` if nothing will.

        Returns:
            True if it was stopped, else `None`.
        """
        plan = self._of(GraphPlan, handle)
        stream = plan.backend
        set_abort = stream.device.reg.get_proc_address("set_abort_callback")
        if set_abort is not None:
            set_abort(stream, None if number is None else lambda: self.aborted == number)
        if any(busy is not stream for busy in self._busy.values()):
            self._do_wait()
        self._busy[id(stream)] = stream
        return stream.graph_plan_compute(plan) is Status.ABORTED or None


class _Inbox:
    """Data received with a message."""

    def __init__(self, blob: Bytes, apart: Sequence[Any]) -> None:
        self._blob, self._at = blob, 0
        self._apart = iter(apart)

    def take(self, nbytes: int, is_apart: bool) -> Bytes:
        if is_apart:
            data = next(self._apart, NOTHING).reshape(-1)
        else:
            data = self._blob[self._at : self._at + nbytes]
            self._at += nbytes
        if data.nbytes != nbytes:
            refuse(f"{nbytes} bytes are to be written, and {data.nbytes} were received")
        return data


class _Outbox:
    """Data read for the driver or another node: views of memory, copied before later commands run."""

    def __init__(self) -> None:
        self.small: list[Bytes] = []
        self.apart: list[Bytes] = []
        self._n_copied = 0

    def add(self, data: Bytes, is_apart: bool) -> None:
        (self.apart if is_apart else self.small).append(data)

    def copy(self) -> None:
        """Replace views by copies, as later commands may change the memory."""
        if self._n_copied < len(self.small) + len(self.apart):
            self.small, self.apart = ([data.copy() for data in part] for part in (self.small, self.apart))
            self._n_copied = len(self.small) + len(self.apart)


def _memories(device: Device) -> list[BufferType]:
    return [device.buffer_type, *device.extra_bufts]


def _facts_of(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "description": device.description,
        "host": platform.node(),
        "type": device.type.value,
        "by_name_only": not device.is_automatic,
        "memories": [
            {
                "name": buft.name,
                "alignment": buft.alignment,
                "max_size": buft.max_size,
                "is_plain": not any(
                    getattr(type(buft), name) is not getattr(BufferType, name)
                    for name in ("alloc_size", "stored_layout", "packing", "suits", "is_readable")
                ),
            }
            for buft in _memories(device)
        ],
    }


def _listed(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
