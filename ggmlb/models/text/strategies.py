"""Parallel strategies: how several devices share a language model, with predicted time and memory."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from ggmlb import Backend, Device, DType
from ggmlb.core.errors import AllocationError, ArgumentError, Error, did_you_mean
from ggmlb.models.devices import split_rows
from ggmlb.models.layers import OUTPUT
from ggmlb.models.rates import N_WEIGHTS, Rates, rates_of
from ggmlb.models.text.cost import Cost
from ggmlb.models.text.placement import is_expert
from ggmlb.models.text.planner import Fit, Planner

LAYER, FASTEST, TENSOR, ROW = "layer", "fastest", "tensor", "row"
STRATEGIES: Mapping[str, str] = {
    LAYER: "whole layers on each device, filled in the order in which the devices are named",
    FASTEST: "whole layers, the fastest device filled first",
    TENSOR: "each layer on several devices (`A+B`, tensor parallelism)",
    ROW: "rows of the matrices on several devices, the rest of a layer on one (`A_Split`)",
}
"""The strategies by name, the first two of which are llama.cpp's `--split-mode layer`."""

BEST = "best"
"""The strategy with the least predicted time of a token among those that fit."""

NO_CHOICE = "the layers of each device are given, or there is only one memory"


@dataclass(frozen=True)
class ParallelStrategy:
    """A parallel strategy for a model: placement, cost of a token, and lacking memory.

    Attributes:
        name: A key of `STRATEGIES`.
        planner: Plans over its devices; `None` where the strategy is not possible.
        fit: Its placement and memory.
        costs: The cost of a token on each device.
        short: Bytes by which it exceeds the memory of devices.
        why: Why the strategy is not possible.
    """

    name: str
    planner: Planner | None = None
    fit: Fit | None = None
    costs: Mapping[str, Cost] = field(default_factory=dict)
    short: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def time(self) -> float:
        """The predicted time of a token [s], even if the strategy does not fit into memory; 0 if unknown."""
        return sum(cost.seconds for cost in self.costs.values())


