"""The list of devices, as a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggmlb.interface import Device
from ggmlb.interface.device import memory_bar

if TYPE_CHECKING:
    from ggmlb.interface.registry.catalogue import Unavailable


class DeviceList(list[Device]):
    """Devices, best first; a notebook shows them in a table, with the backends that cannot be used."""

    def __init__(self, devices: Iterable[Device], unavailable: Iterable[Unavailable] = ()) -> None:
        super().__init__(devices)
        self._unavailable = tuple(unavailable)

    def _repr_html_(self) -> str:
        """A table."""
        from ggmlb.inspect.html import table

        rows: list[tuple[str, ...]] = []
        for device in self:
            props = device.props
            caps = ", ".join(name for name, has in props.caps.as_dict().items() if has)
            rows.append((props.name, props.type.value, props.description, memory_bar(props), caps))
        rows += [(missing.name, missing.kind, missing.reason, "", "") for missing in self._unavailable]
        return table(("device", "type", "description", "memory", "can do"), rows)
