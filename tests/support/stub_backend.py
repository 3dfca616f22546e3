"""A registration with devices that can be listed and chosen but do not compute, to test the registry with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ggmlb.core.enums import DeviceType
from ggmlb.core.tensor import Tensor
from ggmlb.interface import API_VERSION, Backend, BackendReg, BufferType, Device


class StubDevice(Device):
    name = ""
    description = "a stub"
    type = DeviceType.ACCEL
    memory = (0, 0)

    def __init__(self, reg: StubReg, name: str, type: DeviceType) -> None:
        self.name = name
        self.type = type
        self._reg = reg

    @property
    def reg(self) -> StubReg:
        return self._reg

    @property
    def buffer_type(self) -> BufferType:
        raise NotImplementedError

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        if self.name in self._reg.failing:
            raise self._reg.failing[self.name]
        return ("stream on", self.name, params)  # type: ignore[return-value]

    def declines(self, op: Tensor) -> str | None:
        return "a stub computes nothing"


class StubReg(BackendReg):
    """A registration named `name`, with devices given as `{name: type}`.

    Args:
        name: Its name.
        devices: Device names and types; `<name>0` of type ACCEL by default.
        priority: Its rank.
        api_version: What it claims to be written for.
        failing: Errors that opening a device raises, by the device's name.
        error: What listing the devices raises.
    """

    name = ""

    def __init__(
        self,
        name: str,
        devices: Mapping[str, DeviceType] | None = None,
        *,
        priority: int = 0,
        api_version: int = API_VERSION,
        failing: Mapping[str, Exception] | None = None,
        error: Exception | None = None,
    ) -> None:
        self.name = name
        self.priority = priority
        self.api_version = api_version
        self.failing = dict(failing or {})
        self._error = error
        wanted = {f"{name}0": DeviceType.ACCEL} if devices is None else devices
        self._devices = [StubDevice(self, device, type) for device, type in wanted.items()]

    @property
    def devices(self) -> Sequence[Device]:
        if self._error is not None:
            raise self._error
        return self._devices


StubReg.__module__ = "ggmlb.stub"  # as if it came with ggmlb: automatic choices pass over others
