"""Device and BackendReg: devices, their capabilities, and which ops they support."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.core.arguments import named
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError, BackendBroken, BackendError, Error, one_line
from ggmlb.core.lifetime import Unique
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.interface.backend import Backend
    from ggmlb.interface.buffer import Buffer
    from ggmlb.interface.buffer_type import BufferType
    from ggmlb.interface.event import Event

API_VERSION = 1
"""Version of these interfaces; a registration states the version it was written for."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Optional capabilities of a device (ggml_backend_dev_caps).

    Attributes:
        async_: Transfers and computations are asynchronous.
        host_buffer: It has a host buffer type (pinned or mapped memory).
        buffer_from_host_ptr: It can use memory allocated by the caller.
        events: It has events.
        mmap_support: It can use memory-mapped files without a copy.
    """

    async_: bool = False
    host_buffer: bool = False
    buffer_from_host_ptr: bool = False
    events: bool = False
    mmap_support: bool = False

    def as_dict(self) -> dict[str, bool]:
        """The flags by name, `async_` as `async`."""
        return {name.rstrip("_"): value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class DeviceProps:
    """Properties of a device (ggml_backend_dev_props).

    Attributes:
        name: Unique name, as `CUDA0`.
        description: Human-readable name.
        memory_free: Free memory [bytes]; 0 if unknown.
        memory_total: Total memory [bytes]; 0 if unknown.
        type: Its kind.
        device_id: PCI bus id as `0000:01:00.0`, or `None`.
        caps: Optional capabilities.
    """

    name: str
    description: str
    memory_free: int
    memory_total: int
    type: DeviceType
    device_id: str | None
    caps: Caps


def _opening(init_backend: Callable[..., Backend]) -> Callable[..., Backend]:
    """Return an `init_backend` whose errors name the device, and that returns a stream."""

    @wraps(init_backend)
    def opened(device: Device, *args: Any, **options: Any) -> Backend:
        try:
            stream: Backend | None = init_backend(device, *args, **options)
        except Error:
            raise
        except Exception as error:
            last = extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}, in {last.name}"
            raise BackendBroken(f"{device.name} opens no stream: {one_line(error)} ({where})") from error
        if stream is None:
            raise BackendBroken(
                f"{device.name} opens no stream: init_backend returned None; it must return a ggmlb.Backend"
            )
        return stream

    return opened


@named("a device, as device_by_name(name) finds one")
class Device(Unique, ABC):
    """A processor with memory (ggml_backend_device).

    Attributes:
        by_name_only: Whether it is used only if named, though it is part of ggmlb.
    """

    by_name_only = False

    def __init_subclass__(cls) -> None:
        """Check what `init_backend` of other packages does: its errors and its result."""
        super().__init_subclass__()
        if "init_backend" in vars(cls) and not cls.__module__.startswith("ggmlb."):
            setattr(cls, "init_backend", _opening(cls.init_backend))  # noqa: B010 - not the inherited one

    @property
    def is_automatic(self) -> bool:
        """Whether automatic choice may take the device: not if it is from outside ggmlb or `by_name_only`."""
        return type(self.reg).__module__.startswith("ggmlb.") and not self.by_name_only

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique name, such as `CPU`, `CUDA0`, `OpenCL1` (ggml_backend_dev_name)."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Human-readable name (ggml_backend_dev_description)."""

    @property
    @abstractmethod
    def type(self) -> DeviceType:
        """Kind of the device, such as CPU or GPU (ggml_backend_dev_type)."""

    @property
    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Free and total memory [bytes]; zeros if unknown (ggml_backend_dev_memory)."""

    @property
    def caps(self) -> Caps:
        """Optional capabilities of the device, such as events; none by default."""
        return Caps()

    @property
    def device_id(self) -> str | None:
        """PCI bus id, equal for one card in several backends; `None` if it has none."""
        return None

    @property
    def props(self) -> DeviceProps:
        """All properties in one record (ggml_backend_dev_get_props)."""
        free, total = self.memory
        return DeviceProps(self.name, self.description, free, total, self.type, self.device_id, self.caps)

    @property
    @abstractmethod
    def reg(self) -> BackendReg:
        """The registration that it belongs to (ggml_backend_dev_backend_reg)."""

    @abstractmethod
    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Return a new stream on the device (ggml_backend_dev_init).

        Args:
            params: Settings that the backend defines, by name.

        Raises:
            ArgumentError: The backend does not know a parameter.
            BackendError: The device cannot be opened.
        """

    def check_params(self, params: Mapping[str, Any] | None, *known: str) -> dict[str, Any]:
        """Return the settings `params` of `init_backend`, after checking that their names are in `known`.

        Raises:
            ArgumentError: A name is unknown.
        """
        given = dict(params or {})
        unknown = sorted(given.keys() - set(known))
        if unknown:
            takes = f"known: {', '.join(known)}" if known else "it takes none"
            raise ArgumentError(f"{self.name}: unknown parameters {unknown}; {takes}")
        return given

    @property
    @abstractmethod
    def buffer_type(self) -> BufferType:
        """Buffer type of the device's memory (ggml_backend_dev_buffer_type)."""

    @property
    def host_buffer_type(self) -> BufferType | None:
        """Pinned or mapped host memory, for fast transfers; `None` if there is none.

        Source: ggml_backend_dev_host_buffer_type.
        """
        return None

    @property
    def extra_bufts(self) -> tuple[BufferType, ...]:
        """Buffer types that repack weights for faster products; the best first."""
        return ()

    def buffer_from_host_ptr(self, array: npt.NDArray[Any], max_tensor_size: int = 0) -> Buffer:
        """Use the memory of a contiguous NumPy array as a buffer, without a copy.

        Args:
            array: Kept alive by the buffer; read-only arrays (memory maps) give read-only tensors.
            max_tensor_size: Largest tensor that it will hold [bytes]; 0 if not known.

        Raises:
            ArgumentError: The array is not contiguous.
            BackendError: The device cannot use host memory.

        Source: ggml_backend_dev_buffer_from_host_ptr.
        """
        raise BackendError(
            f"{self.name} cannot use host memory as a buffer; allocate a buffer and copy into it"
        )

    def adopt(self, array: Any) -> tuple[Buffer, int] | None:
        """Return a buffer over the memory of an array of the device's library, and the array's offset in it.

        Args:
            array: Of any library; kept alive by the buffer.

        Returns:
            A buffer, and the byte offset of the array's first element in it; `None` if the array is of
            another library or the device cannot access it.
        """
        return None

    @abstractmethod
    def declines(self, op: Tensor) -> str | None:
        """Return why the device cannot compute the node, or `None` if it can.

        It depends on the node's op, params, flags, types, shapes and strides, and on the buffer types of
        placed sources that store another layout (`BufferType.stored_layout`, `BufferType.packing`), and on
        nothing else: a scheduler asks once for nodes that have these in common. Whether the device can
        access a buffer is the question of `supports_buft`.
        """

    def supports_op(self, op: Tensor) -> bool:
        """Whether the device computes the node (ggml_backend_dev_supports_op)."""
        return self.declines(op) is None

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether its ops can read and write memory of that type (ggml_backend_dev_supports_buft)."""
        return buft is self.buffer_type

    def offload_op(self, op: Tensor) -> bool:
        """Whether the node is worth copying its weights from host memory (ggml_backend_dev_offload_op)."""
        return False

    def event_new(self) -> Event:
        """Return an event to record on the device's streams (ggml_backend_event_new).

        Raises:
            BackendError: The device has no events.
        """
        raise BackendError(f"{self.name} has no events; synchronize its backend instead")

    def __repr__(self) -> str:
        return f"<Device {self.name} {self.type.value}: {self.description}>"


@named("a BackendReg, as reg_by_name(name) finds one")
class BackendReg(Unique, ABC):
    """The registration of a backend: its name and its devices (ggml_backend_reg).

    Attributes:
        api_version: The `API_VERSION` it was written for.
        priority: Order in the registry; higher comes first.
        unproven: Why its devices come after others of their type, whatever its priority; empty if proven.
    """

    api_version: int = API_VERSION
    priority: int = 0
    unproven: str = ""

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique name, such as `CPU`, `CUDA`, `OpenCL` (ggml_backend_reg_name)."""

    @property
    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Its devices (ggml_backend_reg_dev_count, ggml_backend_reg_dev_get).

        Raises:
            BackendUnavailable: The library, driver or card is missing.
        """

    @property
    def unusable(self) -> Sequence[tuple[str, str]]:
        """Cards and libraries that it found but cannot use: pairs of name and reason."""
        return ()

    def get_proc_address(self, name: str) -> Any | None:
        """Return an optional function by its name, or `None` (ggml_backend_reg_get_proc_address).

        Names: `split_buffer_type`, `set_n_threads`, `dev_get_extra_bufts`, `set_abort_callback`,
        `get_features`, `comm_init`, `comm_free`, `comm_allreduce_tensor`; `driver_version`, a device's driver
        as text; and `conformance_xfails`, known failures for the conformance kit. The prefix
        `ggml_backend_` is allowed.
        """
        return self._procs().get(name.removeprefix("ggml_backend_"))

    def _procs(self) -> Mapping[str, Any]:
        return {}

    def __repr__(self) -> str:
        return f"<BackendReg {self.name}>"
