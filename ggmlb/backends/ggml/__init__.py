"""ggml's own compiled backends (CPU, CUDA, Metal, Vulkan, SYCL, ...) as devices.

Libraries are searched in `GGMLB_GGML_PATH`, in installed packages and in the system's folders. Each is probed
in a child process when the devices are first requested, and loaded into this process when one of its devices
is first used. Device names are ggml's with a prefix: `ggml:CPU`, `ggml:Vulkan0`; `ggml2:` for a second
library, and so on.

A failed assertion in ggml aborts the process, which Python cannot catch. So before a kind of node is computed
here, a child process tests it (`trust`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from ggmlb.core.arguments import checked
from ggmlb.core.errors import BackendUnavailable
from ggmlb.interface import BackendReg, Device
from ggmlb.interface.procs import dev_get_extra_bufts, set_abort_callback, set_n_threads

NO_LIBRARY = (
    "no ggml library was found: pip install 'ggmlb[ggml]' has one for the CPU, and docs/gpu.md names those "
    "for GPUs; or set GGMLB_GGML_PATH to a library's file or folder"
)


class GgmlReg(BackendReg):
    """The registry entry `ggml`: devices of all ggml libraries found."""

    name = "ggml"

    priority = 60

    def __init__(self) -> None:
        self._devices: tuple[Device, ...] | None = None
        self._unfit: list[tuple[str, str]] = []

    @property
    def devices(self) -> Sequence[Device]:
        """The devices of each library, in the order in which the libraries are found.

        Raises:
            BackendUnavailable: No library was found, or none is usable; the message has each reason.
        """
        if self._devices is None:
            self._devices = self._find()
        return self._devices

    @property
    def unusable(self) -> Sequence[tuple[str, str]]:
        """Names of libraries and backend plugins that cannot be used, each with the reason."""
        return self._unfit

    def _find(self) -> tuple[Device, ...]:
        from ggmlb.backends.ggml.device import GgmlDevice
        from ggmlb.backends.ggml.find import libraries
        from ggmlb.backends.ggml.library import GgmlLibrary, probe
        from ggmlb.backends.ggml.trust import Judge

        found = libraries()
        if not found:
            raise BackendUnavailable(NO_LIBRARY)
        devices: list[GgmlDevice] = []
        with ThreadPoolExecutor(len(found)) as pool:
            probes = [pool.submit(probe, each) for each in found]
        for each, facts in zip(found, probes, strict=True):
            try:
                prefix = f"ggml{len({d.library for d in devices}) + 1 if devices else ''}:"
                library = GgmlLibrary(each, prefix, facts.result())
            except BackendUnavailable as why:
                self._unfit.append((f"ggml of {each.origin}", str(why)))
                continue
            devices += (GgmlDevice(self, library, i, Judge()) for i in range(len(library.facts["devices"])))
            left_out = library.facts.get("left_out", {})
            self._unfit += ((f"{file} of {each.origin}", why) for file, why in left_out.items())
        if not devices:
            raise BackendUnavailable("; ".join(f"{name}: {why}" for name, why in self._unfit) or NO_LIBRARY)
        return tuple(devices)

    def _procs(self) -> Mapping[str, Callable[..., Any]]:
        from ggmlb.backends.ggml import collectives

        return {
            "split_buffer_type": partial(collectives.split_buffer_type, self),
            "comm_init": collectives.comm_init,
            "comm_free": collectives.GgmlCommunicator.free,
            "comm_allreduce_tensor": collectives.GgmlCommunicator.allreduce,
            "set_n_threads": set_n_threads,
            "set_abort_callback": set_abort_callback,
            "dev_get_extra_bufts": dev_get_extra_bufts,
            "driver_version": _driver_version,
            "get_features": _features,
        }


@cache
def backend_reg() -> GgmlReg:
    """Return the registration; the registry calls this."""
    return GgmlReg()


def _features(reg: BackendReg) -> list[tuple[str, str]]:
    """Return the build options of each library's backends, such as `("ggml:CPU_AVX2", "1")`."""
    from ggmlb.backends.ggml.device import GgmlDevice

    found: dict[str, str] = {}
    for device in reg.devices:
        assert isinstance(device, GgmlDevice)
        found |= {device.library.prefix + name: value for name, value in device.features}
    return list(found.items())


@checked
def _driver_version(device: Device) -> str:
    """Return the library of a device, with its version."""
    from ggmlb.backends.ggml.device import GgmlDevice

    assert isinstance(device, GgmlDevice)
    return str(device.library)
