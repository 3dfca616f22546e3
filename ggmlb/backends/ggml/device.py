"""GgmlDevice: a device of a ggml library."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy.typing as npt

from ggmlb.backends.common.rules import in_window
from ggmlb.backends.ggml import abi
from ggmlb.backends.ggml.backend import GgmlBackend, GgmlEvent
from ggmlb.backends.ggml.buffer import GgmlBuffer, GgmlBufferType
from ggmlb.backends.ggml.library import GgmlLibrary, guard, operands
from ggmlb.backends.ggml.repacked import GgmlRepackedBufferType
from ggmlb.core.enums import NO_OPS, PYTHON_OPS, DeviceType, Op
from ggmlb.core.errors import ArgumentError, BackendBroken, BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, BackendReg, Buffer, BufferType, Caps, Device
from ggmlb.interface.registry import host_device
from ggmlb.system.process import n_cpus

if TYPE_CHECKING:
    from ggmlb.backends.ggml.trust import Judge

_TYPES: Final = (DeviceType.CPU, DeviceType.GPU, DeviceType.IGPU, DeviceType.ACCEL, DeviceType.META)

TENSOR_ALIGNMENT: Final = 32
"""Alignment [bytes] of a caller's memory; ggml aborts the process otherwise."""

MOST_ANSWERS: Final = 4096
"""Entries in the cache of `declines`: the layers of a model have the same nodes."""


