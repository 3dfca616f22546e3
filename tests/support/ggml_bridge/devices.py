"""A device of ggmlb's, registered with ggml: tables of callbacks, as a C backend has them."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import Any

from ggmlb import Backend, Buffer, Device, DType, Tensor
from tests.support.ggml_bridge.c_api import (
    API_VERSION,
    CPU_TYPE,
    GPU_TYPE,
    STATUS_FAILED,
    STATUS_SUCCESS,
    BackendTable,
    BufferTable,
    BufferTypeTable,
    CTensor,
    DeviceTable,
    Ggml,
    InitBackend,
    RegTable,
)  # fmt: skip
from tests.support.ggml_bridge.nodes import Reader, Unknown

PREFIX = "ggmlb-"
"""Of the names that ggml knows our devices by: it has a `CPU` itself, with which it compares."""

FAULT = "ggmlb raised "
"""What is printed where a callback failed; such a case has failed, whatever its values are."""

NOWHERE = 0x10000
"""The base address that ggml is told for memory that the host cannot reach."""


class Memory:
    """A buffer of ggmlb's as ggml sees it: bytes from `base` on."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.base: int = buffer.base.ctypes.data if buffer.is_host else NOWHERE
        self._all = Tensor(DType.I8, (buffer.size, 1, 1, 1))
        self._all.buffer = buffer

    def set(self, address: int, data: int, nbytes: int) -> None:
        """Write bytes of the host's."""
        self.buffer.set_tensor(self._all, (ctypes.c_uint8 * nbytes).from_address(data), address - self.base)

    def get(self, address: int, data: int, nbytes: int) -> None:
        """Read bytes into memory of the host's."""
        found = self.buffer.get_tensor(self._all, address - self.base, nbytes)
        ctypes.memmove(data, found.ctypes.data, nbytes)

    def memset(self, address: int, value: int, nbytes: int) -> None:
        """Set bytes to a value."""
        self.buffer.memset_tensor(self._all, value, address - self.base, nbytes)


