"""Registry: registers, loads and looks up backends and devices, and opens streams on them."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from ggmlb.core import arguments
from ggmlb.core.enums import DeviceType, as_enum
from ggmlb.core.errors import (
    BackendBroken,
    BackendError,
    BackendUnavailable,
    Error,
    RegistryError,
    did_you_mean,
    one_line,
)
from ggmlb.interface import Backend, BackendReg, Device
from ggmlb.interface.registry import discovery
from ggmlb.interface.registry.discovery import Candidate, checked_reg, failing_as_broken, whole_imports
from ggmlb.system import env, log

_Named = TypeVar("_Named", "BackendReg", "Device")

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")

_TYPE_ORDER = (DeviceType.GPU, DeviceType.IGPU, DeviceType.ACCEL, DeviceType.CPU, DeviceType.META)
_BEST_ORDER = (DeviceType.GPU, DeviceType.IGPU, DeviceType.CPU)


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
    """A backend in use; `target` is its module or path, empty if it was passed to `register`."""

    reg: BackendReg
    devices: tuple[Device, ...]
    target: str


class DeviceList(list[Device]):
    """List of devices, best first; notebooks show a table of them and of the unavailable backends.

    Attributes:
        unavailable: Backends that cannot be used, with reasons.
    """

    def __init__(self, devices: Iterable[Device], unavailable: Iterable[Unavailable] = ()) -> None:
        super().__init__(devices)
        self.unavailable = tuple(unavailable)


@arguments.checked_methods
class Registry:
    """All backends and devices of a process (source: ggml-backend-reg.cpp).

    Candidates are discovered as text at the first look-up. One is imported when requested by name, all when
    devices are listed or chosen. Failures stay in `unavailable()` until the next `load_all`, as text, because
    the traceback of an exception would keep the backend's memory alive.

    A request by name raises the backend's error. An automatic choice (`init_best`, `init_by_type`,
    `device_by_type`) skips absent backends silently, and warns once (RuntimeWarning) of a broken one, whose
    device might have been faster.

    Safe to use from several threads. A backend must not use the registry while it is being imported.

    Args:
        discover: Returns the candidates.
    """

    def __init__(self, discover: Callable[[], Iterable[Candidate]] = discovery.discover) -> None:
        self._lock = threading.RLock()
        self._discover = discover
        self._found: list[Candidate] | None = None  # not opened yet; None: not discovered yet
        self._loaded: list[Loaded] = []  # in the order in which they were added
        self._single: list[Device] = []  # registered without their backend
        self._failed: list[Unavailable] = []
        self._unloaded: dict[str, Device] = {}  # devices of removed backends, by name in lower case
        self._warned: set[str] = set()
        self._defaults: tuple[str, ...] = ()

    # -- registering ---------------------------------------------------------------------------

    def register(self, reg: BackendReg) -> None:
        """Add a backend with all its devices; without effect if already registered.

        Raises:
            BackendBroken: It was written for another API version.
            BackendUnavailable: It has no device.
            RegistryError: Its name, or that of a device, is taken.

        Source: ggml_backend_register.
        """
        with self._lock:
            if all(loaded.reg is not reg for loaded in self._loaded):
                self._check_not_pending(checked_reg(reg, "register"), "")
                self._add(reg, "")

    def register_device(self, device: Device) -> None:
        """Add one device; without effect if already registered.

        Raises:
            BackendBroken: Its type is not a `DeviceType`.
            RegistryError: Its name is taken.

        Source: ggml_backend_device_register.
        """
        with self._lock:
            if all(known is not device for known in self.devices()):
                _check_type(device)
                self._check_names([device])
                self._single.append(device)

    def unload(self, reg: BackendReg) -> None:
        """Remove a backend and its devices; open streams and buffers stay usable.

        A discovered backend is not found again before `load_all`.

        Raises:
            RegistryError: It is not registered.

        Source: ggml_backend_unload.
        """
        with self._lock:
            removed = [loaded for loaded in self._loaded if loaded.reg is reg]
            if not removed:
                raise RegistryError(f"unload: the backend {reg.name!r} is not registered")
            self._unloaded |= {d.name.casefold(): d for loaded in removed for d in loaded.devices}
            self._loaded = [loaded for loaded in self._loaded if loaded.reg is not reg]
            self._single = [device for device in self._single if device.reg is not reg]

    # -- loading -------------------------------------------------------------------------------

    def load(self, where: str | os.PathLike[str]) -> BackendReg:
        """Load the backend at `where` (a module, file or folder), or return it if already loaded.

        Args:
            where: A module's name (`"pkg.mod"` or `"pkg.mod:factory"`), a `.py` file, or the folder of
                a package; `ggmlb.interface.registry.discovery` says what it must export.

        Raises:
            BackendUnavailable: It reports a missing library, driver or device, or scores 0.
            BackendBroken: It fails, lacks `backend_reg()`, or was written for another API version.
            RegistryError: There is nothing at `where`, or a name is taken.

        Source: ggml_backend_load.
        """
        with self._lock:
            candidate = discovery.at(where)
            for loaded in self._loaded:
                if loaded.target == candidate.target:
                    return loaded.reg
            with whole_imports():
                _, reg = candidate.open()
                self._check_not_pending(reg, candidate.target)
                self._add(reg, candidate.target)
            self._found = [c for c in self._pending() if c.target != candidate.target]
            self._failed = [f for f in self._failed if f.name.casefold() != candidate.key]
            return reg

    def load_all(self) -> list[BackendReg]:
        """Discover backends again, import all, and return the usable ones (ggml_backend_load_all)."""
        with self._lock:
            self._found = None
            self._failed.clear()
            return self.regs()

    def load_all_from_path(self, folder: str | os.PathLike[str]) -> list[BackendReg]:
        """Load a folder's backends; of each name the variant of highest `score()` (fitness for this machine).

        Returns:
            The loaded backends; the others are in `unavailable()`.

        Raises:
            RegistryError: There is no such folder, or it holds only ggml's C libraries.

        Source: ggml_backend_load_all_from_path.
        """
        with self._lock:
            found = discovery.in_folder(folder)
            self._open_all()
            before = len(self._loaded)
            self._found = self._not_in_use(found)
            self._open_all()
            return [loaded.reg for loaded in self._loaded[before:]]

    # -- looking up ----------------------------------------------------------------------------

    def regs(self) -> list[BackendReg]:
        """Return all usable backends, highest `BackendReg.priority` first (ggml_backend_reg_count, _get)."""
        with self._lock:
            self._open_all()
            return self._usable_regs()

    def reg_by_name(self, name: str) -> BackendReg:
        """Return the backend of that name, in any case, importing only that one.

        Raises:
            BackendError: It cannot be used; the message says why.
            RegistryError: There is none.

        Source: ggml_backend_reg_by_name.
        """
        with self._lock:
            found = self._look_up(name, self._usable_regs, name.casefold().__eq__)
            return found or self._no_such("backend", name, [reg.name for reg in self.regs()])

    def devices(self) -> DeviceList:
        """Return all devices: first GPUs, then accelerators, then CPUs; within a type by backends' priority.

        Devices of other packages, and of backends marked `unproven`, come last within a type.

        Source: ggml_backend_dev_count, ggml_backend_dev_get.
        """
        with self._lock:
            self._open_all()
            return DeviceList(self._usable_devices(), self.unavailable())

    def device_by_name(self, name: str) -> Device:
        """Return the device of that name, in any case, importing only its backend if the name contains it.

        Raises:
            ArgumentError: The name is not a str.
            BackendError: Its backend cannot be used; the message says why.
            RegistryError: There is none.

        Source: ggml_backend_dev_by_name.
        """
        key = name.casefold().partition(":")[0]

        def may_be_of(backend: str) -> bool:  # OpenCL1 is a device of OpenCL
            return key.startswith(backend) and not key[len(backend) :].strip("0123456789")

        with self._lock:
            found = self._look_up(name, self._usable_devices, may_be_of)
            return found or self._no_such("device", name, [d.name for d in self._usable_devices()])

    def device_by_type(self, type: DeviceType | str) -> Device:
        """Return the first device of a type, in the order of `devices`.

        Raises:
            ArgumentError: There is no such type.
            RegistryError: No device has the type; the message lists unavailable backends.

        Source: ggml_backend_dev_by_type.
        """
        wanted = as_enum("device_by_type", DeviceType, type)
        for device in self._choice():
            if device.type is wanted:
                return device
        raise RegistryError(f"there is no device of type {wanted.value}{self._reasons()}")

    def host_device(self) -> Device:
        """Return the device `CPU`, even if its backend was unloaded.

        Raises:
            BackendError: Its backend cannot be used; the message says why.
            RegistryError: There is none.
        """
        with self._lock:
            found = _named("CPU", self._usable_devices()) or self._unloaded.get("cpu")
            return found or self.device_by_name("CPU")

    def unavailable(self) -> list[Unavailable]:
        """Return backends, cards and libraries that were found but cannot be used, with reasons."""
        with self._lock:
            self._open_all()
            parts = (part for loaded in self._loaded for part in loaded.reg.unusable)
            return sorted([*self._failed, *(Unavailable(*part, "absent") for part in parts)])

    # -- opening streams -----------------------------------------------------------------------

    def init_by_name(self, name: str, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream on the device of that name (ggml_backend_init_by_name).

        Args:
            name: For example `"CPU"`, `"CUDA0"`, `"OpenCL1"`, in any case.
            params: Settings that the backend defines.

        Raises:
            Error: As `device_by_name` and `Device.init_backend`.
        """
        return _opened(self.device_by_name(name), params)

    def init_by_type(self, type: DeviceType | str, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream on the first device of a type (ggml_backend_init_by_type).

        Raises:
            Error: As `device_by_type` and `Device.init_backend`.
        """
        return _opened(self.device_by_type(type), params)

    def init_best(self) -> Backend:
        """Open a stream on the best device: GPUs are tried first, then integrated GPUs, then CPUs.

        As in ggml, accelerators (ACCEL, such as a CPU driven through OpenCL) are not chosen, since they
        work beside a CPU; nor are devices of other packages. Request one by name.

        Raises:
            BackendUnavailable: No device opens; the message gives the reasons.
            Error: A usable device failed to open, for example for lack of memory.

        Source: ggml_backend_init_best.
        """
        reasons = []
        found = [device for device in self._choice() if device.is_automatic]
        for device in (device for type in _BEST_ORDER for device in found if device.type is type):
            try:
                return _opened(device)
            except BackendUnavailable as why:
                reasons.append(f"\n  {device.name}: {why}")
            except Exception as why:  # third-party backends may raise anything
                if isinstance(why, Error) and not isinstance(why, BackendBroken):
                    raise  # a passing failure, such as too little memory
                self._warn_of(device.name, f"it fails to open: {one_line(why)}")
                reasons.append(f"\n  {device.name}: {one_line(why)}")
        raise BackendUnavailable(f"there is no GPU or CPU device to use{''.join(reasons)}{self._reasons()}")

    # -- defaults ------------------------------------------------------------------------------

    def default_devices(self) -> tuple[str, ...]:
        """Return the names of the default devices, highest priority first; empty if none are set.

        They are set by `set_default_devices`, or else by `GGMLB_DEVICES` (`OpenCL0,CPU`), for `evaluate`,
        models and commands.
        """
        if self._defaults:
            return self._defaults
        return tuple(name.strip() for name in (env.text("GGMLB_DEVICES") or "").split(",") if name.strip())

    def set_default_devices(self, *names: str) -> None:
        """Set the default devices, highest priority first; without names, remove them.

        Raises:
            RegistryError: No device has one of the names.
        """
        self._defaults = tuple(self.device_by_name(name).name for name in names)

    # -- opening candidates --------------------------------------------------------------------
    # The caller has the lock.

    def _pending(self) -> list[Candidate]:
        """Return the candidates that are not opened yet."""
        if self._found is None:
            try:
                self._found = self._not_in_use(self._discover())
            except OSError as error:  # for example, too many open files
                raise BackendError(f"backends cannot be discovered: {error}; try again later") from error
        return self._found

    def _not_in_use(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        targets = {loaded.target for loaded in self._loaded}
        return [candidate for candidate in candidates if candidate.target not in targets]

    def _open_all(self) -> None:
        while pending := self._pending():
            self._open_group(pending[0].group)

    def _open_group(self, group: str) -> None:
        """Open the pending candidates of a group, and add the best variant of each name.

        If Ctrl-C interrupts it, those not yet in use become pending again.
        """
        pending, failed = self._pending(), list(self._failed)
        self._found = [c for c in pending if c.group != group]
        variants: dict[str, list[tuple[float, BackendReg, Candidate]]] = {}
        try:
            with whole_imports():
                for candidate in (c for c in pending if c.group == group):
                    try:
                        with log.timed("devices", log.DEBUG, "backend %s loaded", candidate.name):
                            score, reg = candidate.open()
                    except BackendError as why:
                        self._fail(candidate.name, why)
                    else:
                        variants.setdefault(reg.name.casefold(), []).append((score, reg, candidate))
                for same in variants.values():
                    try:
                        self._add_best(same)
                    except (BackendError, RegistryError) as why:
                        self._fail(same[0][1].name, why)
        except BaseException:
            self._found, self._failed = self._not_in_use(pending), failed
            raise

    def _fail(self, name: str, why: Exception) -> None:
        kind: Literal["absent", "broken"] = "absent" if isinstance(why, BackendUnavailable) else "broken"
        self._failed.append(Unavailable(name, str(why), kind))

    # -- backends in use -----------------------------------------------------------------------

    def _add_best(self, variants: list[tuple[float, BackendReg, Candidate]]) -> None:
        """Add the variant of a backend with the highest score.

        Raises:
            RegistryError: Several have the highest score.
            Error: As `_add`.
        """
        high = max(score for score, _, _ in variants)
        best, *others = [(reg, candidate) for score, reg, candidate in variants if score == high]
        if others:
            where = " and ".join(f"{c.target} ({c.origin})" for _, c in (best, *others))
            raise RegistryError(f"{1 + len(others)} backends are named {best[0].name!r}: {where}; remove one")
        self._add(best[0], best[1].target)

    def _add(self, reg: BackendReg, target: str) -> None:
        """Add a backend with its devices.

        Raises:
            BackendBroken: Listing its devices fails.
            BackendUnavailable: It has no device.
            RegistryError: Its name, or a device's, is taken.
        """
        if taken := _named(reg.name, self._usable_regs()):
            raise RegistryError(f"a backend named {taken.name!r} is already registered; unload it first")
        devices = _devices_of(reg)
        self._check_names(devices)
        self._single = [d for d in self._single if d.reg is not reg]  # now listed with their backend
        self._loaded.append(Loaded(reg, devices, target))

    def _check_names(self, devices: Iterable[Device]) -> None:
        """Raise RegistryError if a device's name is taken by another device."""
        taken = {device.name.casefold(): device for device in self._usable_devices()}
        for device in devices:
            other = taken.setdefault(device.name.casefold(), device)
            if other is not device:
                raise RegistryError(
                    f"the device name {device.name!r} of the {device.reg.name} backend is taken by a device "
                    f"of the {other.reg.name} backend; names must be unique"
                )

    def _check_not_pending(self, reg: BackendReg, target: str) -> None:
        """Raise RegistryError if a backend of that name is installed but not imported yet."""
        for candidate in self._pending():
            if candidate.key == reg.name.casefold() and candidate.target != target:
                raise RegistryError(
                    f"a backend named {candidate.name!r} is installed ({candidate.origin}); unload that "
                    f"one first: ggmlb.unload(ggmlb.reg_by_name({candidate.name!r}))"
                )

    def _usable_regs(self) -> list[BackendReg]:
        found = (loaded.reg for loaded in self._loaded)
        return sorted(found, key=lambda reg: (-reg.priority, reg.name.casefold()))

    def _usable_devices(self) -> list[Device]:
        found = [device for loaded in self._loaded for device in loaded.devices]
        return sorted([*found, *self._single], key=_device_order)

    # -- choosing ------------------------------------------------------------------------------

    def _choice(self) -> list[Device]:
        """Return all devices for an automatic choice, with a warning of broken backends."""
        with self._lock:
            self._open_all()
            for failed in self._failed:
                if failed.kind == "broken":
                    self._warn_of(failed.name, failed.reason)
            return self._usable_devices()

    def _warn_of(self, name: str, reason: str) -> None:
        """Warn once of a broken backend, at the caller's line."""
        message = f"{name} is broken, and another device is chosen; repair or remove it: {reason}"
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=_depth())

    def _look_up(
        self, name: str, things: Callable[[], list[_Named]], may_be_of: Callable[[str], bool]
    ) -> _Named | None:
        """Look for a name before any import, then after importing the backends it may be of, then all."""
        found = _named(name, things())
        if found is None:
            for group in {c.group for c in self._pending() if may_be_of(c.key)}:
                self._open_group(group)
            found = _named(name, things())
        if found is None:
            for failed in self._failed:
                if may_be_of(failed.name.casefold()):
                    raise failed.error()
            self._open_all()
            found = _named(name, things())
        return found

    def _no_such(self, what: str, name: str, known: list[str]) -> NoReturn:
        if what == "device" and name.upper() in DeviceType.__members__:
            raise RegistryError(
                f"there is no device {name!r}, which is a type of devices; give the name of one of "
                f"{', '.join(known)}, or use init_by_type({name.upper()!r}){self._reasons()}"
            )
        raise RegistryError(f"there is no {what} {name!r}{did_you_mean(name, known)}{self._reasons()}")

    def _reasons(self) -> str:
        """Return a line for each unavailable backend, to end a message."""
        return "".join(f"\n  {f.name} is not available: {f.reason}" for f in self.unavailable())