class StrategyPlanner:
    """Plans the parallel strategies of a model over some devices.

    Args:
        resources: Exit stack that closes the devices.
        planner: Plans the model over the devices that were named.
        declared: Bandwidths of devices by name, in place of measured ones [bytes/s].

    Raises:
        ArgumentError: A bandwidth is declared for a device that is not the model's.
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
    def has_choice(self) -> bool:
        """Whether there are strategies to choose from: several memories, and no layers requested."""
        return len(self._planner.free) > 1 and self._planner.is_open

    def planned(self) -> list[ParallelStrategy]:
        """Plan and return all strategies; without a choice (`has_choice`) only `layer` (whole layers).

        Raises:
            AllocationError: A device lacks room to measure it.
        """
        return [self._planned(name) for name in (STRATEGIES if self.has_choice else (LAYER,))]

    def planner_of(self, name: str) -> Planner:
        """Return the planner of the strategy `name`; `best` is the one with the least predicted time.

        Raises:
            ArgumentError: The strategy is unknown or not possible.
            AllocationError: A device lacks room to measure it.
        """
        if name == LAYER or (name == BEST and not self.has_choice):
            return self._planner
        planned = (
            self.planned() if name == BEST else [self._planned(each) for each in STRATEGIES if each == name]
        )
        found = self.taken(name, planned)
        assert found.planner is not None
        return found.planner

    @staticmethod
    def taken(name: str, planned: Sequence[ParallelStrategy]) -> ParallelStrategy:
        """Return the strategy `name` of `planned`; `best` is the fastest that fits, or the first if none fit.

        Raises:
            ArgumentError: The strategy is unknown or not possible.
        """
        if name == BEST:
            return min(planned, key=lambda each: inf if each.fit is None or each.short else each.time)
        found = next((each for each in planned if each.name == name), None)
        if found is None or found.planner is None:
            known = (BEST, *STRATEGIES)
            why = found.why if found else NO_CHOICE
            says = why if name in known else f"there is none of this name{did_you_mean(name, known)}"
            raise ArgumentError(f"split mode {name!r}: {says}")
        return found

    @cached_property
    def _rates(self) -> dict[Device, Rates]:
        return rates_of(self._devices, most_read_matrix(self._planner), self._declared)

    def _planned(self, name: str) -> ParallelStrategy:
        try:
            planner = self._planner if name == LAYER else self._other(name)
            fit = planner.best()
            costs = planner.costs(fit.placement, self._rates if self.has_choice else {})
        except Error as error:
            if name == LAYER or isinstance(error, AllocationError):
                raise
            return ParallelStrategy(name, why=str(error))
        return ParallelStrategy(name, planner, fit, costs, planner.lacks(fit.table))

    def _other(self, name: str) -> Planner:
        """Return a planner of any strategy but the first.

        Raises:
            ArgumentError: It is not possible.
        """
        if not self.has_choice:
            raise ArgumentError(NO_CHOICE)
        if name == FASTEST:
            return self._fastest()
        return self._tensor() if name == TENSOR else self._row()

    def _over(self, names: Sequence[str], order: Sequence[str] = (), **changes: Any) -> Planner:
        requested = replace(self._planner.requested, **changes)
        return self._planner.over(self._resources, names, requested, order)

    def _fastest(self) -> Planner:
        def read(name: str) -> float:
            return sum(self._rates[s.device].read for s in self._planner.backends[name].streams)

        order = sorted(self._planner.order, key=read, reverse=True)
        if order == self._planner.order:
            raise ArgumentError("the devices are already in order of speed")
        return self._over(list(self._planner.backends), order)

    def _cards(self) -> dict[str, Device]:
        """Devices with separate memory, by name."""
        backends = self._planner.backends
        return {
            name: backends[name].device for name in self._planner.order if not self._is_host(backends[name])
        }

    @staticmethod
    def _is_host(backend: Backend) -> bool:
        return all(stream.default_buffer_type.is_host for stream in backend.streams)

    def _tensor(self) -> Planner:
        cards, names = list(self._cards()), list(self._planner.backends)
        if any(len(self._planner.backends[name].streams) > 1 for name in names):
            raise ArgumentError("the request already joins devices with +")
        host = self._planner.host
        members = cards if len(cards) > 1 or host is None else [*cards, host]
        return self._over(["+".join(members), *(name for name in names if name not in cards)])

    def _row(self) -> Planner:
        cards = self._cards()
        first, device = next(iter(cards.items()))
        alike = [name for name, card in cards.items() if card.reg is device.reg]
        free = {name: self._planner.free.get(name, inf) for name in alike}
        shares = dict.fromkeys(alike, 1.0) if inf in free.values() else free
        memory = split_rows(device, shares)
        if len(alike) < 2:
            raise ArgumentError(f"rows need several {device.reg.name} devices; there is only {first}")
        n_layer = self._planner.config.n_layer

        names = list(self._planner.backends)

        def with_layers(n: int, output: str) -> Planner:
            """The last `n` layers, and the output on a device."""
            layers = range(n_layer - n, n_layer)
            pattern = self._matrices(layers, output == first)
            overrides = {**(self._planner.requested.overrides or {}), pattern: memory}
            places = {first: [*layers, *([OUTPUT] if output == first else [])]}
            places.setdefault(names[-1], []).extend([] if output == first else [OUTPUT])
            return self._over(names, layers=places, overrides=overrides)

        whole = with_layers(n_layer, first)
        if whole.best_fits():
            return whole
        for output in (first, names[-1]):
            n = _most(lambda n: with_layers(n, output).best_fits(), n_layer)  # noqa: B023 - called at once
            if n:
                return with_layers(n, output)
        return whole

    def _matrices(self, layers: Sequence[int], has_output: bool) -> str:
        """Regular expression of the matrices of these layers, and of the output."""
        layout = self._planner.layout
        sources = {name: s for i in layers for name, s in layout.layers[i].items()}
        sources |= layout.output if has_output else {}
        found = (name for name, s in sources.items() if s.is_multiplied and not is_expert(name))
        return f"^({'|'.join(map(re.escape, found))})$"


def _most(fits: Callable[[int], bool], n: int) -> int:
    """Return the largest number from 0 to `n` that fits; all smaller ones must fit too."""
    return bisect_left(range(1, n + 1), True, key=lambda i: not fits(i))


def with_strategy(resources: ExitStack, planner: Planner) -> Planner:
    """Return a planner for the strategy that `planner` requests; `resources` closes its devices.

    Raises:
        Error: As `StrategyPlanner.planner_of`.
    """
    name = planner.requested.layers
    if not isinstance(name, str):
        return planner
    with ExitStack() as others:
        found = StrategyPlanner(others, planner).planner_of(name)
    if found is planner:
        return planner
    return planner.over(resources, list(found.backends), found.requested, found.order)


def most_read_matrix(planner: Planner) -> tuple[DType, tuple[int, int]]:
    """Return type and shape (cut if large) of the matrices with the most bytes read per token in total."""
    layout, read = planner.layout, Counter[tuple[DType, tuple[int, int]]]()
    for part in (*layout.layers, layout.output):
        for source in part.values():
            if source.is_multiplied:
                weight = planner.file.weight(source.names[0], source.shape)
                n_out, n_in = source.shape[-2:]
                row = weight.dtype.row_size(n_in)
                read[weight.dtype, (min(n_out, max(1, N_WEIGHTS // row)), n_in)] += n_out * row
    return max(read, key=read.__getitem__)