class Registration:
    """Registers a device of ggmlb's with ggml, as a GPU of the name `ggmlb-<name>`.

    Attributes:
        name: That name.
        n_graphs: Graphs that were computed.
    """

    def __init__(self, ggml: Ggml, device: Device, seed: int = 0, supports_nothing: bool = False) -> None:
        """Register it.

        Args:
            ggml: The libraries; they keep the device until the process ends.
            device: The device.
            seed: Of the data of each case.
            supports_nothing: Say no to every op: so ggml names its cases without computing them.
        """
        self.name = PREFIX + device.name
        self.n_graphs = 0
        self._ggml = ggml
        self._device = device
        self._seed = seed
        self._supports_nothing = supports_nothing
        self._kept: list[Any] = []  # what C has addresses of
        self._memory: dict[int, Memory] = {}
        self._streams: dict[int, tuple[BackendTable, Backend]] = {}
        self._buffers = self._buffer_table()
        self._buft = self._buffer_type_table()
        self._dev = self._device_table()
        self._reg = self._reg_table()
        self._buft.device, self._dev.reg = ctypes.addressof(self._dev), ctypes.addressof(self._reg)
        self._one_thread_for_ggml()
        ggml.c["ggml_backend_register"](ctypes.addressof(self._reg))

    # -- tables --------------------------------------------------------------------------------

    def _fill(self, table: ctypes.Structure, **slots: tuple[Callable[..., Any], Any]) -> None:
        """Put callbacks into a table: for each slot a function, and what it gives where it raises."""
        types = {field[0]: field[1] for field in table._fields_}
        for slot, (function, otherwise) in slots.items():
            callback = types[slot](self._guarded(slot, function, otherwise))
            self._kept.append(callback)
            setattr(table, slot, callback)

    def _guarded(self, slot: str, function: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
        """Return a function that raises nothing into C, but prints it where the suite sees it."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as error:
                self._ggml.say(f"[{FAULT}{type(error).__name__} in {slot}: {error}] ".replace("\n", " "))
                traceback.print_exc()
                return otherwise

        return call

    def _text(self, text: str) -> int:
        """Return the address of a C string."""
        held = ctypes.create_string_buffer(text.encode())
        self._kept.append(held)
        return ctypes.addressof(held)

    def _reg_table(self) -> RegTable:
        table, name = RegTable(API_VERSION), self._text("ggmlb")
        self._fill(
            table,
            get_name=(lambda _: name, name),
            get_device_count=(lambda _: 1, 0),
            get_device=(lambda _, i: ctypes.addressof(self._dev), None),
            get_proc_address=(lambda _, name: None, None),
        )
        return table

    def _device_table(self) -> DeviceTable:
        table, name, description = DeviceTable(), self._text(self.name), self._text(self._device.description)

        def get_memory(_: int, free: Any, total: Any) -> None:
            free[0], total[0] = self._device.memory

        def get_props(_: int, props: Any) -> None:
            p = props[0]
            p.name, p.description, p.type, p.device_id = name, description, GPU_TYPE, None
            p.memory_free, p.memory_total = self._device.memory
            p.caps = (ctypes.c_bool * 5)()

        self._fill(
            table,
            get_name=(lambda _: name, name),
            get_description=(lambda _: description, description),
            get_memory=(get_memory, None),
            get_type=(lambda _: GPU_TYPE, GPU_TYPE),  # whatever it is: ggml compares with the first CPU
            get_props=(get_props, None),
            init_backend=(lambda _, params: self._open(), None),
            get_buffer_type=(lambda _: ctypes.addressof(self._buft), None),
            supports_op=(lambda _, op: self._supports(op), False),
            supports_buft=(lambda _, buft: buft == ctypes.addressof(self._buft), False),
        )
        return table

    def _buffer_type_table(self) -> BufferTypeTable:
        table, buft = BufferTypeTable(), self._device.buffer_type
        name = self._text(PREFIX + buft.name)
        self._fill(
            table,
            get_name=(lambda _: name, name),
            alloc_buffer=(lambda _, nbytes: self._allocate(nbytes), None),
            get_alignment=(lambda _: buft.alignment, 1),
            get_max_size=(lambda _: buft.max_size, 0),
            get_alloc_size=(lambda _, t: self._alloc_size(t), 0),
            is_host=(lambda _: buft.is_host, False),
        )
        return table

    def _buffer_table(self) -> BufferTable:
        table, memory = BufferTable(), self._memory
        at = CTensor.from_address
        self._fill(
            table,
            free_buffer=(lambda b: memory.pop(b).buffer.free(), None),
            get_base=(lambda b: memory[b].base, None),
            memset_tensor=(lambda b, t, value, i, n: memory[b].memset(at(t).data + i, value, n), None),
            set_tensor=(lambda b, t, data, i, n: memory[b].set(at(t).data + i, data, n), None),
            get_tensor=(lambda b, t, data, i, n: memory[b].get(at(t).data + i, data, n), None),
            clear=(lambda b, value: memory[b].buffer.clear(value), None),
        )
        return table

    def _one_thread_for_ggml(self) -> None:
        """Let streams of ggml's CPU have one thread: its default four wait for each other by spinning."""
        cpu = DeviceTable.from_address(self._ggml.c["ggml_backend_dev_by_type"](CPU_TYPE))
        original = ctypes.cast(cpu.init_backend, ctypes.c_void_p).value
        assert original is not None
        opened = InitBackend(original)

        def init_backend(dev: int, params: int) -> Any:
            stream = opened(dev, params)
            self._ggml.c["ggml_backend_cpu_set_n_threads"](stream, 1)
            return stream

        self._fill(cpu, init_backend=(init_backend, None))

    # -- callbacks -----------------------------------------------------------------------------

    def _reader(self) -> Reader:
        def lookup(address: int) -> tuple[Buffer, int] | None:
            memory = self._memory.get(address)
            return None if memory is None else (memory.buffer, memory.base)

        return Reader(self._ggml, lookup)

    def _supports(self, op: int) -> bool:
        try:
            return not self._supports_nothing and self._device.supports_op(self._reader().tensor(op))
        except Unknown:
            return False

    def _alloc_size(self, tensor: int) -> int:
        nbytes: int = self._ggml.c["ggml_nbytes"](tensor)
        try:
            return max(nbytes, self._device.buffer_type.alloc_size(self._reader().tensor(tensor)))
        except Unknown:
            return nbytes

    def _allocate(self, nbytes: int) -> int:
        self._ggml.seed(self._seed)  # the test fills tensors when it has placed them
        memory = Memory(self._device.buffer_type.alloc_buffer(max(nbytes, 1)))
        address: int = self._ggml.c["ggml_backend_buffer_init"](
            ctypes.addressof(self._buft), self._buffers, None, memory.buffer.size
        )
        self._memory[address] = memory
        return address

    def _open(self) -> int:
        stream = self._device.init_backend()
        table, name = BackendTable(), self._text(self.name)

        def free(this: int) -> None:
            stream.free()
            del self._streams[this]

        self._fill(
            table,
            get_name=(lambda _: name, name),
            free=(free, None),
            synchronize=(lambda _: stream.synchronize(), None),
            graph_compute=(lambda _, graph: self._compute(stream, graph), STATUS_FAILED),
        )
        table.guid, table.device = self._text("ggmlb's streams."), ctypes.addressof(self._dev)
        self._streams[ctypes.addressof(table)] = (table, stream)
        return ctypes.addressof(table)

    def _compute(self, stream: Backend, graph: int) -> int:
        stream.graph_compute(self._reader().graph(graph))
        self.n_graphs += 1
        return STATUS_SUCCESS
