"""Planner: chooses the device of each part of a language model, so that all of them fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ggmlb import Backend, DType, planned_memory
from ggmlb.core.errors import AllocationError, ArgumentError, ModelError
from ggmlb.interface.memory_table import HOST, MemoryTable, Space, device_of
from ggmlb.models.devices import device_names, open_device, resolved_overrides
from ggmlb.models.gguf import GgufFile
from ggmlb.models.layers import EMBEDDINGS, OUTPUT, Layers, assign_layers
from ggmlb.models.text.adapter import AdapterFile, FactorSource
from ggmlb.models.text.changes import Changes
from ggmlb.models.text.cost import Cost
from ggmlb.models.text.decoder import N_BATCH
from ggmlb.models.text.layout import ModelLayout
from ggmlb.models.text.loaded_model import LoadedModel
from ggmlb.models.text.memory import SequenceMemory
from ggmlb.models.text.placement import (
    CACHE_NAMES,
    KV_NAMES,
    STATE_NAMES,
    Placement,
    ResolvedPlacement,
    is_expert,
)
from ggmlb.models.text.shards import Shards
from ggmlb.models.text.state_cache import n_slots
from ggmlb.models.weights import Source, Weights
from ggmlb.runtime.alloc import override_for

if TYPE_CHECKING:
    from os import PathLike

    from ggmlb import Device
    from ggmlb.models.rates import Rates
    from ggmlb.models.text.blocks import Attention

MOST_CTX = 1 << 26
"""Largest context size [tokens]: more than models are trained for."""

N_CTX = 4096
"""Largest default context size [tokens]; the model's own if that is smaller."""

KV_NBYTES, KV_SHARE = 1 << 28, 8
"""Largest KV cache by default: this many bytes, or this many times the bytes of the weights."""

MARGIN = 1 << 30
"""Most bytes of a device's free memory reserved for its runtime and other programs."""

N_TRIALS = 12
"""Most placements that are tried until one fits."""


@dataclass(frozen=True)
class ContextParams:
    """Sizes of a model's context and batches.

    Attributes:
        n_ctx: Context size, of all sequences together [tokens].
        kv_type: Type of the KV cache.
        n_ubatch: Tokens per step of a pipeline; 0: no pipeline.
        expert_cache: Memory of the cache of experts [bytes]; `None`: no cache.
        adapters: LoRA adapters to leave room for.
    """

    n_ctx: int
    kv_type: DType = DType.F16
    n_ubatch: int = 0
    expert_cache: int | None = None
    adapters: tuple[Path, ...] = ()


class Fit(NamedTuple):
    """A placement, and the memory that it takes on each device."""

    placement: ResolvedPlacement
    table: MemoryTable


