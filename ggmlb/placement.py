"""Where tensors lie: when that last changed, and which of them share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggmlb.tensor import Tensor


class PlacementClock:
    """Counts the changes to where tensors lie and to what bound plans depend on.

    A graph plan binds addresses and parameters. It stays valid while this count stands still; when it
    has moved, the plan compares its tensors with what it bound (see `ggmlb.interface.plan`).
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> None:
        """Note a change."""
        self.now += 1


placement_clock = PlacementClock()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share a byte: by their places, or before these are known by what they view."""
    if a.buffer is not None and b.buffer is not None:
        return a.buffer is b.buffer and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
    return (a.view_src or a) is (b.view_src or b)


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements at the same place."""
    places = [
        (id(t.buffer), t.offset) if t.buffer is not None else (id(t.view_src or t), t.view_offs)
        for t in (a, b)
    ]
    return places[0] == places[1] and (a.dtype, a.ne, a.nb) == (b.dtype, b.ne, b.nb)
