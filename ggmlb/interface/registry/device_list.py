"""The list of devices, as a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggmlb.interface import Device

if TYPE_CHECKING:
    from ggmlb.interface.registry.catalogue import Unavailable


class DeviceList(list[Device]):
    """Devices, best first; a notebook shows them in a table, with the backends that cannot be used.

    Attributes:
        unavailable: Backends that cannot be used, each with its reason.
    """

    def __init__(self, devices: Iterable[Device], unavailable: Iterable[Unavailable] = ()) -> None:
        super().__init__(devices)
        self.unavailable = tuple(unavailable)
