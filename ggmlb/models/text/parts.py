"""Parts: what of a language model lies in memory, placed on devices, or planned without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ggmlb import Backend, BufferType, DType, Tensor, planned_memory
from ggmlb.core.errors import AllocationError, ArgumentError
from ggmlb.interface.memory_table import MemoryTable
from ggmlb.models.layers import EMBEDDINGS, OUTPUT
from ggmlb.models.text.adapter import Adapter, FactorSource
from ggmlb.models.text.changes import Changes
from ggmlb.models.text.decoder import BaseDecoder, Decoder
from ggmlb.models.text.experts import ON_HOST, ExpertCache
from ggmlb.models.text.memory import KvMemory, Memory
from ggmlb.models.text.recurrent import RecurrentDecoder
from ggmlb.models.text.states import StateMemory
from ggmlb.models.weights import Source, Weights

if TYPE_CHECKING:
    from ggmlb.models.text.layout import ModelLayout


@dataclass(frozen=True)
class ModelPlacement:
    """Where the parts of a model lie.

    Attributes:
        homes: The device of each layer, of the `"embeddings"`, and of the `"output"`.
        experts: The device of a layer's experts, if it is another than the layer's.
        kv_on: The device of all keys and values; `None`: each layer's.
        overrides: Other memory for some weights, by regular expression.
    """

    homes: Mapping[int | str, str]
    experts: Mapping[int, str] = field(default_factory=dict)
    kv_on: str | None = None
    overrides: Mapping[str, BufferType] = field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """How much a model keeps, and computes at once.

    Attributes:
        n_ctx: Tokens that are kept.
        kv_type: Type of keys and values.
        n_ubatch: Tokens of a prompt's parts in a pipeline; 0: none.
        expert_cache: Memory for the experts used most [bytes]; `None`: none.
    """

    n_ctx: int
    kv_type: DType = DType.F16
    n_ubatch: int = 0
    expert_cache: int | None = None


class Parts:
    """What of a model lies in memory: weights, what is kept of earlier tokens, and what graphs need.

    Within `planned_memory`, it has sizes, and no memory.

    Args:
        layout: The model's sizes and weights.
        backends: A stream on each device, by name; highest priority first.
        placement: Where everything lies.
        room: How much is kept.
        changes: What is added to hidden states.

    Attributes:
        weights: The weights' memory.
        tensors: The weights, by the names of the file.
        memory: What is kept of earlier tokens.
        decoder: Computes batches.
        experts: The cache of experts; `None` where there is none.
        changes: As given.
        adapter_events: The sources of adapters that were loaded (True) or closed (False), in order.

    Raises:
        ArgumentError, AllocationError, ModelError: As `TextModel`.
    """

    def __init__(
        self,
        layout: ModelLayout,
        backends: Mapping[str, Backend],
        placement: ModelPlacement,
        room: Room,
        changes: Changes,
    ) -> None:
        config = layout.config
        overrides = dict(placement.overrides)
        if room.expert_cache is not None:
            overrides.setdefault(ON_HOST, _host_memory(backends))
        streams = tuple(backends.values())
        homes = [backends[placement.homes[i]] for i in range(config.n_layer)]
        kv_home = None if placement.kv_on is None else backends[placement.kv_on]
        kv_homes = homes if kv_home is None else [kv_home] * config.n_layer
        self.changes = changes
        self.adapter_events: list[tuple[FactorSource, bool]] = []
        self._name = config.name
        self._homes = {
            name: (source, backends[device])
            for device in backends
            for name, source in sources_on(device, layout, placement).items()
            if source.is_matrix
        }
        self.experts: ExpertCache | None = None
        self.memory: Memory
        self.decoder: BaseDecoder[Any]
        with ExitStack() as resources:
            self.weights = Weights(layout.file, None, overrides)
            resources.callback(self.weights.free)
            self.tensors = weights = dict[str, Tensor]()
            for name, backend in backends.items():
                weights |= self.weights.place(sources_on(name, layout, placement), backend)
            if room.expert_cache is not None:
                self.experts = ExpertCache(config, weights, homes, room.expert_cache)
                resources.callback(self.experts.free)
            if config.state is not None:
                with _no_room_for(room.n_ctx):
                    self.memory = states = StateMemory(config.state, kv_homes, room.n_ctx)
                self.decoder = RecurrentDecoder(config, weights, states, streams, changes, room.n_ubatch)
            else:
                with _no_room_for(room.n_ctx):
                    self.memory = cells = KvMemory(config, kv_homes, room.n_ctx, room.kv_type)
                self.decoder = Decoder(
                    config, weights, cells, streams, changes, room.n_ubatch, self.experts, kv_home
                )
            resources.callback(self.memory.free)
            resources.callback(self.decoder.free)
            self.decoder.reserve()
            self._resources = resources.pop_all()

    @property
    def table(self) -> MemoryTable:
        """The bytes that everything takes now."""
        adapters = [space for adapter in self.changes.adapters for space in adapter.spaces]
        buffers = {"kv": self.memory.buffers, "compute": self.decoder.buffers}
        if self.experts is not None:
            buffers["experts"] = self.experts.buffers
        spaces = {
            kind: [(inner.buft, inner.size) for buffer in found for inner in buffer.allocations]
            for kind, found in buffers.items()
        }
        return MemoryTable({"weights": self.weights.spaces, "adapters": adapters, **spaces})

    def load_adapter(self, source: FactorSource, scale: float = 1.0) -> Adapter:
        """Load an adapter, and reserve the memory of graphs with all that are loaded.

        Raises:
            Error: As `TextModel.load_adapter`; it is not loaded then.
        """
        with self.changes.lock:
            adapter = Adapter(source, self._name, self._homes, scale, self._forget)
            self.changes.adapters.append(adapter)
            self.adapter_events.append((source, True))
            try:
                with self.changes.with_all_adapters():
                    self.decoder.reserve()
            except BaseException:
                adapter.close()
                raise
        self._resources.callback(adapter.close)
        return adapter

    def _forget(self, adapter: Adapter) -> None:
        with self.changes.lock:
            if adapter in self.changes.adapters:
                self.changes.adapters.remove(adapter)
                self.adapter_events.append((adapter.source, False))

    def free(self) -> None:
        """Free the memory."""
        self._resources.close()


def sources_on(device: str, layout: ModelLayout, placement: ModelPlacement) -> dict[str, Source]:
    """Return the weights that lie on a device."""
    sources: dict[str, Source] = {}
    homes = placement.homes
    for layer, found in enumerate(layout.layers):
        of_experts = placement.experts.get(layer, homes[layer])
        sources |= {
            name: source
            for name, source in found.items()
            if (of_experts if is_expert(name) else homes[layer]) == device
        }
    if homes[EMBEDDINGS] == device:
        sources |= layout.embeddings | layout.factors
    if homes[OUTPUT] == device:
        sources |= layout.output
    return sources


def is_expert(name: str) -> bool:
    """Whether a weight holds a matrix for each expert of a layer."""
    return name.endswith("_exps.weight")


@contextmanager
def planned_parts(
    layout: ModelLayout, backends: Mapping[str, Backend], placement: ModelPlacement, room: Room
) -> Iterator[Parts]:
    """Context manager that yields a model's parts in planned memory; arguments and errors as `Parts`."""
    with planned_memory():
        changes = Changes(layout.config.n_layer, layout.config.n_embd)
        parts = Parts(layout, backends, placement, room, changes)
        try:
            yield parts
        finally:
            parts.free()


def _host_memory(backends: Mapping[str, Backend]) -> BufferType:
    """The memory of the last device that computes in host memory."""
    for backend in reversed(list(backends.values())):
        if backend.default_buffer_type.is_host:
            return backend.default_buffer_type
    raise ArgumentError(
        f"expert_cache: none of {', '.join(backends)} computes in host memory, where experts stay; add CPU"
    )


@contextmanager
def _no_room_for(n_ctx: int) -> Iterator[None]:
    """Name the context size in errors of its memory."""
    try:
        yield
    except MemoryError as error:
        facts = {name: getattr(error, name, 0) for name in ("asked", "free", "total")}
        raise AllocationError(f"no room for n_ctx of {n_ctx:,} tokens; give less: {error}", **facts) from None
