"""Events: markers in a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.opencl.runtime import check_outcome, cl_errors
from ggmlb.interface import Event

if TYPE_CHECKING:
    import pyopencl as cl

    from ggmlb.backends.opencl.device import OpenClDevice


class OpenClEvent(Event):
    """A marker in a backend's queue.

    Attributes:
        marker: OpenCL's event; `None` until recorded.
    """

    device: OpenClDevice

    def __init__(self, device: OpenClDevice) -> None:
        super().__init__(device)
        self.marker: cl.Event | None = None

    def _synchronize(self) -> None:
        if self.marker is not None:
            with cl_errors(f"wait for an event of {self.device.name}", device=self.device.name):
                self.marker.wait()
            check_outcome(self.marker, f"event of {self.device.name}", self.device.name)

    def _free(self) -> None:
        self.marker = None
