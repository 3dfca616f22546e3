"""Version counter of placements and op parameters, for graph plans; overlap of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import copysign
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggmlb.core.tensor import Tensor


class PlacementClock:
    """Version counter of tensor placements and op parameters.

    A graph plan binds addresses and parameters. It is valid while the count is unchanged. After a change, the
    plan compares its tensors with those it bound (see `ggmlb.interface.plan`).
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> None:
        """Advance the version, because a placement or an op parameter changed."""
        self.now += 1


placement_clock = PlacementClock()


class Params(dict[str, Any]):
    """An op's parameters by name; a change advances `placement_clock`, a version that graph plans compare."""

    __slots__ = ()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        placement_clock.tick()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        placement_clock.tick()

    def __ior__(self, other: Any) -> Params:  # type: ignore[override,misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Change parameters as `dict.update` does, and advance `placement_clock`."""
        super().update(*args, **kwargs)
        placement_clock.tick()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Look up or add a parameter as `dict.setdefault` does, and advance `placement_clock`."""
        placement_clock.tick()
        return super().setdefault(name, default)

    def pop(self, *args: Any) -> Any:
        """Remove and return a parameter as `dict.pop` does, and advance `placement_clock`."""
        placement_clock.tick()
        return super().pop(*args)

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last parameter as `dict.popitem` does, and advance `placement_clock`."""
        placement_clock.tick()
        return super().popitem()

    def clear(self) -> None:
        """Remove all parameters as `dict.clear` does, and advance `placement_clock`."""
        super().clear()
        placement_clock.tick()


def frozen(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return parameters as a hashable key that distinguishes 1, 1.0 and True, and 0.0 and -0.0."""
    if not params:
        return ()
    values = params.values()
    types = tuple(map(type, values))
    signs = zeros_of([params]) if float in types and 0.0 in values else ()
    return (*params, *values, types, *signs)


Zeros = list[tuple[int, str, float]]
"""Position, name and sign of each zero float in a list of parameters."""


def zeros_of(params: Iterable[Mapping[str, Any]]) -> Zeros:
    """Return the position, name and sign of each zero float in `params`, to tell 0.0 from -0.0."""
    return [
        (i, name, copysign(1.0, value))
        for i, each in enumerate(params)
        if each
        for name, value in each.items()
        if type(value) is float and not value
    ]


def are_equal(a: Any, b: Any) -> bool:
    """Whether `a == b`; `False` if the comparison is ambiguous, as of NumPy arrays in parameters."""
    try:
        return bool(a == b)
    except ValueError:
        return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share a byte: by address if both are allocated, else by `view_src`."""
    if a.buffer is not None and b.buffer is not None:
        return a.buffer is b.buffer and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
    return (a.view_src or a) is (b.view_src or b)


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same address, type, extents and strides."""
    places = [
        (id(t.buffer), t.offset) if t.buffer is not None else (id(t.view_src or t), t.view_offs)
        for t in (a, b)
    ]
    return places[0] == places[1] and (a.dtype, a.ne, a.nb) == (b.dtype, b.ne, b.nb)
