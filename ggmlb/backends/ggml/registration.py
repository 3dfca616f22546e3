"""Devices of ggmlb as devices of a compiled ggml in this process: `register_with_ggml`.

ggml calls a backend through structs of function pointers. Their fields' places differ between versions and
are measured first (`abi.tables`), in a child process. The structs made here have a Python function in each
field. They are never freed: a program may keep a device's address for as long as it lives.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from typing import Any, Final

import numpy as np

from ggmlb.backends.ggml import abi
from ggmlb.backends.ggml.find import in_process
from ggmlb.backends.ggml.library import GgmlLibrary, guard, probe
from ggmlb.backends.ggml.reader import CTensor, KnownGraphs, Reader
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import BackendError, BackendUnavailable, RegistryError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType, Device, Event
from ggmlb.interface.registry import device_by_name, host_device
from ggmlb.system import log

PREFIX: Final = "ggmlb-"
"""Prefix of the names in ggml, which may have a `CPU` or `CUDA0` itself."""

_GPU: Final = 1
"""`GGML_BACKEND_DEVICE_TYPE_GPU`: the type of device that programs give layers to."""

_WEIGHTS: Final = 1
"""`GGML_BACKEND_BUFFER_USAGE_WEIGHTS`."""

_FAILED: Final = -1
"""`GGML_STATUS_FAILED`."""

_LOG_ERROR: Final = 4
"""`GGML_LOG_LEVEL_ERROR`."""

_first_free: Final = count(1 << 46, 1 << 36)
"""Addresses for memory that the host cannot access, 64 GiB apart: never those of real memory."""

_kept: Final[list[Any]] = []
"""Objects whose addresses C code has, for the life of the process."""

Fields = dict[str, tuple[Callable[..., Any], Any]]
"""The fields of a struct: a function, and what it returns to C if it raises."""

_registrations: Final[list[GgmlRegistration]] = []
_lock: Final = threading.RLock()


def register_with_ggml(
    device: Device | str, library: str | os.PathLike[str] | None = None, repack: bool = True
) -> GgmlRegistration:
    """Register a device with a ggml library in this process; see `ggmlb.register_with_ggml`."""
    if isinstance(device, str):
        device = device_by_name(device)
    found = in_process(library)
    facts = probe(found, "--tables")
    with _lock:
        for other in _registrations:
            if other.device is device and other.library.found.parts == found.parts and other.is_registered:
                raise RegistryError(
                    f"register_with_ggml: {device.name} is registered with {other.library} already, as "
                    f"{other.name}; use that, or unregister it first"
                )
        made = GgmlRegistration(GgmlLibrary(found, "ggml:", facts), device, repack)
        _registrations.append(made)
        return made


class _Memory:
    """A C buffer whose bytes are in memory of a device.

    Attributes:
        base: Its first address for ggml.
        failure: Why its contents are wrong; empty if they are right.
        held: Tensors that hold its bytes, by their addresses: one for all, or one for each weight.
    """

    def __init__(self, buft: BufferType, base: int, size: int, plain: Buffer | None) -> None:
        self.buft = buft
        self.base = base
        self.size = size
        self.failure = ""
        self.held: dict[int, Tensor] = {}
        self.is_whole = plain is not None
        if plain is not None:
            self.hold(base, Tensor(DType.I8, (plain.size, 1, 1, 1)), plain)

    def hold(self, address: int, tensor: Tensor, buffer: Buffer) -> Tensor:
        """Place a tensor in a buffer of its own."""
        tensor.buffer = buffer
        self.held[address] = tensor
        return tensor

    def whole(self) -> Tensor:
        """Return all bytes as one tensor, in memory that is allocated now if there is none."""
        with _lock:
            if not self.is_whole:
                buffer = self.buft.alloc_buffer(self.size)
                self.hold(self.base, Tensor(DType.I8, (buffer.size, 1, 1, 1)), buffer)
                self.is_whole = True
            return self.held[self.base]


class _Stream:
    """A C backend: a stream on the device.

    Attributes:
        failure: Why its queued work failed; empty if it did not.
        table: The C struct.
    """

    def __init__(self, backend: Backend, known: KnownGraphs, table: abi.Table) -> None:
        self.backend = backend
        self.known = known
        self.table = table
        self.failure = ""
        self.n_threads = 0

    @cached_property
    def cpu(self) -> Backend:
        """A stream of ggmlb's CPU, for nodes that the device declines."""
        return host_device().init_backend()

    def wait(self) -> None:
        """Wait for the queued work."""
        try:
            self.backend.synchronize()
        except BaseException as error:
            self.failure = f"queued work failed: {error}"
            raise


