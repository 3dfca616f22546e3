"""Catalogue: the loaded, pending and unavailable backends of a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import BackendBroken, BackendError, BackendUnavailable, RegistryError
from ggmlb.interface import BackendReg, Device
from ggmlb.interface.registry.candidate import whole_imports
from ggmlb.system import log

if TYPE_CHECKING:
    from ggmlb.interface.registry.candidate import Candidate, Variant

_TYPE_ORDER = (DeviceType.GPU, DeviceType.IGPU, DeviceType.ACCEL, DeviceType.CPU, DeviceType.META)


class Unavailable(NamedTuple):
    """A backend that was discovered but cannot be used.

    Attributes:
        name: Its expected name.
        reason: Why, and what to do.
        kind: `"absent"`: a library, driver or device is missing. `"broken"`: it is there, but fails.
    """

    name: str
    reason: str
    kind: Literal["absent", "broken"]

    def error(self) -> BackendError:
        """The error to raise if this backend is requested."""
        kind = BackendUnavailable if self.kind == "absent" else BackendBroken
        return kind(f"the {self.name} backend cannot be used: {self.reason}")


class Loaded(NamedTuple):
    """A backend in use; `target` is its candidate's, empty if it was registered as an object."""

    reg: BackendReg
    devices: tuple[Device, ...]
    target: str


