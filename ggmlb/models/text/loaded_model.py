"""LoadedModel: weights, KV cache and graphs of a language model, allocated or only planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ggmlb import Backend, Buffer, BufferType, Tensor
from ggmlb.core.errors import AllocationError, ArgumentError
from ggmlb.interface.memory_table import MemoryTable
from ggmlb.models.layers import EMBEDDINGS, OUTPUT
from ggmlb.models.text.adapter import Adapter, FactorSource
from ggmlb.models.text.changes import Changes
from ggmlb.models.text.decoder import Decoder
from ggmlb.models.text.experts import ON_HOST, ExpertCache
from ggmlb.models.text.memory import SequenceMemory
from ggmlb.models.text.placement import CACHE_NAMES, STATE_NAMES
from ggmlb.models.text.state_cache import n_slots
from ggmlb.models.weights import Source, Weights

if TYPE_CHECKING:
    from ggmlb.models.text.layout import ModelLayout
    from ggmlb.models.text.placement import ResolvedPlacement
    from ggmlb.models.text.planner import ContextParams


class LoadedModel:
    """A model on devices: weights, KV cache, compute memory, and the decoder that uses them.

    Within `planned_memory`, everything has a size, and no memory is allocated.

    Args:
        layout: The model's sizes and weights.
        backends: A stream on each device, by name; highest priority first.
        placement: The device of each part.
        params: Sizes of the context and batches.
        changes: Steering vectors and adapters.

    Attributes:
        weights: The memory of the weights.
        tensors: The weights, by the names of the file.
        memory: The KV cache, recurrent states, or both.
        decoder: Computes batches.
        experts: The cache of experts; `None` if there is none.
        changes: As given.
        adapter_events: The sources of adapters that were loaded (True) or closed (False), in order.

    Raises:
        ArgumentError, AllocationError, ModelError: As `TextModel`.
    """

    def __init__(
        self,
        layout: ModelLayout,
        backends: Mapping[str, Backend],
        placement: ResolvedPlacement,
        params: ContextParams,
        changes: Changes,
    ) -> None:
        config = layout.config
        overrides = placement.buffer_types
        if params.expert_cache is not None:
            overrides.setdefault(ON_HOST, _host_memory(backends))
        streams = tuple(backends.values())
        homes = [backends[placement.homes[i]] for i in range(config.n_layer)]
        kv_moved, states_moved = (
            {i: backends[on] for i in range(config.n_layer) if (on := placement.kv_override(i, names))}
            for names in (CACHE_NAMES, STATE_NAMES)
        )
        kv_homes, state_homes = (
            [moved.get(i, home) for i, home in enumerate(homes)] for moved in (kv_moved, states_moved)
        )
        self.changes = changes
        self.adapter_events: list[tuple[FactorSource, bool]] = []
        self._name = config.name
        self._homes = {
            name: (source, backends[device])
            for device in backends
            for name, source in sources_on(device, layout, placement).items()
            if source.is_multiplied or name == "token_embd.weight"
        }
        self.experts: ExpertCache | None = None
        with ExitStack() as resources:
            self.weights = Weights(layout.file, None, overrides)
            resources.callback(self.weights.free)
            self.tensors = weights = dict[str, Tensor]()
            for name, backend in backends.items():
                weights |= self.weights.place(sources_on(name, layout, placement), backend)
            if params.expert_cache is not None:
                self.experts = ExpertCache(config, weights, homes, params.expert_cache)
                resources.callback(self.experts.free)
            with _no_room_for(params.n_ctx):
                self.memory = SequenceMemory(
                    config.attentions,
                    config.states,
                    kv_homes,
                    state_homes,
                    params.n_ctx,
                    params.kv_type,
                    n_slots(config.states),
                )
            resources.callback(self.memory.free)
            self.decoder = Decoder(
                config, weights, self.memory, streams, changes, params.n_ubatch, self.experts, kv_moved
            )
            resources.callback(self.decoder.free)
            self.decoder.reserve()
            self._resources = resources.pop_all()

    @property
    def table(self) -> MemoryTable:
        """The memory of each device, by kind (weights, KV cache, compute)."""
        adapters = [space for adapter in self.changes.adapters for space in adapter.spaces]
        buffers: dict[str, Sequence[Buffer]] = {"kv": self.memory.buffers, "compute": self.decoder.buffers}
        if self.experts is not None:
            buffers["experts"] = self.experts.buffers
        spaces = {
            kind: [(inner.buft, inner.size) for buffer in found for inner in buffer.allocations]
            for kind, found in buffers.items()
        }
        return MemoryTable({"weights": self.weights.spaces, "adapters": adapters, **spaces})

    def load_adapter(self, source: FactorSource, scale: float = 1.0) -> Adapter:
        """Load the adapter `source` with strength `scale`; reserve compute memory for all loaded adapters.

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
        """Free weights, KV cache and compute memory."""
        self._resources.close()


def sources_on(device: str, layout: ModelLayout, placement: ResolvedPlacement) -> dict[str, Source]:
    """Return the sources (tensors of the file) of the weights that `placement` puts on a device."""
    parts: dict[int | str, Mapping[str, Source]] = dict(enumerate(layout.layers))
    parts |= {EMBEDDINGS: layout.embeddings | layout.factors, OUTPUT: layout.output}
    return {
        name: source
        for part, sources in parts.items()
        for name, source in sources.items()
        if placement.device_of(name, part) == device
    }


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
    """Context manager that names the context size in errors of its allocation."""
    try:
        yield
    except MemoryError as error:
        facts = {name: getattr(error, name, 0) for name in ("asked", "free", "total")}
        raise AllocationError(f"no room for n_ctx of {n_ctx:,} tokens; give less: {error}", **facts) from None
