"""Events: the last call that was sent to a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.interface import Event

if TYPE_CHECKING:
    from ggmlb.backends.ray.device import RayDevice
    from ggmlb.backends.ray.link import Call


class RayEvent(Event):
    """A call, after which all work queued so far is done.

    Attributes:
        call: `None` until recorded, or if nothing was in progress then.
    """

    device: RayDevice

    def __init__(self, device: RayDevice) -> None:
        super().__init__(device)
        self.call: Call | None = None

    def _synchronize(self) -> None:
        if self.call is not None and self.call.first is None:
            self.call.wait()

    def _free(self) -> None:
        self.call = None
