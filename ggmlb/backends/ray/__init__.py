"""Devices of other machines, over Ray.

    here                                              there: an actor on each machine
    RayDevice, RayBuffer, RayBackend, RayPlan         devices, buffers, streams, plans of any backend
            │  handles                                        ▲  looked up and checked
            ▼                                                 │
    Link    batch of commands, one call  ─────────────▶ Node.run
            results, references to data  ◀─────────────
                                                        Node ──▶ Node   copies, through the object store

`ggmlb.connect` imports Ray, starts the actors (`cluster`) and registers their devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ggmlb.backends.ray.collectives import comm_allreduce_tensor, comm_free, comm_init
from ggmlb.core.errors import BackendUnavailable
from ggmlb.interface import BackendReg, Device
from ggmlb.interface.procs import dev_get_extra_bufts, set_abort_callback, set_n_threads


class RayReg(BackendReg):
    """The registry entry `Ray`: the devices of a cluster's machines.

    Attributes:
        priority: Lower than all local backends', whose devices come first.
        found: The devices, while connected.
    """

    name = "Ray"

    priority = -100

    def __init__(self) -> None:
        self.found: list[Device] = []

    @property
    def devices(self) -> Sequence[Device]:
        """The devices of all machines, machine by machine.

        Raises:
            BackendUnavailable: There is no connection.
        """
        if not self.found:
            raise BackendUnavailable(
                "no Ray cluster is connected: call ggmlb.connect(address) (pip install 'ggmlb[ray]')"
            )
        return self.found

    def _procs(self) -> Mapping[str, Any]:
        return {
            "dev_get_extra_bufts": dev_get_extra_bufts,
            "set_n_threads": set_n_threads,
            "set_abort_callback": set_abort_callback,
            "get_features": _features,
            "comm_init": comm_init,
            "comm_free": comm_free,
            "comm_allreduce_tensor": comm_allreduce_tensor,
        }


@cache
def backend_reg() -> RayReg:
    """Return the registration; the registry calls this."""
    return RayReg()


def _features(reg: BackendReg) -> list[tuple[str, str]]:
    """Return the features of each machine's backends, such as `("node0/CPU_NUMPY", "2.3.4")`."""
    from ggmlb.backends.ray.device import RayDevice

    links = {device.link: None for device in reg.devices if isinstance(device, RayDevice)}
    return [(f"{link.title}/{name}", value) for link in links for name, value in link.ask("features")]
