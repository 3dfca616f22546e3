"""Planner: chooses where the parts of a language model lie, so that each device has room for its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ggmlb import Backend, BufferType, DType, planned_memory
from ggmlb.core.errors import AllocationError, ArgumentError, ModelError
from ggmlb.interface.memory_table import HOST, MemoryTable, Space, device_of
from ggmlb.models.devices import device_names, memory_overrides, open_device
from ggmlb.models.gguf import GgufFile
from ggmlb.models.layers import EMBEDDINGS, OUTPUT, Layers, assign_layers
from ggmlb.models.text.adapter import AdapterFile, FactorSource
from ggmlb.models.text.cost import Cost
from ggmlb.models.text.decoder import N_BATCH
from ggmlb.models.text.layout import ModelLayout
from ggmlb.models.text.memory import KvMemory
from ggmlb.models.text.parts import ModelPlacement, Parts, Room, is_expert, planned_parts
from ggmlb.models.text.shards import Shards
from ggmlb.models.text.states import StateMemory
from ggmlb.models.weights import Source, Weights

if TYPE_CHECKING:
    from os import PathLike

    from ggmlb import Device
    from ggmlb.models.rates import Rates

MOST_CTX = 1 << 26
"""Most tokens that can be asked for: more than models are trained for."""

N_CTX = 4096
"""Tokens that the memory of keys and values holds by default, if the model was trained for so many."""

KV_NBYTES, KV_SHARE = 1 << 28, 8
"""Largest KV cache by default: this many bytes, or this many times the bytes of the weights."""

MARGIN = 1 << 30
"""Most bytes of a device's free memory that are left to its runtime and to others."""

N_TRIALS = 12
"""Most placements that are planned until one fits."""


@dataclass(frozen=True)
class Wishes:
    """Where the user wants the parts of a model; see `TextModel`.

    Attributes:
        layers_on: Layers by device.
        gpu_layers: In place of `layers_on`: so many of the last layers on the first device.
        cpu_experts: Whether experts are on the processor; or those of so many of the first layers.
        kv_on: The device of all keys and values.
        override_tensors: Other memory for some weights, by regular expression.
        limits: Most bytes on a device.
        fits: Whether what is not said is chosen so that all devices have room.
        order: Devices in the order in which they are filled, if not that of their priority.
        adapters: LoRA adapters for which there is to be room.
    """

    layers_on: Mapping[str, Layers] | None = None
    gpu_layers: int | None = None
    cpu_experts: bool | int = False
    kv_on: str | None = None
    override_tensors: Mapping[str, str | BufferType] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    fits: bool = True
    order: tuple[str, ...] = ()
    adapters: tuple[Path, ...] = ()

    @property
    def are_of_layers(self) -> bool:
        """Whether they say where layers lie."""
        return self.layers_on is not None or self.gpu_layers is not None


class Fit(NamedTuple):
    """A placement, and the bytes that it takes."""

    placement: ModelPlacement
    table: MemoryTable


