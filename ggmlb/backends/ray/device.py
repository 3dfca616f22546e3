"""RayDevice: a device of another machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggmlb.backends.ray.backend import RayBackend, RayEvent
from ggmlb.backends.ray.buffer import RayBuffer, RayBufferType
from ggmlb.backends.ray.link import Link
from ggmlb.backends.ray.wire import NONE, Records, node_record, unsendable
from ggmlb.core.enums import DeviceType
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, BackendReg, Buffer, BufferType, Caps, Device


class RayDevice(Device):
    """A device of another machine, reached by Ray.

    Attributes:
        link: The connection to its machine.
        remote_name: Its name on that machine.
    """

    caps = Caps(async_=True, events=True)

    def __init__(self, reg: BackendReg, link: Link, node: str, facts: Mapping[str, Any]) -> None:
        self._reg = reg
        self.link = link
        self.remote_name: str = facts["name"]
        self._name = f"{node}/{self.remote_name}"
        link.devices += (self._name,)
        self._description = f"{facts['description']}, on {facts['host']}"
        kind = DeviceType(facts["type"])
        self.by_name_only = facts["by_name_only"]
        self._type = DeviceType.ACCEL if kind is DeviceType.CPU else kind
        self._memories = tuple(RayBufferType(self, i, of) for i, of in enumerate(facts["memories"]))
        self._declined: dict[Records, str | None] = {}

    @property
    def name(self) -> str:
        """Names of the node and of its device, such as `node0/CPU`."""
        return self._name

    @property
    def description(self) -> str:
        """The remote device's description, and its machine."""
        return self._description

    @property
    def type(self) -> DeviceType:
        """The remote device's type; ACCEL for a remote CPU, as CPU means the local one."""
        return self._type

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory of the remote device, queried at each access [bytes]."""
        free, total = self.link.ask("memory", self.remote_name)
        return free, total

    @property
    def reg(self) -> BackendReg:
        """The registry entry `Ray`."""
        return self._reg

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a remote stream; parameters are the remote device's.

        Raises:
            ArgumentError: The remote device does not have a parameter.
            DeviceLostError: The machine is lost.
        """
        return RayBackend(self, self.link.ask("open", self.remote_name, dict(params or {})))

    @property
    def buffer_type(self) -> BufferType:
        """The remote device's default buffer type."""
        return self._memories[0]

    @property
    def extra_bufts(self) -> tuple[BufferType, ...]:
        """The remote device's extra buffer types, which repack weights."""
        return self._memories[1:]

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether the buffer type belongs to this device."""
        return buft in self._memories

    def declines(self, op: Tensor) -> str | None:
        """Return why the remote device cannot compute the node, or `None`; cached per kind of node."""
        if (why := unsendable(op)) is not None:
            return why
        record = node_record(op, self._handle)
        if record not in self._declined:
            self._declined[record] = self.link.ask("declines", self.remote_name, record) or None
        return self._declined[record]

    def _handle(self, buffer: Buffer) -> int:
        """Return the handle of a buffer that repacks, on which `declines` depends; else `NONE`."""
        if isinstance(buffer, RayBuffer) and buffer.link is self.link and not buffer.buft.is_plain:
            return buffer.handle
        return NONE

    def event_new(self) -> RayEvent:
        """Return an event to record on the device's streams."""
        return RayEvent(self)
