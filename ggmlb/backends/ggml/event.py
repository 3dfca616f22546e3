"""Events of ggml's devices."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ggmlb.interface import Event

if TYPE_CHECKING:
    from ggmlb.backends.ggml.device import GgmlDevice


class GgmlEvent(Event):
    """An event of ggml's.

    Attributes:
        handle: The C event.
    """

    device: GgmlDevice

    def __init__(self, device: GgmlDevice) -> None:
        super().__init__(device)
        self._c = device.library.load()
        self.handle = self._c["backend_event_new"](device.handle)
        self._end = weakref.finalize(self, self._c["backend_event_free"], self.handle)
        self._end.atexit = False

    def _synchronize(self) -> None:
        if self.is_recorded:
            self._c["backend_event_synchronize"](self.handle)

    def _free(self) -> None:
        self._end()