class Planner:
    """Plans where the parts of a model lie: by metadata alone, without reading weights.

    Devices are filled in the order of their priority, from the last layer to the first, and the last one
    takes the rest. Of a layer with experts, those leave a device first: a token reads few of them, so that
    they cost least time by byte. Keys and values stay with their layers, as they cost what weights do. The
    output lies where most weights are on the first devices: with the last layer, or where it would take the
    room of more layers, on a later device.

    Args:
        layout: The model's sizes and weights.
        backends: A stream on each device, by name; highest priority first.
        room: How much is kept.
        wishes: What the user wants.

    Attributes:
        layout, backends, room, wishes: As given.
        file, config: Those of the layout.
        free: Bytes that the model may take, by device; `HOST` for the machine's own memory.
        asked: The placement as asked for, with all layers on the first device where nothing is said.
        order: One device for each memory, in the order in which they are filled.

    Raises:
        ArgumentError: A wish contradicts another, or names no device of the model.
        RegistryError: Layers are wanted on a device that is none of the model's.
    """

    def __init__(
        self,
        layout: ModelLayout,
        backends: Mapping[str, Backend],
        room: Room,
        wishes: Wishes,
    ) -> None:
        self.layout, self.backends = layout, backends
        self.file, self.config = layout.file, layout.config
        self.room = room
        self.wishes = wishes
        self._devices = {  # several for a meta device
            name: tuple(dict.fromkeys(device_of(s.default_buffer_type) for s in b.streams))
            for name, b in backends.items()
        }
        first: dict[tuple[str, ...], str] = {}
        for name, devices in self._devices.items():
            first.setdefault(devices, name)
        named = {name: i for i, name in enumerate(wishes.order)}
        self.order = sorted(first.values(), key=lambda name: named.get(name, len(named)))
        self._layers = range(self.config.n_layer)
        self._limited: set[str] = set()
        self.free = self._free()
        self.asked = self._asked()

    # -- wishes --------------------------------------------------------------------------------

    def _free(self) -> dict[str, float]:
        free: dict[str, float] = {}
        for stream in (stream for backend in self.backends.values() for stream in backend.streams):
            available, total = stream.device.memory
            margin = min(MARGIN, total // 32)
            free.setdefault(device_of(stream.default_buffer_type), available - margin if total else inf)
        for name, limit in self.wishes.limits.items():
            devices = (name,) if name in free else self._devices.get(name, ())
            if len(devices) != 1:
                raise ArgumentError(
                    f"memory_limits: {name!r} is none of the devices; they are {', '.join(free)}"
                )
            free[devices[0]] = limit
            self._limited.add(devices[0])
        return free

    def _asked(self) -> ModelPlacement:
        """The placement as it is asked for, with all layers on the first device where nothing is said."""
        wishes, names, n_layer = self.wishes, list(self.backends), self.config.n_layer
        layers_on = _layers_on(n_layer, names, wishes.layers_on, wishes.gpu_layers)
        homes = assign_layers(layers_on, names, n_layer, (EMBEDDINGS, OUTPUT))
        if layers_on is None:
            homes |= dict.fromkeys((*self._layers, OUTPUT), self.order[0])
        if wishes.kv_on is not None and wishes.kv_on not in names:
            raise ArgumentError(f"kv_on: {wishes.kv_on!r} is no device of the model: {', '.join(names)}")
        experts = {}
        if wishes.cpu_experts is not False:
            n = n_layer if wishes.cpu_experts is True else wishes.cpu_experts
            if self.config.experts is None:
                raise ArgumentError(f"cpu_experts: {self.config.name} has no experts")
            if n < 0:
                raise ArgumentError(f"cpu_experts is {n}; give True, or 0 or more layers")
            host = self.host
            if host is None:
                raise ArgumentError(f"cpu_experts: none of {', '.join(names)} is a processor; add CPU")
            experts = dict.fromkeys(range(min(n, n_layer)), host)
        overrides = memory_overrides(wishes.override_tensors, self.backends)
        return ModelPlacement(homes, experts, wishes.kv_on, overrides)

    @property
    def host(self) -> str | None:
        """The first device that computes in the machine's memory."""
        return next((name for name, devices in self._devices.items() if devices == (HOST,)), None)

    @property
    def is_open(self) -> bool:
        """Whether layers may be placed anywhere, and there is a choice or a limit."""
        wishes = self.wishes
        return wishes.fits and not wishes.are_of_layers and bool(wishes.limits or set(self.free) - {HOST})

    # -- plans ---------------------------------------------------------------------------------

    def forecast(
        self, placement: ModelPlacement, adapters: Iterable[tuple[FactorSource, bool]] | None = None
    ) -> MemoryTable:
        """Return the bytes that a placement takes.

        Args:
            placement: Where everything lies.
            adapters: Those that were loaded (True) or closed (False), in order; by default, those wished for
                are loaded.
        """
        if adapters is None:
            adapters = [(AdapterFile(path), True) for path in self.wishes.adapters]
        with self._planned(placement) as parts:
            for source, is_loaded in adapters:
                if is_loaded:
                    parts.load_adapter(source)
                else:
                    next(a for a in parts.changes.adapters if a.source is source).close()
            return parts.table

    def costs(
        self, placement: ModelPlacement, rates: Mapping[Device, Rates] = MappingProxyType({})
    ) -> dict[str, Cost]:
        """Return what one token costs each device, with times if the rates of all devices are given."""
        with self._planned(placement) as parts:
            return dict(zip(self.backends, parts.decoder.costs(rates), strict=True))

    def _planned(self, placement: ModelPlacement) -> AbstractContextManager[Parts]:
        return planned_parts(self.layout, self.backends, placement, self.room)

    def with_room(self, **changes: object) -> Planner:
        """Return a planner for another context length or type of keys and values."""
        room = replace(self.room, **changes)  # type: ignore[arg-type]
        return Planner(self.layout, self.backends, room, self.wishes)

    def over(self, resources: ExitStack, names: Sequence[str], wishes: Wishes) -> Planner:
        """Return a planner of the same model over other devices, which `resources` closes.

        Raises:
            ArgumentError: Devices that differ share layers with experts; or as `Planner`.
            RegistryError: No device has one of the names.
        """
        return planner_over(resources, self.layout, names, self.room, wishes)

    def lacks(self, table: MemoryTable, is_strict: bool = True) -> dict[str, int]:
        """Return the bytes that devices lack.

        Args:
            table: What a placement takes.
            is_strict: Whether to count the machine's own memory, of which files that are mapped can be given
                back, where no limit is posed for it.
        """
        counted = set(self.free) - {HOST} | self._limited
        devices = set(self.free) if is_strict else counted
        short = {device: table.total(device) - self.free[device] for device in self.free if device in devices}
        return {device: int(n) for device, n in short.items() if n > 0}

    def largest_context(self) -> int:
        """Return the most tokens that fit: a multiple of 256, up to what the model was trained for.

        Or up to as many as were asked for, if these are more.
        """
        most = max(self.config.n_ctx_train, self.room.n_ctx) // 256
        low = 0
        while low < most:
            n = (low + most + 1) // 2
            low, most = (n, most) if self.with_room(n_ctx=256 * n).best_fits() else (low, n - 1)
        return 256 * low

    def most_gpu_layers(self) -> int | None:
        """Return how many of the last layers fit the first device, with the rest on the second; `None`: none.

        What else is wished for stays.
        """
        for n in range(self.config.n_layer, -1, -1):
            wishes = replace(self.wishes, gpu_layers=n, layers_on=None)
            other = Planner(self.layout, self.backends, self.room, wishes)
            if other.best_fits():
                return n
        return None

    def best_fits(self) -> bool:
        """Whether the placement that is asked for fits, or any where nothing is said."""
        return not self.lacks(self.best().table)

    def best(self) -> Fit:
        """Return the placement as asked, or where nothing is said the one that fits best."""
        return self.fit() if self.is_open else Fit(self.asked, self.forecast(self.asked))

    def choose(self) -> ModelPlacement:
        """Return the placement as asked, or where nothing is said the one that fits.

        Raises:
            AllocationError: A device lacks room.
        """
        if not self.is_open and not self.wishes.limits:
            return self.asked
        found = self.best()
        short = self.lacks(found.table, is_strict=False)
        if short:
            told = ", ".join(
                f"{device} needs {found.table.total(device):,} bytes and has {int(self.free[device]):,}"
                for device in short
            )
            raise AllocationError(
                f"{self.file.path} does not fit: {told}; `ggmlb fit` tells what would",
                asked=found.table.total(next(iter(short))),
                free=int(self.free[next(iter(short))]),
            )
        return found.placement

    def fit(self) -> Fit:
        """Return the placement that fits; if none does, the one that lacks least, as far as is known.

        Each trial is planned to the byte, with the graphs that it computes. Where it does not fit, what is
        not of layers (compute, output, embeddings) is taken to need as much in the next trial. What fits
        then grows by single layers, or the experts of one. All of that is done with the output on each
        device.
        """
        best = Fit(self.asked, self.forecast(self.asked))
        if not self.lacks(best.table):
            return best
        sizes = self._sizes()
        return max((self._fit(sizes, output) for output in self.order), key=self._worth)

    def _fit(self, sizes: _Sizes, output: str) -> Fit:
        """Return what fits best with the output on a device."""
        tried: set[Hashable] = set()
        homes = {**self.asked.homes, OUTPUT: output}
        best = found = self._trial(replace(self.asked, homes=homes), tried)
        assert best is not None
        beside: dict[str, float] = dict.fromkeys(self.free, 0)
        while found is not None and self.lacks(found.table) and len(tried) < N_TRIALS:
            of_layers = sizes.by_device(found.placement)
            beside = {d: max(n, found.table.total(d) - of_layers[d]) for d, n in beside.items()}
            found = self._trial(self._fill(sizes, self._left(beside), output), tried)
            if found is not None and self._worth(found) > self._worth(best):
                best = found
        for name in self.order[:-1] if not self.lacks(best.table) else ():
            while (more := self._grown(best, name, sizes, output, tried)) is not None:
                best = more
        return best

    def _left(self, beside: Mapping[str, float]) -> dict[str, float]:
        """What each device has for layers."""
        return {name: min(self.free[d] - beside[d] for d in self._devices[name]) for name in self.order}

    def _trial(self, placement: ModelPlacement, tried: set[Hashable]) -> Fit | None:
        """Plan a placement, unless it was tried."""
        key = (*placement.homes.items(), *placement.experts.items())
        if key in tried:
            return None
        tried.add(key)
        return Fit(placement, self.forecast(placement))

    def _grown(self, fit: Fit, name: str, sizes: _Sizes, output: str, tried: set[Hashable]) -> Fit | None:
        """Return a placement that fits with one part more on a device; `None` if there is none."""
        used = sizes.by_name(fit.placement)
        left: dict[str, float] = {n: used[n] for n in self.order}
        steps = {sizes.base[i, name] + n * sizes.experts[i, name] for i in self._layers for n in (0, 1)}
        steps |= {sizes.experts[i, name] for i in self._layers}
        for step in sorted(steps - {0}):
            more = self._trial(self._fill(sizes, left | {name: left[name] + step}, output), tried)
            if more is not None:
                fits = not self.lacks(more.table) and self._worth(more) > self._worth(fit)
                return more if fits else None
        return None

    def _worth(self, fit: Fit) -> tuple[int, ...]:
        """How little is lacking, then how much lies on the first devices."""
        weights = (
            sum(fit.table.total(device, "weights") for device in self._devices[name]) for name in self.order
        )
        return (-sum(self.lacks(fit.table).values()), *weights)

    def _sizes(self) -> _Sizes:
        """Plan each layer on each device."""
        found = _Sizes({}, {}, self._devices)
        with planned_memory():
            for name, backend in self.backends.items():
                known: dict[tuple[object, ...], int] = {}
                kept = self._kept(backend)
                for i, layer in enumerate(self.layout.layers):
                    for is_of_experts, sizes in ((False, found.base), (True, found.experts)):
                        sources = {n: s for n, s in layer.items() if is_expert(n) == is_of_experts}
                        key = self._key(sources)
                        if key not in known:
                            known[key] = self._weight(sources, backend)
                        sizes[i, name] = known[key]
                    found.base[i, name] += kept if self.wishes.kv_on is None else 0
        return found

    def _key(self, sources: Mapping[str, Source]) -> tuple[object, ...]:
        """What the size of some weights depends on."""
        overrides = self.asked.overrides
        names = tuple(sources) if overrides else ()
        weights = (self.file.weight(n, s.shape) for s in sources.values() for n in s.names)
        return (*names, *((w.dtype, w.shape, w.offset % 64) for w in weights))

    def _weight(self, sources: Mapping[str, Source], backend: Backend) -> int:
        weights = Weights(self.file, None, self.asked.overrides)
        weights.place(sources, backend)
        try:
            return _most(weights.spaces, backend)
        finally:
            weights.free()

    def _kept(self, backend: Backend) -> int:
        """What is kept of earlier tokens in a layer [bytes]."""
        config, room = self.config, self.room
        with ExitStack() as resources:
            memory: KvMemory | StateMemory
            if config.state is not None:
                memory = StateMemory(config.state, [backend], room.n_ctx)
            else:
                memory = KvMemory(config, [backend], room.n_ctx, room.kv_type)
            resources.callback(memory.free)
            inner = [each for buffer in memory.buffers for each in buffer.allocations]
            return _most([(each.buft, each.size) for each in inner], backend)

    def _fill(self, sizes: _Sizes, left: Mapping[str, float], output: str) -> ModelPlacement:
        """Fill devices in their order, given the room that each has for layers."""
        homes = self._spread(sizes, left, with_experts=True)
        experts = dict(self.asked.experts)
        first, last, host = self.order[0], self.order[-1], self.host
        is_left_over = len(self.order) > 1 and last in homes.values()
        if (
            self.config.experts is not None
            and host is not None
            and is_left_over
            and first != host
            and not experts
        ):
            homes = self._spread(sizes, left, with_experts=False)
            rest = dict(left)
            for i, home in homes.items():
                rest[home] -= sizes.base[i, home]
            for i, home in homes.items():
                if home != host and sizes.experts[i, home] <= rest[home]:
                    rest[home] -= sizes.experts[i, home]
                elif home != host:
                    experts[i] = host
        placed: dict[int | str, str] = {
            EMBEDDINGS: self.asked.homes[EMBEDDINGS],
            OUTPUT: output,
            **dict(sorted(homes.items())),
        }
        return replace(self.asked, homes=placed, experts=dict(sorted(experts.items())))

    def _spread(self, sizes: _Sizes, room: Mapping[str, float], with_experts: bool) -> dict[int, str]:
        """Return the device of each layer, from the last layer to the first."""
        left, homes, at = dict(room), {}, 0
        for i in reversed(self._layers):
            while True:
                name = self.order[at]
                counts_experts = with_experts and i not in self.asked.experts
                size = sizes.base[i, name] + (sizes.experts[i, name] if counts_experts else 0)
                if size <= left[name] or at == len(self.order) - 1:
                    break
                at += 1
            left[name] -= size
            homes[i] = name
        return homes


def _most(spaces: Iterable[Space], backend: Backend) -> int:
    """The bytes on that device of a stream which has most."""
    found = {device_of(stream.default_buffer_type): 0 for stream in backend.streams}
    for buft, nbytes in spaces:
        if device_of(buft) in found:
            found[device_of(buft)] += nbytes
    return max(found.values())


def open_planner(
    resources: ExitStack,
    path: str | PathLike[str],
    devices: Sequence[str] | None,
    wishes: Wishes,
    n_ctx: int | None = None,
    kv_type: DType | str = DType.F16,
    n_ubatch: int | None = None,
    expert_cache: int | None = None,
) -> Planner:
    """Open a model's file, and devices that `resources` closes, to plan and place it; see `TextModel`.

    Raises:
        Error: As `TextModel`.
    """
    layout = ModelLayout(GgufFile(path))
    file, config = layout.file, layout.config
    names = device_names(devices, list(wishes.layers_on or ()))
    n = min(config.n_ctx_train, N_CTX) if n_ctx is None else n_ctx
    if not 1 <= n <= MOST_CTX:
        raise ArgumentError(f"n_ctx is {n}; give 1 to {MOST_CTX:,}")
    kv = DType.parse(kv_type)
    n_kept = 0 if config.state else config.n_layer * config.n_head_kv * (config.n_key + config.n_value) * n
    kept = n_kept * kv.type_size // kv.block_size
    if n_ctx is None and kept > max(KV_NBYTES, KV_SHARE * file.nbytes):
        raise ModelError(
            f"{file.path}: the KV cache of {n:,} tokens takes {kept:,} bytes, the weights {file.nbytes:,}; "
            "if that is right, give the context size (n_ctx, --ctx)"
        )
    if n_ubatch is not None and not 1 <= n_ubatch <= N_BATCH:
        raise ArgumentError(f"n_ubatch is {n_ubatch}; give 1 to {N_BATCH}")
    room = Room(n, kv, n_ubatch or 0, expert_cache)
    return planner_over(resources, layout, names, room, wishes)


def planner_over(
    resources: ExitStack, layout: ModelLayout, names: Sequence[str], room: Room, wishes: Wishes
) -> Planner:
    """Open devices, which `resources` closes, and return a planner over them; errors as `Planner.over`."""
    shards = Shards(layout)
    backends = {name: resources.enter_context(open_device(name, shards)) for name in names}
    for name, backend in backends.items() if layout.config.experts else ():
        if len({(s.device.reg.name, s.device.description) for s in backend.streams}) > 1:
            raise ArgumentError(
                f"{name}: devices that differ cannot share layers with experts, as each chooses these by its "
                "own rounding; give whole layers to each, as -d A,B"
            )
    return Planner(layout, backends, room, wishes)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of each layer on each device.

    Attributes:
        base: Weights but experts, and what is kept of earlier tokens, by layer and name.
        experts: Experts, by layer and name.
        devices: The devices whose memory each name takes.
    """

    base: dict[tuple[int, str], int]
    experts: dict[tuple[int, str], int]
    devices: Mapping[str, tuple[str, ...]]

    def by_name(self, placement: ModelPlacement) -> dict[str, int]:
        """Return the bytes of the layers of a placement by the names of their homes."""
        found: dict[str, int] = defaultdict(int)
        for i, home in placement.homes.items():
            if isinstance(i, int):
                where = placement.experts.get(i, home)
                found[home] += self.base[i, home]
                found[where] += self.experts[i, where]
        return found

    def by_device(self, placement: ModelPlacement) -> dict[str, int]:
        """Return the bytes of the layers of a placement on each device."""
        found: dict[str, int] = defaultdict(int)
        for name, nbytes in self.by_name(placement).items():
            for device in self.devices[name]:
                found[device] += nbytes
        return found


def _layers_on(
    n_layer: int, names: Sequence[str], layers_on: Mapping[str, Layers] | None, gpu_layers: int | None
) -> Mapping[str, Layers] | None:
    """Which layers lie on which device, by either of two ways to ask."""
    if gpu_layers is None:
        return layers_on
    if layers_on is not None:
        raise ArgumentError("gpu_layers and layers_on were both given; give one of them")
    if gpu_layers < 0:
        raise ArgumentError(f"gpu_layers is {gpu_layers}; give 0 or more")
    if len(names) == 1:
        return None
    first = max(0, n_layer - gpu_layers)
    return {names[0]: range(first, n_layer), names[1]: range(first)}