class Catalogue:
    """The state of a registry; opens candidates and adds their backends. Not locked.

    Failures are kept as text: the traceback of an exception would keep the backend's memory alive.

    Args:
        discover: Returns the candidates; called when they are first needed.

    Attributes:
        loaded: Backends in use, in the order in which they were added.
        single: Devices that were registered individually.
        failed: Backends that cannot be used.
        unloaded: Devices of backends that were removed, by name in lower case.
    """

    def __init__(self, discover: Callable[[], Iterable[Candidate]]) -> None:
        self._discover = discover
        self._pending: list[Candidate] | None = None
        self.loaded: list[Loaded] = []
        self.single: list[Device] = []
        self.failed: list[Unavailable] = []
        self.unloaded: dict[str, Device] = {}

    # -- candidates ----------------------------------------------------------------------------

    def pending(self) -> list[Candidate]:
        """The candidates that are not opened yet."""
        if self._pending is None:
            try:
                self._pending = self.fresh(self._discover())
            except OSError as error:  # as where no file can be opened any more
                raise BackendError(f"backends cannot be discovered: {error}; try again later") from error
        return self._pending

    def fresh(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates that are not in use."""
        targets = {loaded.target for loaded in self.loaded}
        return [candidate for candidate in candidates if candidate.target not in targets]

    def forget(self) -> None:
        """Discard the candidates and failures, to discover them again when needed."""
        self._pending = None
        self.failed.clear()

    def settle(self, target: str, key: str) -> None:
        """Mark a candidate as in use: neither pending nor failed."""
        self._pending = [c for c in self.pending() if c.target != target]
        self.failed = [f for f in self.failed if f.name.casefold() != key]

    # -- opening -------------------------------------------------------------------------------

    def open_all(self) -> None:
        """Open every candidate."""
        while pending := self.pending():
            self._open_group(pending[0].group)

    def open_named(self, key: str) -> None:
        """Open the candidates with the expected name."""
        for group in {c.group for c in self.pending() if c.key == key}:
            self._open_group(group)

    def open_these(self, candidates: Iterable[Candidate]) -> list[BackendReg]:
        """Open all pending candidates, then these; return the backends of these."""
        self.open_all()
        before = len(self.loaded)
        self._pending = self.fresh(candidates)
        self.open_all()
        return [loaded.reg for loaded in self.loaded[before:]]

    def _open_group(self, group: str) -> None:
        """Open the pending candidates of a group, and add the best variant of each name.

        If Ctrl-C interrupts it, those not yet in use become pending again.
        """
        pending, failed = self.pending(), list(self.failed)
        self._pending = [c for c in pending if c.group != group]
        try:
            with whole_imports():
                self._open_members([c for c in pending if c.group == group])
        except BaseException:
            self._pending, self.failed = self.fresh(pending), failed
            raise

    def _open_members(self, members: list[Candidate]) -> None:
        variants: dict[str, list[Variant]] = {}
        for candidate in members:
            try:
                with log.timed("devices", log.DEBUG, "backend %s loaded", candidate.name):
                    variant = candidate.open()
            except BackendError as why:
                self._fail(candidate.name, why)
            else:
                variants.setdefault(variant.reg.name.casefold(), []).append(variant)
        for same in variants.values():
            try:
                best = _best(same)
                self.add(best.reg, best.candidate.target)
            except (BackendError, RegistryError) as why:
                self._fail(same[0].reg.name, why)

    def _fail(self, name: str, why: Exception) -> None:
        kind: Literal["absent", "broken"] = "absent" if isinstance(why, BackendUnavailable) else "broken"
        self.failed.append(Unavailable(name, str(why), kind))

    # -- backends in use -----------------------------------------------------------------------

    def add(self, reg: BackendReg, target: str) -> None:
        """Add a backend with its devices.

        Raises:
            BackendBroken: Listing its devices fails.
            BackendUnavailable: It has no device.
            RegistryError: Its name, or a device's, is taken.
        """
        for loaded in self.loaded:
            if loaded.reg.name.casefold() == reg.name.casefold():
                raise RegistryError(f"a backend named {loaded.reg.name!r} is registered; unload it first")
        devices = _devices_of(reg)
        self.check_names(devices)
        self._drop_single(reg)  # a device that was registered alone now comes with its backend
        self.loaded.append(Loaded(reg, devices, target))

    def check_names(self, devices: Iterable[Device]) -> None:
        """Raise RegistryError if a device's name is taken by another device."""
        taken = {device.name.casefold(): device for device in self.devices()}
        for device in devices:
            other = taken.setdefault(device.name.casefold(), device)
            if other is not device:
                raise RegistryError(
                    f"the device name {device.name!r} of the {device.reg.name} backend is taken by a device "
                    f"of the {other.reg.name} backend; names must be unique"
                )

    def remove(self, reg: BackendReg) -> bool:
        """Remove a backend and its devices; return whether it was in use."""
        removed = [loaded for loaded in self.loaded if loaded.reg is reg]
        if not removed:
            return False
        self.unloaded.update((d.name.casefold(), d) for loaded in removed for d in loaded.devices)
        self.loaded = [loaded for loaded in self.loaded if loaded.reg is not reg]
        self._drop_single(reg)
        return True

    def _drop_single(self, reg: BackendReg) -> None:
        self.single = [device for device in self.single if device.reg is not reg]

    def regs(self) -> list[BackendReg]:
        """The backends in use, the highest priority first."""
        found = (loaded.reg for loaded in self.loaded)
        return sorted(found, key=lambda reg: (-reg.priority, reg.name.casefold()))

    def devices(self) -> list[Device]:
        """The devices in use: by type, proven ones first, then by priority and name of the backend."""
        found = [device for loaded in self.loaded for device in loaded.devices]
        return sorted([*found, *self.single], key=_device_order)


def _best(variants: list[Variant]) -> Variant:
    """The variant with the highest score.

    Raises:
        RegistryError: Two variants have it.
    """
    high = max(variant.score for variant in variants)
    top = [variant for variant in variants if variant.score == high]
    if len(top) > 1:
        where = " and ".join(f"{v.candidate.target} ({v.candidate.origin})" for v in top)
        raise RegistryError(f"{len(top)} backends are named {top[0].reg.name!r}: {where}; remove one")
    return top[0]


def _devices_of(reg: BackendReg) -> tuple[Device, ...]:
    try:
        devices = tuple(reg.devices)
        for device in devices:
            if not (isinstance(device, Device) and isinstance(device.name, str)):
                raise BackendBroken(
                    f"it lists {device!r} as a device; each must be a ggmlb.Device with a name"
                )
            check_type(device)
            _device_order(device)  # which reads what the list is sorted by
    except (BackendUnavailable, BackendBroken):
        raise
    except Exception as error:
        raise BackendBroken(f"listing its devices failed: {type(error).__name__}: {error}") from error
    if not devices:
        raise BackendUnavailable("it found no device on this machine")
    return devices


def check_type(device: Device) -> None:
    """Raise BackendBroken if a device's type is not a `DeviceType` (for example, only its name)."""
    if not isinstance(device.type, DeviceType):
        raise BackendBroken(
            f"the type of its device {device.name} is {device.type!r}; it must be a member of "
            "ggmlb.DeviceType"
        )


def _device_order(device: Device) -> tuple[int, bool, int, str]:
    reg = device.reg
    is_last = not device.is_automatic or bool(reg.unproven)
    return _TYPE_ORDER.index(device.type), is_last, -reg.priority, reg.name.casefold()


class DeviceList(list[Device]):
    """List of devices, best first; notebooks show a table of them and of the unavailable backends.

    Attributes:
        unavailable: Backends that cannot be used, with reasons.
    """

    def __init__(self, devices: Iterable[Device], unavailable: Iterable[Unavailable] = ()) -> None:
        super().__init__(devices)
        self.unavailable = tuple(unavailable)
