"""Registry: registers, loads and looks up backends and devices, and opens streams on them."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ggmlb.core import arguments
from ggmlb.core.enums import DeviceType, as_enum
from ggmlb.core.errors import (
    BackendBroken,
    BackendError,
    BackendUnavailable,
    Error,
    RegistryError,
    did_you_mean,
)
from ggmlb.interface import Backend, BackendReg, Device
from ggmlb.interface.registry import discovery
from ggmlb.interface.registry.candidate import check_reg, whole_imports
from ggmlb.interface.registry.catalogue import Catalogue, DeviceList, Unavailable, check_type
from ggmlb.system import env, log

if TYPE_CHECKING:
    from ggmlb.interface.registry.candidate import Candidate

_Named = TypeVar("_Named", "BackendReg", "Device")

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")

_BEST_ORDER = (DeviceType.GPU, DeviceType.IGPU, DeviceType.CPU)


@arguments.checked_methods
class Registry:
    """All backends and devices of a process (source: ggml-backend-reg.cpp).

    Candidates are discovered as text at the first look-up. One is imported when requested by name, all when
    devices are listed or chosen. Failures stay in `unavailable()` until `load_all` looks again.

    A request by name raises the backend's error. An automatic choice (`init_best`, `init_by_type`,
    `device_by_type`) skips absent backends silently, and warns once (RuntimeWarning) of a broken one, whose
    device might have been faster.

    Safe to use from several threads. A backend must not use the registry while it is being imported.

    Args:
        discover: Returns the candidates.
    """

    def __init__(self, discover: Callable[[], Iterable[Candidate]] = discovery.discover) -> None:
        self._lock = threading.RLock()
        self._catalogue = Catalogue(discover)
        self._told: set[str] = set()
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
            if any(loaded.reg is reg for loaded in self._catalogue.loaded):
                return
            check_reg(reg, "register")
            self._check_not_pending(reg, "")
            self._catalogue.add(reg, "")

    def register_device(self, device: Device) -> None:
        """Add one device; without effect if already registered.

        Raises:
            BackendBroken: Its type is not a `DeviceType`.
            RegistryError: Its name is taken.

        Source: ggml_backend_device_register.
        """
        with self._lock:
            self._catalogue.open_all()  # all names must be known
            if any(known is device for known in self._catalogue.devices()):
                return
            check_type(device)
            self._catalogue.check_names([device])
            self._catalogue.single.append(device)

    def unload(self, reg: BackendReg) -> None:
        """Remove a backend and its devices; open streams and buffers stay usable.

        A discovered backend is not found again before `load_all`.

        Raises:
            RegistryError: It is not registered.

        Source: ggml_backend_unload.
        """
        with self._lock:
            if not self._catalogue.remove(reg):
                raise RegistryError(f"unload: the backend {reg.name!r} is not registered")

    # -- loading -------------------------------------------------------------------------------

    def load(self, where: str | os.PathLike[str]) -> BackendReg:
        """Load one backend, or return it if already loaded.

        Args:
            where: A module's name (`"pkg.mod"` or `"pkg.mod:factory"`), a `.py` file, or the folder of
                a package; `ggmlb.interface.registry.candidate` says what it must export.

        Raises:
            BackendUnavailable: It reports a missing library, driver or device, or scores 0.
            BackendBroken: It fails, lacks `backend_reg()`, or was written for another API version.
            RegistryError: There is nothing at `where`, or a name is taken.

        Source: ggml_backend_load.
        """
        with self._lock:
            candidate = discovery.at(where)
            for loaded in self._catalogue.loaded:
                if loaded.target == candidate.target:
                    return loaded.reg
            with whole_imports():
                reg = candidate.open().reg
                self._check_not_pending(reg, candidate.target)
                self._catalogue.add(reg, candidate.target)
            self._catalogue.settle(candidate.target, candidate.key)
            return reg

    def load_all(self) -> list[BackendReg]:
        """Discover backends again, import all, and return the usable ones (ggml_backend_load_all)."""
        with self._lock:
            self._catalogue.forget()
            return self.regs()

    def load_all_from_path(self, folder: str | os.PathLike[str]) -> list[BackendReg]:
        """Load the backends in a folder; of each name the variant with the highest score.

        Returns:
            The loaded backends; the others are in `unavailable()`.

        Raises:
            RegistryError: There is no such folder.

        Source: ggml_backend_load_all_from_path.
        """
        with self._lock:
            return self._catalogue.open_these(discovery.in_folder(folder))

    # -- looking up ----------------------------------------------------------------------------

    def regs(self) -> list[BackendReg]:
        """Return all usable backends, by descending `priority` (ggml_backend_reg_count, _get)."""
        with self._lock:
            self._catalogue.open_all()
            return self._catalogue.regs()

    def reg_by_name(self, name: str) -> BackendReg:
        """Return the backend of that name, in any case, importing only that one.

        Raises:
            BackendError: It cannot be used; the message says why.
            RegistryError: There is none.

        Source: ggml_backend_reg_by_name.
        """
        with self._lock:
            found = self._look_up(name.casefold(), lambda: _named(name, self._catalogue.regs()))
            return found or self._no_such("backend", name, [reg.name for reg in self.regs()])

    def devices(self) -> DeviceList:
        """Return all devices: GPUs, accelerators, CPUs; within a type, proven backends first, by priority.

        Source: ggml_backend_dev_count, ggml_backend_dev_get.
        """
        with self._lock:
            self._catalogue.open_all()
            return DeviceList(self._catalogue.devices(), self.unavailable())

    def device_by_name(self, name: str) -> Device:
        """Return the device of that name, in any case, importing only its backend if the name tells which.

        Raises:
            ArgumentError: The name is not a str.
            BackendError: Its backend cannot be used; the message says why.
            RegistryError: There is none.

        Source: ggml_backend_dev_by_name.
        """
        backend = name.casefold().partition(":")[0].rstrip("0123456789")  # OpenCL1 is a device of OpenCL
        with self._lock:
            found = self._look_up(backend, lambda: _named(name, self._catalogue.devices()))
            return found or self._no_such(
                "device", name, [device.name for device in self._catalogue.devices()]
            )

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
            found = _named("CPU", self._catalogue.devices()) or self._catalogue.unloaded.get("cpu")
            return found or self.device_by_name("CPU")

    def unavailable(self) -> list[Unavailable]:
        """Return the backends, and parts of usable ones, that were found but cannot be used, with reasons."""
        with self._lock:
            self._catalogue.open_all()
            parts = (part for loaded in self._catalogue.loaded for part in loaded.reg.unusable)
            return sorted([*self._catalogue.failed, *(Unavailable(*part, "absent") for part in parts)])

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
        """Open a stream on the best device: the first that opens of GPUs, integrated GPUs and CPUs.

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
            except Exception as why:  # of a backend of any author
                if isinstance(why, Error) and not isinstance(why, BackendBroken):
                    raise  # a failure of this moment, as too little memory
                self._warn_of(device.name, f"it fails to open: {type(why).__name__}: {why}")
                reasons.append(f"\n  {device.name}: {why}")
        raise BackendUnavailable(f"there is no GPU or CPU device to use{''.join(reasons)}{self._reasons()}")

    # -- defaults ------------------------------------------------------------------------------

    def default_devices(self) -> tuple[str, ...]:
        """Return the devices for calls that name none, highest priority first; empty: each call chooses.

        They are those of `set_default_devices`, else those that `GGMLB_DEVICES` names, as `OpenCL0,CPU`.
        `evaluate`, models and the commands ask for them.
        """
        if self._defaults:
            return self._defaults
        return tuple(name.strip() for name in (env.text("GGMLB_DEVICES") or "").split(",") if name.strip())

    def set_default_devices(self, *names: str) -> None:
        """Set the devices for calls that name none, highest priority first; without names, none.

        Raises:
            RegistryError: No device has one of the names.
        """
        self._defaults = tuple(self.device_by_name(name).name for name in names)

    # -- inside --------------------------------------------------------------------------------

    def _check_not_pending(self, reg: BackendReg, target: str) -> None:
        """Raise RegistryError if a backend of that name is installed but not imported yet."""
        for candidate in self._catalogue.pending():
            if candidate.key == reg.name.casefold() and candidate.target != target:
                raise RegistryError(
                    f"a backend named {candidate.name!r} is installed ({candidate.origin}); unload it "
                    f"first: ggmlb.unload(ggmlb.reg_by_name({candidate.name!r}))"
                )

    def _choice(self) -> list[Device]:
        """Return all devices for an automatic choice, with a warning of broken backends."""
        with self._lock:
            self._catalogue.open_all()
            for failed in self._catalogue.failed:
                if failed.kind == "broken":
                    self._warn_of(failed.name, failed.reason)
            return self._catalogue.devices()

    def _warn_of(self, name: str, reason: str) -> None:
        """Warn once of a broken backend, at the caller's line."""
        message = f"{name} is broken, and another device is chosen; repair or remove it: {reason}"
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=_depth())

    def _look_up(self, backend: str, find: Callable[[], _Named | None]) -> _Named | None:
        """Call `find` before any import, then after importing the backend of that name, then after all."""
        found = find()
        if found is None:
            self._catalogue.open_named(backend)
            found = find()
        if found is None:
            for failed in self._catalogue.failed:
                if failed.name.casefold() == backend:
                    raise failed.error()
            self._catalogue.open_all()
            found = find()
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