class GgmlDevice(Device):
    """A device of a ggml library.

    Its properties were read by the process that probed the library, which is loaded at the first use.

    Attributes:
        library: The library.
        index: Index of the device in the library.
        by_name_only: True for ggml's CPU, which is used only if the user names it.
    """

    def __init__(self, reg: BackendReg, library: GgmlLibrary, index: int, judge: Judge) -> None:
        self._reg = reg
        self.library = library
        self.index = index
        self._facts: dict[str, Any] = library.facts["devices"][index]
        self.by_name_only = self.is_cpu
        self._judge = judge
        self._answers: dict[tuple[object, ...], str | None] = {}
        self._wrapped: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
        self._dropped: deque[int] = deque()
        self.streams: weakref.WeakSet[GgmlBackend] = weakref.WeakSet()

    # -- facts ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Device name in ggml after the library's prefix, such as `ggml:CPU`, `ggml:Vulkan0`."""
        return self.library.prefix + str(self._facts["name"])

    @property
    def description(self) -> str:
        """Description of the device from ggml, and the library with its version."""
        return f"{self._facts['description']}, {self.library}"

    @property
    def type(self) -> DeviceType:
        """Device type in ggml; ACCEL for ggml's CPU, as it shares memory with ggmlb's CPU device."""
        kind = _TYPES[self._facts["type"]]
        return DeviceType.ACCEL if kind is DeviceType.CPU else kind

    @property
    def backend_name(self) -> str:
        """Name of ggml's backend that has the device, such as `CUDA`."""
        return str(self._facts["backend"])

    @property
    def is_cpu(self) -> bool:
        """Whether this is ggml's CPU, which computes in any host memory."""
        return bool(self._facts["is_host"])

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory as ggml reports it [bytes]."""
        if self.is_cpu:
            return host_device().memory
        if not self.library.is_loaded:
            free, total = self._facts["memory"]
            return free, total
        return abi.memory_of(self.library.load(), self.handle)

    @property
    def caps(self) -> Caps:
        """Capabilities from ggml; ggml's CPU is synchronous in ggmlb, and computes in host memory."""
        async_, host_buffer, from_host_ptr, events, mmap_support = self._facts["caps"]
        if self.is_cpu:
            return Caps(buffer_from_host_ptr=True, mmap_support=True)
        return Caps(async_, host_buffer, from_host_ptr, events, mmap_support)

    @property
    def device_id(self) -> str | None:
        """Device id from ggml, such as a PCI address; `None` if it has none."""
        ident = self._facts["id"]
        return None if ident is None else str(ident)

    @property
    def features(self) -> Sequence[tuple[str, str]]:
        """Build options of the device's backend, after its name: `("CPU_AVX2", "1")`."""
        return [(f"{self.backend_name}_{name}", value) for name, value in self._facts["features"]]

    @property
    def reg(self) -> BackendReg:
        """The registry entry `ggml`."""
        return self._reg

    # -- the library's side --------------------------------------------------------------------

    @cached_property
    def handle(self) -> int:
        """The `ggml_backend_dev_t`; loads the library."""
        c = self.library.load()
        handle: int = c["backend_dev_get"](self.index)
        name = c["backend_dev_name"](handle).decode(errors="replace")
        if name != self._facts["name"]:
            raise BackendBroken(
                f"{self.library}: device {self.index} is {name} now, and was {self._facts['name']} when "
                "probed; set environment variables before the first use of ggmlb"
            )
        return handle

    def proc(self, name: str, result: Any, *arguments: Any) -> Any:
        """Return a function by `ggml_backend_reg_get_proc_address`, or `None`."""
        c = self.library.load()
        reg = c["backend_dev_backend_reg"](self.handle)
        address = c["backend_reg_get_proc_address"](reg, name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    def place(self, tensor: Tensor) -> tuple[int, int]:
        """Return the `ggml_backend_buffer_t` and the address of an allocated tensor."""
        buffer = tensor.buffer
        assert buffer is not None
        if isinstance(buffer, GgmlBuffer):
            return buffer.handle, buffer.address + tensor.offset
        start: int = buffer.base.ctypes.data
        handle = self._wrapped.get(buffer)
        if handle is None:
            c, shift = self.library.load(), start % TENSOR_ALIGNMENT
            size = max(buffer.size, 1) + shift
            handle = c["backend_dev_buffer_from_host_ptr"](self.handle, start - shift, size, size)
            self._wrapped[buffer] = handle
            weakref.finalize(buffer, c["backend_buffer_free"], handle).atexit = False
        return handle, start + tensor.offset

    def drop(self, handle: int) -> None:
        """Queue a ggml buffer for `free_dropped`; safe in any thread, as the garbage collector calls it."""
        self._dropped.append(handle)

    def free_dropped(self) -> None:
        """Wait for all streams, then free the ggml buffers queued by `drop`."""
        if self._dropped:
            handles = [self._dropped.popleft() for _ in range(len(self._dropped))]
            for stream in self.streams:
                stream.wait()
            for handle in handles:
                self.library.load()["backend_buffer_free"](handle)

    # -- memory --------------------------------------------------------------------------------

    @cached_property
    def _own_buffer_type(self) -> BufferType:
        if self.is_cpu:
            return host_device().buffer_type
        return GgmlBufferType(self, self.library.load()["backend_dev_buffer_type"](self.handle))

    @property
    def buffer_type(self) -> BufferType:
        """The default buffer type; ggmlb's host memory for ggml's CPU, which avoids copies."""
        return self._own_buffer_type

    @cached_property
    def _pinned_buffer_type(self) -> GgmlBufferType | None:
        handle = self.library.load()["backend_dev_host_buffer_type"](self.handle)
        return GgmlBufferType(self, handle) if handle else None

    @property
    def host_buffer_type(self) -> BufferType | None:
        """Pinned host memory; `None` if the device has none."""
        return self._pinned_buffer_type if self.caps.host_buffer else None

    @property
    def extra_bufts(self) -> tuple[BufferType, ...]:
        """Extra buffer types of ggml's CPU, which repack weights (`CPU_REPACK`, `AMX`)."""
        return self._repacked

    @cached_property
    def _repacked(self) -> tuple[GgmlRepackedBufferType, ...]:
        if not self.is_cpu:
            return ()
        bufts = self.proc("ggml_backend_dev_get_extra_bufts", c_void_p, c_void_p)
        if bufts is None:
            return ()
        table = ctypes.cast(bufts(self.handle), ctypes.POINTER(c_void_p))
        handles = itertools.takewhile(bool, (table[i] for i in itertools.count()))
        return tuple(GgmlRepackedBufferType(self, handle) for handle in handles if handle)

    def buffer_from_host_ptr(self, array: npt.NDArray[Any], max_tensor_size: int = 0) -> Buffer:
        """Return a buffer in the memory of an array; see `Device.buffer_from_host_ptr`.

        Raises:
            ArgumentError: The array is not contiguous.
            BackendError: The device cannot use host memory.
        """
        if self.is_cpu:
            return host_device().buffer_from_host_ptr(array, max_tensor_size)
        return super().buffer_from_host_ptr(array, max_tensor_size)

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether ggml accepts a buffer type of its library; ggml's CPU can also use any host memory."""
        if isinstance(buft, GgmlBufferType) and buft.device.library is self.library:
            return bool(self.library.load()["backend_dev_supports_buft"](self.handle, buft.handle))
        return self.is_cpu and buft.is_host

    # -- ops -----------------------------------------------------------------------------------

    def declines(self, op: Tensor) -> str | None:
        """Return why the node cannot be computed, or `None`: ggml's `supports_op`, then a test run.

        `supports_op` alone accepts some nodes that abort the process. A kind of node is accepted once a child
        process has computed one correctly (`trust`).
        """
        if op.op in NO_OPS:
            return None
        if op.op in PYTHON_OPS:
            return "a Python function; ggml's devices compute ggml's ops"
        if op.op in (Op.ACC, Op.SET) and (why := in_window(op)):
            return why
        for memory in self._repacked:
            if (why := memory.declines(op)) is not None:
                return why
        asked = _question(op)
        if asked not in self._answers:
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            self._answers[asked] = self._why_not(op)
        return self._answers[asked]

    def _why_not(self, op: Tensor) -> str | None:
        if op.op not in self.library.ops:
            return f"{self.library} has no {op.op}"
        for t in (op, *op.src):
            if t is not None and t.dtype not in self.library.types:
                return f"{self.library} has no type {t.dtype.name.lower()}"
        try:
            says_yes = self.ask("backend_dev_supports_op", op)
        except LookupError:
            return f"{self.library} has no {op.op_desc()}"
        except ArgumentError as error:
            return str(error)
        if not says_yes:
            return f"{self.library} says that {self._facts['name']} does not support it"
        return self._judge.verdict(self, op)

    def offload_op(self, op: Tensor) -> bool:
        """Whether ggml would offload the node to this device."""
        try:
            return op.op in self.library.ops and self.ask("backend_dev_offload_op", op)
        except (LookupError, ArgumentError):
            return False

    def ask(self, question: str, op: Tensor) -> bool:
        """Call ggml's `supports_op` or `offload_op` (`question`) for a node; buffers not ggml's become null.

        Raises:
            LookupError: The library lacks a type, the op or one of its functions.
            ArgumentError: A parameter of the node does not fit into ggml's 32 bits.
        """
        library = self.library
        tensors = [t for t in op.src if t is not None]
        memory = library.room(1 + len(tensors))
        base = ctypes.addressof(memory)
        where: dict[Tensor | None, int] = {None: 0, op: base}
        for i, t in enumerate(tensors, 1):
            buffer = t.buffer.handle if isinstance(t.buffer, GgmlBuffer) else 0
            library.pack(memory, i, t, (buffer, 0, 0), flags=t.flags)
            where[t] = base + i * library.tensor_size
        library.pack(
            memory, 0, op, (0, 0, 0), (where.get(op.view_src, 0), op.view_offs, operands(op, where)), op.flags
        )
        return bool(library.load()[question](self.handle, base))

    # -- streams -------------------------------------------------------------------------------

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream.

        Args:
            params: `n_threads`, for ggml's CPU; by default the CPUs that the process may use.

        Raises:
            ArgumentError: An unknown parameter, or less than one thread.
            BackendError: ggml does not open the device, or the process was forked after ggml was loaded.
        """
        known = ("n_threads",) if self.is_cpu else ()
        n_threads = self.check_params(params, *known).get("n_threads")
        guard.check(f"open {self.name}")
        handle = self.library.load()["backend_dev_init"](self.handle, None)
        if not handle:
            raise BackendError(f"{self.name} cannot be opened; see Python's logger 'ggmlb.ggml'")
        stream = GgmlBackend(self, handle)
        self.streams.add(stream)
        if self.is_cpu:
            stream.set_n_threads(n_cpus() if n_threads is None else n_threads)
        return stream

    def event_new(self) -> GgmlEvent:
        """Return an event to record on the device's streams.

        Raises:
            BackendError: The device has no events.
        """
        return GgmlEvent(self) if self.caps.events else super().event_new()  # type: ignore[return-value]


def _question(op: Tensor) -> tuple[object, ...]:
    """Return the cache key of a node: op, parameters, types, shapes, strides and buffer types."""
    facts: list[object] = [op.op, *op.params.values(), op.view_offs if op.view_src is not None else -1]
    for t in (op, *op.src):
        if t is None:
            facts.append(None)
        else:
            kind = t.buffer.buft if isinstance(t.buffer, GgmlBuffer) else None
            facts += (t.dtype, t.ne, t.nb, kind, t.view_src is not None and t.view_src is op.view_src)
    return tuple(facts)
