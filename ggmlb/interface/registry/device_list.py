"""DeviceList: a list of devices that notebooks show as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggmlb.interface import Device

if TYPE_CHECKING:
    from ggmlb.interface.registry.catalogue import Unavailable


class DeviceList(list[Device]):
    """List of devices, best first; notebooks show a table of them and of the unavailable backends.

    Attributes:
        unavailable: Backends that cannot be used, with reasons.
    """

    def __init__(self, devices: Iterable[Device], unavailable: Iterable[Unavailable] = ()) -> None:
        super().__init__(devices)
        self.unavailable = tuple(unavailable)