def _named(name: str, things: Iterable[_Named]) -> _Named | None:
    return next((thing for thing in things if thing.name.casefold() == name.casefold()), None)


def _devices_of(reg: BackendReg) -> tuple[Device, ...]:
    with failing_as_broken("listing its devices failed"):
        devices = tuple(reg.devices)
        for device in devices:
            if not (isinstance(device, Device) and isinstance(device.name, str)):
                raise BackendBroken(
                    f"{device!r} is listed as a device; each must be a ggmlb.Device with a name"
                )
            _check_type(device)
            _device_order(device)  # reads what the list is sorted by, to find errors in it here
    if not devices:
        raise BackendUnavailable("no device was found on this machine; check its driver")
    return devices


def _check_type(device: Device) -> None:
    """Raise BackendBroken if a device's type is not a `DeviceType` (for example, only its name)."""
    if not isinstance(device.type, DeviceType):
        raise BackendBroken(
            f"the type of device {device.name} is {device.type!r}; it must be a member of ggmlb.DeviceType"
        )


def _device_order(device: Device) -> tuple[int, bool, int, str]:
    reg = device.reg
    is_last = not device.is_automatic or bool(reg.unproven)
    return _TYPE_ORDER.index(device.type), is_last, -reg.priority, reg.name.casefold()


def _opened(device: Device, params: Mapping[str, Any] | None = None) -> Backend:
    with log.timed("devices", log.INFO, "%s opened", device.name):
        try:
            return device.init_backend(params)
        except OSError as error:  # its modules cannot be read: too many open files
            raise BackendError(f"{device.name} cannot be opened: {error}") from error


def _depth() -> int:
    """Return the stack level of the user's frame, for warnings: one more than the frames of ggmlb."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    return depth