class Planner:
    """Plans the placement of a model from metadata alone, without reading weights.

    Devices are filled in the order of their priority, from the last layer to the first, and the last device
    takes the rest. The experts of a layer leave a device before whole layers do: a token reads few of them,
    so that they cost the least time per byte. The KV cache stays with its layers. The output goes to the
    device that leaves most weights on the first devices: that of the last layer, or a later one where the
    output would displace layers.

    Args:
        layout: The model's sizes and weights.
        backends: A stream on each device, by name; highest priority first.
        params: Sizes of the context and batches.
        requested: The placement that the user asked for.
        order: Devices in the order in which they are filled, if not that of their priority.

    Attributes:
        layout, backends, params, requested: As given.
        file, config: Those of the layout.
        free: Bytes that the model may take, by device; `HOST` for host memory.
        asked: The placement as requested, with all layers on the first device if `is_open`.
        order: One device for each memory, in the order in which they are filled.

    Raises:
        ArgumentError: The request names a device that is not the model's, or a layer that it lacks.
        RegistryError: Layers are requested on a device that is not the model's.
    """

    def __init__(
        self,
        layout: ModelLayout,
        backends: Mapping[str, Backend],
        params: ContextParams,
        requested: Placement,
        order: Sequence[str] = (),
    ) -> None:
        self.layout, self.backends = layout, backends
        self.file, self.config = layout.file, layout.config
        self.params, self.requested = params, requested
        self._devices = {  # several for a meta device
            name: tuple(dict.fromkeys(device_of(s.default_buffer_type) for s in b.streams))
            for name, b in backends.items()
        }
        first: dict[tuple[str, ...], str] = {}
        for name, devices in self._devices.items():
            first.setdefault(devices, name)
        named = {name: i for i, name in enumerate(order)}
        self.order = sorted(first.values(), key=lambda name: named.get(name, len(named)))
        self._layers = range(self.config.n_layer)
        self._limited: set[str] = set()
        self.free = self._free()
        self.asked = self._asked()

    # -- the request ---------------------------------------------------------------------------

    def _free(self) -> dict[str, float]:
        free: dict[str, float] = {}
        for stream in (stream for backend in self.backends.values() for stream in backend.streams):
            available, total = stream.device.memory
            margin = min(MARGIN, total // 32)
            free.setdefault(device_of(stream.default_buffer_type), available - margin if total else inf)
        for name, limit in (self.requested.limits or {}).items():
            devices = (name,) if name in free else self._devices.get(name, ())
            if len(devices) != 1:
                raise ArgumentError(f"limits: {name!r} is none of the devices; they are {', '.join(free)}")
            free[devices[0]] = limit
            self._limited.add(devices[0])
        return free

    def _asked(self) -> ResolvedPlacement:
        """Return the placement as requested, with all layers on the first device if none are given."""
        names, n_layer = list(self.backends), self.config.n_layer
        layers = _by_device(self.requested.layers, n_layer, names)
        homes = assign_layers(layers, names, n_layer, (EMBEDDINGS, OUTPUT))
        if layers is None:
            homes |= dict.fromkeys((*self._layers, OUTPUT), self.order[0])
        overrides = resolved_overrides(self.requested.overrides, self.backends)
        weights = [*self.layout.names()]
        kv = [f"{name}.{i}" for name in KV_NAMES for i in self._layers]
        for pattern, where in overrides.items():
            if any(override_for(name, {pattern: where}) for name in weights):
                continue
            if not any(override_for(name, {pattern: where}) for name in kv):
                raise ArgumentError(
                    f"the override {pattern!r} matches no tensor; see the names by ggmlb show"
                )
            if not isinstance(where, str):
                raise ArgumentError(
                    f"the override {pattern!r} moves the KV cache to {where.name}; give one of the devices "
                    f"{', '.join(names)}: other memory is for weights"
                )
        return ResolvedPlacement(homes, {}, overrides)

    @property
    def host(self) -> str | None:
        """The first device that computes in host memory."""
        return next((name for name, devices in self._devices.items() if devices == (HOST,)), None)

    @property
    def is_open(self) -> bool:
        """Whether the planner chooses the layers' devices: no request, and device memory or limits exist."""
        is_requested = self.requested.layers is not None and not isinstance(self.requested.layers, str)
        return not is_requested and bool(self.requested.limits or set(self.free) - {HOST})

    # -- plans ---------------------------------------------------------------------------------

    def forecast(
        self, placement: ResolvedPlacement, adapters: Iterable[tuple[FactorSource, bool]] | None = None
    ) -> MemoryTable:
        """Predict a placement's bytes on each device, after `adapters` are loaded or closed in this order.

        Args:
            placement: The device of each part.
            adapters: Adapters in the order in which they were loaded (True) or closed (False); by default
                those of `params` are loaded.
        """
        if adapters is None:
            adapters = [(AdapterFile(path), True) for path in self.params.adapters]
        with self._planned(placement) as model:
            for source, is_loaded in adapters:
                if is_loaded:
                    model.load_adapter(source)
                else:
                    next(a for a in model.changes.adapters if a.source is source).close()
            return model.table

    def costs(
        self, placement: ResolvedPlacement, rates: Mapping[Device, Rates] = MappingProxyType({})
    ) -> dict[str, Cost]:
        """Return the cost of one token on each device: bytes, nodes; given `rates` of all devices, time."""
        with self._planned(placement) as model:
            return dict(zip(self.backends, model.decoder.costs(rates), strict=True))

    @contextmanager
    def _planned(self, placement: ResolvedPlacement) -> Iterator[LoadedModel]:
        """Context manager that yields the model in planned memory."""
        with planned_memory():
            changes = Changes(self.config.n_layer, self.config.n_embd)
            model = LoadedModel(self.layout, self.backends, placement, self.params, changes)
            try:
                yield model
            finally:
                model.free()

    def with_params(self, **changes: object) -> Planner:
        """Return a planner with other `ContextParams`, such as another `n_ctx` or `kv_type`."""
        params = replace(self.params, **changes)  # type: ignore[arg-type]
        return Planner(self.layout, self.backends, params, self.requested, self.order)

    def over(
        self, resources: ExitStack, names: Sequence[str], requested: Placement, order: Sequence[str] = ()
    ) -> Planner:
        """Return a planner of this model over other devices, `names`; `resources` (exit stack) closes them.

        Args:
            resources: Closes the devices.
            names: The devices, highest priority first.
            requested: The requested placement.
            order: Devices in the order in which they are filled, if not that of their priority.

        Raises:
            ArgumentError: Different devices share layers with experts; or as `Planner`.
            RegistryError: No device has one of the names.
        """
        return _planner_over(resources, self.layout, names, self.params, requested, order)

    def lacks(self, table: MemoryTable, is_strict: bool = True) -> dict[str, int]:
        """Return the bytes that each device lacks for `table` (memory needed); `is_strict`: host memory too.

        Args:
            table: The memory of a placement.
            is_strict: Whether to count host memory without a limit, although the system can reclaim the
                pages of mapped files.
        """
        counted = set(self.free) - {HOST} | self._limited
        devices = set(self.free) if is_strict else counted
        short = {device: table.total(device) - self.free[device] for device in self.free if device in devices}
        return {device: int(n) for device, n in short.items() if n > 0}

    def largest_context(self) -> int:
        """Return the largest context size that fits: a multiple of 256 tokens.

        At most that of the model's training, or the requested one if that is larger.
        """
        most = max(self.config.n_ctx_train, self.params.n_ctx) // 256
        low = 0
        while low < most:
            n = (low + most + 1) // 2
            low, most = (n, most) if self.with_params(n_ctx=256 * n).best_fits() else (low, n - 1)
        return 256 * low

    def most_gpu_layers(self) -> int | None:
        """Return the largest number of GPU layers (`Placement.layers`) that fits; `None` if none fits."""
        for n in range(self.config.n_layer, -1, -1):
            requested = replace(self.requested, layers=n)
            if Planner(self.layout, self.backends, self.params, requested, self.order).best_fits():
                return n
        return None

    def best_fits(self) -> bool:
        """Whether the placement of `best` fits into the memory of its devices."""
        return not self.lacks(self.best().table)

    def best(self) -> Fit:
        """Return the requested placement; if layers are left open (`is_open`), the one that fits best."""
        return self.fit() if self.is_open else Fit(self.asked, self.forecast(self.asked))

    def choose(self) -> ResolvedPlacement:
        """Return the requested placement; if layers are left open (`is_open`), one that fits.

        Raises:
            AllocationError: A device lacks room.
        """
        if not self.is_open and not self.requested.limits:
            return self.asked
        found = self.best()
        short = self.lacks(found.table, is_strict=False)
        if short:
            needs = ", ".join(
                f"{device} needs {found.table.total(device):,} bytes and has {int(self.free[device]):,}"
                for device in short
            )
            raise AllocationError(
                f"{self.file.path} does not fit: {needs}; `ggmlb fit` shows options with which it would",
                asked=found.table.total(next(iter(short))),
                free=int(self.free[next(iter(short))]),
            )
        return found.placement

    def fit(self) -> Fit:
        """Return a placement that fits; if none is found, the one that lacks the fewest bytes.

        Each trial is planned to the byte, with the graphs that it computes. If it does not fit, the next
        trial assumes the same memory for everything but layers (compute, output, embeddings). A placement
        that fits then grows by single layers, or by the experts of one. This is done with the output on each
        device in turn.
        """
        best = Fit(self.asked, self.forecast(self.asked))
        if not self.lacks(best.table):
            return best
        sizes = self._sizes()
        return max((self._fit(sizes, output) for output in self.order), key=self._worth)

    def _fit(self, sizes: _Sizes, output: str) -> Fit:
        """Return the placement that fits best with the output on a device."""
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
        """The room for layers on each device."""
        return {name: min(self.free[d] - beside[d] for d in self._devices[name]) for name in self.order}

    def _trial(self, placement: ResolvedPlacement, tried: set[Hashable]) -> Fit | None:
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
        """Sort key of placements: fewest missing bytes, then most bytes on the first devices."""
        weights = (
            sum(fit.table.total(device, "weights") for device in self._devices[name]) for name in self.order
        )
        return (-sum(self.lacks(fit.table).values()), *weights)

    def _sizes(self) -> _Sizes:
        """Return the size of each layer on each device."""
        found = _Sizes({}, {}, self._devices)
        with planned_memory():
            for name, backend in self.backends.items():
                known: dict[tuple[object, ...], int] = {}
                of_memory: dict[object, int] = {}
                for i, layer in enumerate(self.layout.layers):
                    for is_of_experts, sizes in ((False, found.base), (True, found.experts)):
                        sources = {
                            n: s
                            for n, s in layer.items()
                            if is_expert(n) == is_of_experts
                            and not isinstance(override_for(n, self.asked.overrides), str)
                        }
                        key = self._key(sources)
                        if key not in known:
                            known[key] = self._weight(sources, backend)
                        sizes[i, name] = known[key]
                    for names, attention, states in (
                        (CACHE_NAMES, self.config.attentions[i], ()),
                        (STATE_NAMES, None, tuple(self.config.states[i].items())),
                    ):
                        if self.asked.kv_override(i, names) is None:
                            key = attention, states
                            if key not in of_memory:
                                of_memory[key] = self._memory_size(attention, states, backend)
                            found.base[i, name] += of_memory[key]
        return found

    def _key(self, sources: Mapping[str, Source]) -> tuple[object, ...]:
        """All that the size of these weights depends on."""
        overrides = self.asked.overrides
        names = tuple(sources) if overrides else ()
        weights = (self.file.weight(n, s.shape) for s in sources.values() for n in s.names)
        return (*names, *((w.dtype, w.shape, w.offset % 64) for w in weights))

    def _weight(self, sources: Mapping[str, Source], backend: Backend) -> int:
        weights = Weights(self.file, None, self.asked.buffer_types)
        weights.place(sources, backend)
        try:
            return _most(weights.spaces, backend)
        finally:
            weights.free()

    def _memory_size(
        self, attention: Attention | None, states: Sequence[tuple[str, int]], backend: Backend
    ) -> int:
        """The size of a layer's KV cache, or recurrent states [bytes]."""
        params = self.params
        with ExitStack() as resources:
            memory = SequenceMemory(
                [attention],
                [dict(states)],
                [backend],
                [backend],
                params.n_ctx,
                params.kv_type,
                n_slots(self.config.states),
            )
            resources.callback(memory.free)
            inner = [each for buffer in memory.buffers for each in buffer.allocations]
            return _most([(each.buft, each.size) for each in inner], backend)

    def _fill(self, sizes: _Sizes, left: Mapping[str, float], output: str) -> ResolvedPlacement:
        """Fill devices in their order, given the room that each has for layers."""
        homes = self._spread(sizes, left, with_experts=True)
        experts: dict[int, str] = {}
        first, last, host = self.order[0], self.order[-1], self.host
        is_left_over = len(self.order) > 1 and last in homes.values()
        if self.config.experts is not None and host is not None and is_left_over and first != host:
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
                size = sizes.base[i, name] + (sizes.experts[i, name] if with_experts else 0)
                if size <= left[name] or at == len(self.order) - 1:
                    break
                at += 1
            left[name] -= size
            homes[i] = name
        return homes


def _most(spaces: Iterable[Space], backend: Backend) -> int:
    """The largest number of bytes on one device of a stream."""
    found = {device_of(stream.default_buffer_type): 0 for stream in backend.streams}
    for buft, nbytes in spaces:
        if device_of(buft) in found:
            found[device_of(buft)] += nbytes
    return max(found.values())


def open_planner(
    resources: ExitStack,
    path: str | PathLike[str],
    requested: Placement,
    n_ctx: int | None = None,
    kv_type: DType | str = DType.F16,
    n_ubatch: int | None = None,
    adapters: Sequence[Path] = (),
) -> Planner:
    """Open a model's file and the requested devices to plan a placement; `resources` closes the devices.

    Raises:
        Error: As `TextModel`.
    """
    layout = ModelLayout(GgufFile(path))
    file, config = layout.file, layout.config
    named = requested.layers if isinstance(requested.layers, Mapping) else ()
    names = device_names(requested.devices, list(named))
    n = min(config.n_ctx_train, N_CTX) if n_ctx is None else n_ctx
    if not 1 <= n <= MOST_CTX:
        raise ArgumentError(f"n_ctx is {n}; give 1 to {MOST_CTX:,}")
    kv = DType.parse(kv_type)
    n_kv = n * sum(sum(a.memory.values()) for a in config.attentions if a)
    kv_nbytes = n_kv * kv.type_size // kv.block_size
    if n_ctx is None and kv_nbytes > max(KV_NBYTES, KV_SHARE * file.nbytes):
        raise ModelError(
            f"{file.path}: the KV cache of {n:,} tokens takes {kv_nbytes:,} bytes, many more than "
            f"the weights, {file.nbytes:,}; give the context size (n_ctx, --ctx)"
        )
    if n_ubatch is not None and not 1 <= n_ubatch <= N_BATCH:
        raise ArgumentError(f"n_ubatch is {n_ubatch}; give 1 to {N_BATCH}")
    params = ContextParams(n, kv, n_ubatch or 0, requested.expert_cache, tuple(adapters))
    return _planner_over(resources, layout, names, params, requested)


def _planner_over(
    resources: ExitStack,
    layout: ModelLayout,
    names: Sequence[str],
    params: ContextParams,
    requested: Placement,
    order: Sequence[str] = (),
) -> Planner:
    """Open devices, which `resources` closes, and return a planner over them; errors as `Planner.over`."""
    shards = Shards(layout)
    backends = {name: resources.enter_context(open_device(name, shards)) for name in names}
    for name, backend in backends.items() if layout.config.experts else ():
        if len({(s.device.reg.name, s.device.description) for s in backend.streams}) > 1:
            raise ArgumentError(
                f"{name}: different devices cannot share layers with experts, as their rounding may choose "
                "different experts; give whole layers to each, as -d A,B"
            )
    return Planner(layout, backends, params, requested, order)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of each layer on each device.

    Attributes:
        base: All weights but experts, and the KV cache, by layer and device name.
        experts: Experts, by layer and device name.
        devices: The devices of which each name has memory; several for a meta device.
    """

    base: dict[tuple[int, str], int]
    experts: dict[tuple[int, str], int]
    devices: Mapping[str, tuple[str, ...]]

    def by_name(self, placement: ResolvedPlacement) -> dict[str, int]:
        """Return the bytes of the layers of a placement by the names of their homes."""
        found: dict[str, int] = defaultdict(int)
        for i, home in placement.homes.items():
            if isinstance(i, int):
                where = placement.experts.get(i, home)
                found[home] += self.base[i, home]
                found[where] += self.experts[i, where]
        return found

    def by_device(self, placement: ResolvedPlacement) -> dict[str, int]:
        """Return the bytes of the layers of a placement on each device."""
        found: dict[str, int] = defaultdict(int)
        for name, nbytes in self.by_name(placement).items():
            for device in self.devices[name]:
                found[device] += nbytes
        return found


def _by_device(
    layers: int | str | Mapping[str, Layers] | None, n_layer: int, names: Sequence[str]
) -> Mapping[str, Layers] | None:
    """Return the requested layers of each device; `None` where the planner chooses."""
    if layers is None or isinstance(layers, str):
        return None
    if isinstance(layers, Mapping):
        return layers
    if layers < 0:
        raise ArgumentError(
            f"layers is {layers}; give how many of the last layers to put on the first device, 0 or more, "
            'or a mapping such as {"CUDA0": "0-9"}'
        )
    if len(names) == 1:
        return None
    first = max(0, n_layer - int(layers))
    return {names[0]: range(first, n_layer), names[1]: range(first)}
