"""Ways in which devices can hold a language model, with the time of a token and the memory of each."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from ggmlb import Backend, Device, DType
from ggmlb.core.errors import AllocationError, ArgumentError, Error, did_you_mean
from ggmlb.models.devices import split_rows
from ggmlb.models.layers import OUTPUT
from ggmlb.models.rates import N_WEIGHTS, Rates, rates_of
from ggmlb.models.text.cost import Cost
from ggmlb.models.text.fit import Fit, Planner
from ggmlb.models.text.parts import is_expert

LAYERS, FASTEST, SHARED, ROWS = "layers", "fastest", "shared", "rows"
WAYS: Mapping[str, str] = {
    LAYERS: "whole layers on each device, in the order in which these are named",
    FASTEST: "the same, the fastest device first",
    SHARED: "each layer on several devices (`A+B`)",
    ROWS: "rows of the matrices on several devices, the rest of a layer on one (`A_Split`)",
}
"""The ways, in words."""

BEST = "best"
"""The way that takes least time of those that fit."""

NO_CHOICE = "it is said where layers lie, or there is one memory"


@dataclass(frozen=True)
class Way:
    """One way, planned.

    Attributes:
        name: Of `WAYS`.
        planner: Over its devices; `None` where there is no such way.
        fit: Its placement and memory.
        costs: What a token costs each device.
        short: Bytes that devices lack.
        why: Why there is no such way.
    """

    name: str
    planner: Planner | None = None
    fit: Fit | None = None
    costs: Mapping[str, Cost] = field(default_factory=dict)
    short: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def time(self) -> float:
        """The time of a token [s], whether the way fits or not; 0 where it is not known."""
        return sum(cost.seconds for cost in self.costs.values())


class Ways:
    """Plans the ways of a model over some devices.

    Args:
        resources: Closes the devices that are opened.
        planner: The model, over the devices that were named, as it was asked for.
        declared: Weights that devices read, by name, in place of what is measured [bytes/s].

    Raises:
        ArgumentError: A rate is declared of a device that the model does not have.
    """

    def __init__(
        self, resources: ExitStack, planner: Planner, declared: Mapping[str, float] | None = None
    ) -> None:
        self._resources = resources
        self._planner = planner
        self._declared = declared or {}
        self._devices = [stream.device for b in planner.backends.values() for stream in b.streams]
        names = [device.name for device in self._devices]
        for name in self._declared.keys() - {*names}:
            raise ArgumentError(f"bandwidth: {name!r} is none of the devices; they are {', '.join(names)}")

    @property
    def are_several(self) -> bool:
        """Whether there is a choice: several memories, and nothing said about layers."""
        return len(self._planner.free) > 1 and self._planner.is_open

    def planned(self) -> list[Way]:
        """Return all ways, or as it was asked for where there is no choice.

        Raises:
            AllocationError: A device lacks room to measure it.
        """
        return [self._planned(name) for name in (WAYS if self.are_several else (LAYERS,))]

    def planner_of(self, name: str) -> Planner:
        """Return a planner of a way, or of the best.

        Raises:
            ArgumentError: There is no such way.
            AllocationError: A device lacks room to measure it.
        """
        if name == LAYERS or (name == BEST and not self.are_several):
            return self._planner
        ways = self.planned() if name == BEST else [self._planned(each) for each in WAYS if each == name]
        found = self.taken(name, ways)
        assert found.planner is not None
        return found.planner

    @staticmethod
    def taken(name: str, ways: Sequence[Way]) -> Way:
        """Return the way of a name among those that were planned, or the best: if none fits, the first.

        Raises:
            ArgumentError: There is none.
        """
        if name == BEST:
            return min(ways, key=lambda way: inf if way.fit is None or way.short else way.time)
        found = next((way for way in ways if way.name == name), None)
        if found is None or found.planner is None:
            unknown = NO_CHOICE if name in WAYS else "there is none" + did_you_mean(name, (BEST, *WAYS))
            raise ArgumentError(f"way {name!r}: {found.why if found else unknown}")
        return found

    @cached_property
    def _rates(self) -> dict[Device, Rates]:
        return rates_of(self._devices, commonest(self._planner), self._declared)

    def _planned(self, name: str) -> Way:
        try:
            planner = self._planner if name == LAYERS else self._other(name)
            fit = planner.best()
            costs = planner.costs(fit.placement, self._rates if self.are_several else {})
        except Error as error:
            if name == LAYERS or isinstance(error, AllocationError):
                raise
            return Way(name, why=str(error))
        return Way(name, planner, fit, costs, planner.lacks(fit.table))

    def _other(self, name: str) -> Planner:
        """Return a planner of any way but the first.

        Raises:
            ArgumentError: There is none.
        """
        if not self.are_several:
            raise ArgumentError(NO_CHOICE)
        if name == FASTEST:
            return self._fastest()
        return self._shared() if name == SHARED else self._rows()

    def _over(self, names: Sequence[str], **wishes: object) -> Planner:
        asked = replace(self._planner.wishes, **wishes)  # type: ignore[arg-type]
        return self._planner.over(self._resources, names, asked)

    def _fastest(self) -> Planner:
        def read(name: str) -> float:
            return sum(self._rates[s.device].read for s in self._planner.backends[name].streams)

        order = sorted(self._planner.order, key=read, reverse=True)
        if order == self._planner.order:
            raise ArgumentError("the devices are named in this order")
        return self._over(list(self._planner.backends), order=tuple(order))

    def _cards(self) -> dict[str, Device]:
        """Devices with memory of their own, by name."""
        backends = self._planner.backends
        return {
            name: backends[name].device for name in self._planner.order if not self._is_host(backends[name])
        }

    @staticmethod
    def _is_host(backend: Backend) -> bool:
        return all(stream.default_buffer_type.is_host for stream in backend.streams)

    def _shared(self) -> Planner:
        cards, names = list(self._cards()), list(self._planner.backends)
        if any(len(self._planner.backends[name].streams) > 1 for name in names):
            raise ArgumentError("devices share layers already")
        host = self._planner.host
        members = cards if len(cards) > 1 or host is None else [*cards, host]
        return self._over(["+".join(members), *(name for name in names if name not in cards)])

    def _rows(self) -> Planner:
        cards = self._cards()
        first, device = next(iter(cards.items()))
        alike = [name for name, card in cards.items() if card.reg is device.reg]
        free = {name: self._planner.free.get(name, inf) for name in alike}
        shares = dict.fromkeys(alike, 1.0) if inf in free.values() else free
        memory = split_rows(device, shares)
        if len(alike) < 2:
            raise ArgumentError(f"rows go over several devices of {device.reg.name}; there is {first} alone")
        n_layer = self._planner.config.n_layer

        names = list(self._planner.backends)

        def with_layers(n: int, output: str) -> Planner:
            """The last `n` layers, and the output on a device."""
            layers = range(n_layer - n, n_layer)
            pattern = self._matrices(layers, output == first)
            overrides = {**(self._planner.wishes.override_tensors or {}), pattern: memory}
            places = {first: [*layers, *([OUTPUT] if output == first else [])]}
            places.setdefault(names[-1], []).extend([] if output == first else [OUTPUT])
            return self._over(names, layers_on=places, override_tensors=overrides)

        whole = with_layers(n_layer, first)
        if whole.best_fits():
            return whole
        for output in (first, names[-1]):
            n = _most(lambda n: with_layers(n, output).best_fits(), n_layer)  # noqa: B023 - called at once
            if n:
                return with_layers(n, output)
        return whole

    def _matrices(self, layers: Sequence[int], has_output: bool) -> str:
        """A regular expression of the matrices of some layers, and of the output's."""
        layout = self._planner.layout
        sources = {name: s for i in layers for name, s in layout.layers[i].items()}
        sources |= layout.output if has_output else {}
        found = (name for name, s in sources.items() if s.is_multiplied and not is_expert(name))
        return f"^({'|'.join(map(re.escape, found))})$"


def _most(fits: Callable[[int], bool], n: int) -> int:
    """Return the most that fits, 0 to `n`, where all that is less fits, too."""
    return bisect_left(range(1, n + 1), True, key=lambda i: not fits(i))


def planner_in(resources: ExitStack, planner: Planner, way: str) -> Planner:
    """Return a planner of a way, over devices that `resources` closes; errors as `Ways.planner_of`."""
    with ExitStack() as others:
        found = Ways(others, planner).planner_of(way)
    return planner if found is planner else planner.over(resources, list(found.backends), found.wishes)


def commonest(planner: Planner) -> tuple[DType, tuple[int, int]]:
    """Return the type and shape of the matrices that a token reads most bytes of; large ones are cut."""
    layout, read = planner.layout, Counter[tuple[DType, tuple[int, int]]]()
    for part in (*layout.layers, layout.output):
        for source in part.values():
            if source.is_multiplied:
                weight = planner.file.weight(source.names[0], source.shape)
                n_out, n_in = source.shape[-2:]
                row = weight.dtype.row_size(n_in)
                read[weight.dtype, (min(n_out, max(1, N_WEIGHTS // row)), n_in)] += n_out * row
    return max(read, key=read.__getitem__)
