"""Event: a point in the work queued on a stream."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from ggmlb.core.arguments import named
from ggmlb.core.lifetime import Freeable
from ggmlb.interface.observe import Action, observers

if TYPE_CHECKING:
    from ggmlb.interface.device import Device


@named("an event, as device.event_new() makes one")
class Event(Freeable):
    """A point in the work queued on a backend (ggml_backend_event).

    An event that was never recorded counts as reached, as in CUDA. Recording it again moves it.
    """

    is_recorded = False
    """Whether it was ever recorded."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Block until the point is reached (ggml_backend_event_synchronize).

        Raises:
            BackendError: Work before the point failed.
            FreedError: The event was freed.
        """
        if observers:
            return Action("event_synchronize", event=self).run(self._synchronize)
        return self._synchronize()

    def free(self) -> None:
        """Release the event (ggml_backend_event_free).

        Raises:
            FreedError: It was freed before.
        """
        self.is_freed = True
        self._free()

    @property
    def _title(self) -> str:
        return f"this event of {self.device.name}"

    @abstractmethod
    def _synchronize(self) -> None:
        """Block until reached; return at once if never recorded."""

    def _free(self) -> None:
        """Release the runtime's event."""