class GgmlRegistration:
    """A device of ggmlb registered with a ggml library, as `register_with_ggml` returns it.

    Attributes:
        device: The device.
        library: The library: its version, and where it was found.
        name: Name of the device in ggml: `ggmlb-` and its own.
        is_registered: Whether ggml lists it; false after `unregister`.
        n_graphs: Number of graphs that ggml had it compute.
    """

    def __init__(self, library: GgmlLibrary, device: Device, repack: bool) -> None:
        self.device = device
        self.library = library
        self.name = PREFIX + device.name
        self.is_registered = False
        self.n_graphs = 0
        self._c = library.functions({**abi.SIGNATURES, **abi.FOR_TABLES}).c
        self._extra = device.extra_bufts if repack else ()
        self._memories: dict[int, _Memory] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, tuple[Any, Event]] = {}
        self._reader = Reader(library, device, self._place)
        self._tables: dict[str, dict[str, int]] = library.facts["tables"]
        self._buffer = self._table("buffer", self._buffer_fields())
        self._buft = self._buft_table(device.buffer_type, self.name)
        self._host = None
        if device.caps.host_buffer and device.host_buffer_type is not None:
            self._host = self._buft_table(device.host_buffer_type, f"{self.name}_Host")
        self._dev = self._table("device", self._device_fields())
        self._procs = self._proc_functions()
        self._stream = self._table("stream", self._stream_fields())
        self._stream.slots[self._tables["stream"]["guid"]] = _text("ggmlb's streams.")
        name = _text(self.name)
        self._reg = self._table(
            "registration",
            {
                "get_name": (lambda _: name, name),
                "get_device_count": (lambda _: 1, 0),
                "get_device": (lambda _, i: ctypes.addressof(self._dev), None),
                "get_proc_address": (lambda _, proc: self._procs.get(proc.decode()), None),
            },
        )
        self._reg.slots[0] = self._tables["api_version"]
        self._point("device", self._dev, "registration", self._reg)
        self._point("stream", self._stream, "device", self._dev)
        for table in (self._buft, self._host):
            if table is not None:
                self._point("buffer_type", table, "device", self._dev)
        self._check()
        self._c["backend_register"](ctypes.addressof(self._reg))
        self.is_registered = True
        atexit.register(self._detach)

    def __repr__(self) -> str:
        state = "" if self.is_registered else ", unregistered"
        return f"<GgmlRegistration {self.name} with {self.library}{state}>"

    def unregister(self) -> None:
        """Remove the device from ggml's list.

        Raises:
            BackendError: A program still has memory or streams of the device; nothing is changed.
        """
        with _lock:
            if not self.is_registered:
                return
            if self._memories or self._streams:
                raise BackendError(
                    f"unregister {self.name}: {self.library} still has {len(self._memories)} buffers and "
                    f"{len(self._streams)} streams of it; free the models and contexts that use it first"
                )
            self._c["backend_unload"](ctypes.addressof(self._reg))
            self.is_registered = False

    def _detach(self) -> None:
        """Replace the callbacks by a C function without effect: threads of ggml may outlive Python.

        It returns the number of devices: for `graph_compute`, a status that is not success.
        """
        function: Any = self._c["backend_dev_count"]
        harmless = ctypes.cast(function, ctypes.c_void_p).value
        buffers = [("buffer", abi.Table.from_address(address)) for address in self._memories]
        for kind, table in (*buffers, *(("stream", stream.table) for stream in self._streams.values())):
            for name, index in self._tables[kind].items():
                if name not in ("get_name", "get_base", "guid", "device"):
                    table.slots[index] = harmless
        for stream in self._streams.values():
            with suppress(BackendError):
                stream.wait()

    # -- structs -------------------------------------------------------------------------------

    def _table(self, kind: str, fields: Fields) -> abi.Table:
        """Return a struct with a callback in each field: a function, and its result if it raises."""
        table = abi.Table()
        for name, (function, otherwise) in fields.items():
            kinds = abi.TABLES[kind][name].split()[0]
            table.slots[self._tables[kind][name]] = self._pointer(kinds, name, function, otherwise)
        _kept.append(table)
        return table

    def _point(self, kind: str, table: abi.Table, field: str, to: abi.Table) -> None:
        table.slots[self._tables[kind][field]] = ctypes.addressof(to)

    def _pointer(
        self, kinds: str, name: str, function: Callable[..., Any], otherwise: Any = None
    ) -> int | None:
        """Return a C function that calls a Python one; it logs an error, and then returns `otherwise`."""

        def call(*arguments: Any) -> Any:
            try:
                guard.enter(name)  # the exit of Python waits until it has left
                try:
                    return function(*arguments)
                finally:
                    guard.leave()
            except BaseException as error:
                self._report(name, error)
                if isinstance(error, KeyboardInterrupt):
                    _thread.interrupt_main()
                return otherwise

        callback = abi.callback(kinds, call)
        _kept.append(callback)
        return ctypes.cast(callback, ctypes.c_void_p).value

    def _report(self, name: str, error: BaseException | str) -> None:
        """Write an error in the callback `name` to ggml's log."""
        kind = "" if isinstance(error, str) else f"{type(error).__name__}: "
        text = f"{self.name}: {name} failed: {kind}{error}"
        log.record("ggml", log.INFO, "%s", text)
        if "log_internal" in self._c:
            self._c["log_internal"](_LOG_ERROR, text.replace("%", "%%").encode() + b"\n")

    def _check(self) -> None:
        """Raise unless the library reads the structs as they were meant; nothing is registered yet.

        Raises:
            BackendUnavailable: It does not.
        """
        c, reg, dev, buft = self._c, *(ctypes.addressof(t) for t in (self._reg, self._dev, self._buft))
        room = (ctypes.c_size_t * 2)()
        c["backend_dev_memory"](dev, ctypes.addressof(room), ctypes.addressof(room) + 8)
        name = self.name.encode()
        expected = (name, _GPU, reg, 1, dev, buft, dev, name, self.device.buffer_type.alignment)
        found = (
            c["backend_dev_name"](dev), c["backend_dev_type"](dev), c["backend_dev_backend_reg"](dev),
            c["backend_reg_dev_count"](reg), c["backend_reg_dev_get"](reg, 0),
            c["backend_dev_buffer_type"](dev), c["backend_buft_get_device"](buft),
            c["backend_buft_name"](buft), c["backend_buft_get_alignment"](buft),
        )  # fmt: skip
        if found != expected or room[1] != self.device.memory[1]:
            raise BackendUnavailable(
                f"register_with_ggml: {self.library} reads {found}, not {expected}; use another ggml"
            )

    # -- the registration and the device -------------------------------------------------------

    def _proc_functions(self) -> dict[str, int | None]:
        """Return the addresses of the functions that programs look up by name."""
        reg, found = self.device.reg, {}

        def set_n_threads(this: int, n: int) -> None:
            stream = self._streams[this]
            if stream.n_threads != n:
                stream.n_threads = n
                reg.get_proc_address("set_n_threads")(stream.backend, n)  # type: ignore[misc]

        def set_abort_callback(this: int, function: int | None, data: int | None) -> None:
            asks = abi.AbortFunction(function) if function else None
            self._streams[this].backend.abort_callback = None if asks is None else lambda: bool(asks(data))

        for kinds, function in (("vpi", set_n_threads), ("vppp", set_abort_callback)):
            name = function.__name__
            if reg.get_proc_address(name) is not None:
                found[f"ggml_backend_{name}"] = self._pointer(kinds, name, function)
        return found

    def _device_fields(self) -> Fields:
        device, name, description = self.device, _text(self.name), _text(self.device.description)
        from_host = device.caps.buffer_from_host_ptr and not self._extra  # repacked weights are copies
        props_size = self.library.facts["props_size"]
        caps_at = abi.CAPS_AT[props_size]

        def get_memory(_: int, free: int, total: int) -> None:
            for address, number in zip((free, total), device.memory, strict=True):
                ctypes.c_size_t.from_address(address).value = number

        def get_props(_: int, props: int) -> None:
            caps = device.caps
            head = struct.pack("=4Qi", name, description, *device.memory, _GPU)
            ctypes.memmove(props, head, len(head))
            flags = bytes((caps.async_, self._host is not None, from_host, caps.events, caps.mmap_support))
            ctypes.memmove(props + caps_at, flags, min(len(flags), props_size - caps_at))  # 4 in older ones

        def supports_buft(_: int, buft: int) -> bool:
            if self._host is not None and buft == ctypes.addressof(self._host):
                return device.supports_buft(device.host_buffer_type)  # type: ignore[arg-type]
            return buft == ctypes.addressof(self._buft)

        fields: Fields = {
            "get_name": (lambda _: name, name),
            "get_description": (lambda _: description, description),
            "get_memory": (get_memory, None),
            "get_type": (lambda _: _GPU, _GPU),
            "get_props": (get_props, None),
            "init_backend": (self._open, None),
            "get_buffer_type": (lambda _: ctypes.addressof(self._buft), None),
            "supports_op": (lambda _, op: self._supports(op), False),
            "supports_buft": (supports_buft, False),
            "offload_op": (lambda _, op: self._supports(op) and self._offloads(op), False),
        }
        if self._host is not None:
            fields["get_host_buffer_type"] = (lambda _: ctypes.addressof(self._host), None)  # type: ignore[arg-type]
        if from_host:
            fields["buffer_from_host_ptr"] = (self._over, None)
        if device.caps.events:
            fields["event_new"] = (lambda _: self._new_event(), None)
            fields["event_free"] = (lambda _, event: self._events.pop(event)[1].free(), None)
            fields["event_synchronize"] = (lambda _, event: self._events[event][1].synchronize(), None)
        return fields

    def _supports(self, op: int) -> bool:
        c = CTensor(self.library, op)
        if self._reader.declines(c, self.device) is None:
            return True
        # No other backend of ggml can write to this memory: ggmlb's CPU does, on copies (`NodeRun`).
        buffer = CTensor(self.library, c.view_src).buffer if c.view_src else c.buffer
        buft = self._c["backend_buffer_get_type"](buffer) if buffer else 0
        is_ours = buft == ctypes.addressof(self._buft)
        return is_ours and self._reader.declines(c, host_device()) is None

    def _offloads(self, op: int) -> bool:
        return self.device.offload_op(self._reader.one_level(op))

    def _new_event(self) -> int:
        made = (ctypes.c_void_p * 2)(ctypes.addressof(self._dev), None)
        self._events[ctypes.addressof(made)] = (made, self.device.event_new())
        return ctypes.addressof(made)

    # -- memory --------------------------------------------------------------------------------

    def _buft_table(self, buft: BufferType, name: str) -> abi.Table:
        text, is_own = _text(name), buft is self.device.buffer_type

        def alloc_size(_: int, tensor: int) -> int:
            c = CTensor(self.library, tensor)
            nbytes: int = self._c["nbytes"](tensor)
            if c.type not in self._reader.dtypes:
                return nbytes
            return max(nbytes, buft.alloc_size(self._reader.tensor(c)))

        def allocate(_: int, nbytes: int) -> int:
            return self._allocate(buft, table, nbytes, is_own and bool(self._extra))

        table = self._table(
            "buffer_type",
            {
                "get_name": (lambda _: text, text),
                "alloc_buffer": (allocate, None),
                "get_alignment": (lambda _: buft.alignment, 1),
                "get_max_size": (lambda _: min(buft.max_size, 1 << 36), 0),
                "get_alloc_size": (alloc_size, 0),
                "is_host": (lambda _: buft.is_host and not (is_own and self._extra), False),
            },
        )
        return table

    def _allocate(self, buft: BufferType, table: abi.Table, nbytes: int, is_late: bool) -> int:
        """Return a new C buffer; with `is_late`, weights get memory of their own when they are written."""
        if is_late:
            free = self.device.memory[0]
            if free and nbytes > free:
                raise buft.out_of_memory(nbytes)
        plain = None if is_late else buft.alloc_buffer(max(nbytes, 1))
        base = plain.base.ctypes.data if plain is not None and plain.is_host else next(_first_free)
        return self._new_memory(_Memory(buft, base, nbytes, plain), table)

    def _over(self, _: int, start: int, size: int, most: int) -> int:
        """Return a C buffer over host memory, which is not written (a mapped file)."""
        memory = _host(start, size)
        memory.flags.writeable = False
        buffer = self.device.buffer_from_host_ptr(memory, most)
        return self._new_memory(_Memory(buffer.buft, start, size, buffer), self._buft)

    def _new_memory(self, memory: _Memory, table: abi.Table) -> int:
        made = self._c["backend_buffer_init"]
        address: int = made(ctypes.addressof(table), self._buffer, None, memory.size)
        self._memories[address] = memory
        return address

    def _buffer_fields(self) -> Fields:
        return {
            "free_buffer": (self._free_memory, None),
            "get_base": (lambda b: self._memories[b].base, None),
            "memset_tensor": (self._memset, None),
            "set_tensor": (self._set, None),
            "get_tensor": (self._get, None),
            "cpy_tensor": (self._copy, False),
            "clear": (self._clear, None),
        }

    def _free_memory(self, b: int) -> None:
        buffers = [tensor.placed("free") for tensor in self._memories.pop(b).held.values()]
        for stream in list(self._streams.values()):
            stream.known.forget(buffers)
        for buffer in buffers:
            buffer.free()

    def _find(self, b: int, c: CTensor) -> tuple[Tensor, int]:
        """Return the tensor of ggmlb that holds the bytes of a C tensor, and where they begin in it.

        Weights of a device with `extra_bufts` get memory of their own when they are first written.
        """
        memory = self._memories[b]
        if memory.is_whole or self._c["backend_buffer_get_usage"](b) != _WEIGHTS:
            return memory.whole(), c.data - memory.base
        root = CTensor(self.library, c.view_src) if c.view_src else c
        with _lock:
            held = memory.held.get(root.data)
            if held is None:
                if root.type in self._reader.dtypes:
                    leaf = self._reader.tensor(root)
                else:  # bytes that only the program reads
                    leaf = Tensor(DType.I8, (int(self._c["nbytes"](root.address)), 1, 1, 1))
                # Other ops than products read f32 weights, too: convolutions, biases.
                extra = self._extra if leaf.dtype is not DType.F32 else ()
                fit = (e for e in extra if e.suits(leaf) and e.is_readable(leaf))
                buft = next(fit, self.device.buffer_type)
                held = memory.hold(root.data, leaf, buft.alloc_buffer(max(buft.alloc_size(leaf), 1)))
                held.placed("usage").usage = BufferUsage.WEIGHTS
        return held, c.data - root.data

    @contextmanager
    def _writing(self, b: int) -> Iterator[None]:
        """Let the computations that follow fail if a write to a C buffer fails: it returns no status."""
        try:
            yield
        except BaseException as error:
            self._memories[b].failure = f"a write to its memory failed: {error}"
            raise

    def _set(
        self, b: int, tensor: int, data: int, offset: int, n: int, stream: Backend | None = None
    ) -> None:
        with self._writing(b):
            held, start = self._find(b, CTensor(self.library, tensor))
            write = held.placed("set_tensor").set_tensor if stream is None else stream.set_tensor_async
            write(held, _host(data, n), start + offset)

    def _get(
        self, b: int, tensor: int, data: int, offset: int, n: int, stream: Backend | None = None
    ) -> None:
        try:
            held, start = self._find(b, CTensor(self.library, tensor))
            if stream is None:
                held.placed("get_tensor").get_tensor(held, start + offset, n, _host(data, n))
            else:
                stream.get_tensor_async(held, _host(data, n), start + offset)
        except BaseException:
            ctypes.memset(data, 0xFF, n)  # NaN, as no status tells the program
            raise

    def _memset(self, b: int, tensor: int, value: int, offset: int, nbytes: int) -> None:
        with self._writing(b):
            held, start = self._find(b, CTensor(self.library, tensor))
            held.placed("memset_tensor").memset_tensor(held, value, start + offset, nbytes)

    def _clear(self, b: int, value: int) -> None:
        memory = self._memories[b]
        with self._writing(b):
            if self._c["backend_buffer_get_usage"](b) != _WEIGHTS:
                memory.whole()
            for held in memory.held.values():
                held.placed("clear").memset_tensor(held, value)

    def _copy(self, b: int, src: int, dst: int) -> bool:
        pair = self._pair(src, dst)
        return pair is not None and pair[1].placed("cpy_tensor").cpy_tensor(*pair)

    def _pair(self, src: int, dst: int) -> tuple[Tensor, Tensor] | None:
        """Return two C tensors as placed leafs; `None` unless both are in memory of ggmlb's devices."""
        placed = []
        for address in (src, dst):
            c = CTensor(self.library, address)
            owner = next((r for r in _registrations if c.buffer in r._memories), None)
            if owner is None or c.type not in self._reader.dtypes:
                return None
            leaf = self._reader.tensor(c)
            owner._place(c, leaf)
            placed.append(leaf)
        return placed[0], placed[1]

    def _place(self, c: CTensor, tensor: Tensor) -> None:
        """Place a tensor read from a C tensor, if it is in memory of this device."""
        if c.buffer in self._memories and c.data:
            held, start = self._find(c.buffer, c)
            tensor.buffer, tensor.offset = held.buffer, held.offset + start

    # -- streams -------------------------------------------------------------------------------

    def _open(self, _: int, params: bytes | None) -> int | None:
        if not self.is_registered:
            return None
        table = abi.Table.from_buffer_copy(self._stream)
        address = ctypes.addressof(table)
        self._streams[address] = _Stream(self.device.init_backend(), KnownGraphs(self._reader), table)
        return address

    def _stream_fields(self) -> Fields:
        caps, name, streams, events = self.device.caps, _text(self.name), self._streams, self._events
        fields: Fields = {
            "get_name": (lambda _: name, name),
            "free": (lambda this: streams.pop(this).backend.free(), None),
            "synchronize": (lambda this: streams[this].wait(), None),
            "graph_compute": (self._compute, _FAILED),
        }
        if caps.async_:
            fields["set_tensor_async"] = (self._queued(self._set), None)
            fields["get_tensor_async"] = (self._queued(self._get), None)
            fields["cpy_tensor_async"] = (self._copy_async, False)
        if caps.events:
            fields["event_record"] = (lambda this, e: streams[this].backend.event_record(events[e][1]), None)
            fields["event_wait"] = (self._wait_for, None)
        return fields

    def _wait_for(self, this: int, event: int) -> None:
        owner = next(r for r in _registrations if event in r._events)
        self._streams[this].backend.event_wait(owner._events[event][1])

    def _queued(self, transfer: Callable[..., None]) -> Callable[..., None]:
        """Return `_set` or `_get` as a transfer that a stream queues."""

        def queue(this: int, tensor: int, *place: int) -> None:
            transfer(CTensor(self.library, tensor).buffer, tensor, *place, self._streams[this].backend)

        return queue

    def _copy_async(self, source: int, target: int, src: int, dst: int) -> bool:
        owner = next((r for r in _registrations if source in r._streams), None)
        pair = self._pair(src, dst) if owner is not None else None
        if owner is None or pair is None:
            return False
        return self._streams[target].backend.cpy_tensor_async(owner._streams[source].backend, *pair)

    def _compute(self, this: int, graph: int) -> int:
        stream, c = self._streams[this], self._c
        memories = list(self._memories.values())  # other threads allocate meanwhile
        failure = stream.failure or next((m.failure for m in memories if m.failure), "")
        if failure:
            self._report("graph_compute", failure)
            return _FAILED
        nodes, n = c["graph_nodes"](graph), c["graph_n_nodes"](graph)
        self.n_graphs += 1
        for run in stream.known.find(ctypes.string_at(nodes, 8 * n)):
            status = run.compute(stream.backend, stream.cpu if run.by_cpu else None)
            if status:
                return status
        return 0


def _host(data: int, nbytes: int) -> Any:
    """Return memory of the host as a byte array; its owner keeps it for as long as ggml's rules say."""
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(data)
    return np.frombuffer(memory, np.uint8)


def _text(text: str) -> int:
    """Return the address of a C string that is never freed."""
    held = ctypes.create_string_buffer(text.encode())
    _kept.append(held)
    return ctypes.addressof(held)
