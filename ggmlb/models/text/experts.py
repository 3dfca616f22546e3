"""ExpertCache: the most used experts in device memory, all experts in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, BufferUsage, Context, DType, Tensor
from ggmlb.core.errors import ArgumentError
from ggmlb.models.devices import alloc_zeros

if TYPE_CHECKING:
    from ggmlb.models.text.config import TextConfig

KINDS: Final = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
"""Tensors of a layer that hold a matrix for each expert."""

ON_HOST: Final = r"ffn_(gate|up|down)_exps\.weight"
"""Regular expression of the weights that stay in host memory."""

HALF_LIFE: Final = 256
"""Steps after which an earlier use of an expert counts half as much."""


class Slots:
    """Slots in one layer's device tensors; each holds one cached expert.

    Attributes:
        cached: In the device's memory, in the order of `KINDS`: `[n, m, n_slots]`.
        expert: The expert in each slot; -1 for none.
        slot: The slot of each expert; -1 for none.
        uses: Decayed number of uses of each expert.
    """

    def __init__(self, whole: Sequence[Tensor], cached: Sequence[Tensor]) -> None:
        n_experts, n_slots = whole[0].ne[2], cached[0].ne[2]
        self.cached = cached
        self.expert = np.full(n_slots, -1, np.int32)
        self.slot = np.full(n_experts, -1, np.int32)
        self.uses = np.zeros(n_experts, np.float32)
        self._whole = whole

    def load(self, experts: npt.NDArray[np.int32]) -> int:
        """Copy into slots those of the distinct `experts` that no slot holds; return the number copied."""
        self.uses *= 0.5 ** (1 / HALF_LIFE)
        self.uses[experts] += 1
        missing = experts[self.slot[experts] < 0]
        if not missing.size:
            return 0
        worth = np.where(self.expert < 0, -1, self.uses[self.expert])
        worth[self.slot[experts[self.slot[experts] >= 0]]] = np.inf  # keep those needed now
        for expert, slot in zip(missing.tolist(), np.argsort(worth, kind="stable").tolist(), strict=False):
            evicted = self.expert[slot]
            if evicted >= 0:
                self.slot[evicted] = -1
            self.expert[slot] = -1  # until all of it is there
            for whole, cached in zip(self._whole, self.cached, strict=True):
                size = whole.nb[2]
                cached.set(whole.get(expert * size, size), slot * size)
            self.expert[slot], self.slot[expert] = expert, slot
        return missing.size


class ExpertCache:
    """Caches the most used experts on the devices of their layers; all experts stay in host memory.

    A step of few tokens computes from the cache: the chosen ids are read between two splits, missing experts
    are copied over the least used ones, and the ids become slot numbers. A step whose tokens may choose more
    experts than there are slots does not use the cache, nor do layers on devices that compute in host memory.

    Args:
        config: The model's sizes.
        weights: The model's weights; those of experts in host memory.
        homes: A stream for each layer, on its device.
        nbytes: Memory limit over all devices [bytes].

    Attributes:
        n_slots: Experts of each layer that are cached.
        buffers: The cache's memory.
        nbytes: Its size [bytes].
        n_hits: Uses of cached experts.
        n_misses: Uses of experts that had to be copied.

    Raises:
        ArgumentError: The model has no experts, or no layer on a device with separate memory; or the limit
            is too small for those that one token uses.
        AllocationError: A device lacks room.
    """

    def __init__(
        self, config: TextConfig, weights: Mapping[str, Tensor], homes: Sequence[Backend], nbytes: int
    ) -> None:
        if config.experts is None:
            raise ArgumentError(f"expert_cache: {config.name} has no experts")
        self._experts = config.experts
        apart = {
            i: home
            for i, home in enumerate(homes)
            if not home.default_buffer_type.is_host and f"blk.{i}.{KINDS[0]}" in weights
        }
        if not apart:
            raise ArgumentError(
                "expert_cache: no layer is on a GPU; choose a device with separate memory for layers"
            )
        whole = {layer: [weights[f"blk.{layer}.{kind}"] for kind in KINDS] for layer in apart}
        each = sum(tensor.nb[2] for tensors in whole.values() for tensor in tensors)
        self.n_slots = min(nbytes // each, config.experts.n)
        if self.n_slots < config.experts.n_used:
            raise ArgumentError(
                f"expert_cache is {nbytes:,} bytes; one expert of each layer takes {each:,}, and a token "
                f"uses {config.experts.n_used}: give {each * config.experts.n_used:,} or more"
            )
        self.nbytes = self.n_slots * each
        self.n_hits = self.n_misses = 0
        contexts: dict[int, tuple[Context, Backend]] = {}
        self._layers: dict[int, Slots] = {}
        for layer, home in apart.items():
            ctx, _ = contexts.setdefault(id(home), (Context(), home))
            cached = [
                ctx.new_tensor(t.dtype, (*t.ne[:2], self.n_slots), f"{t.name} (cached)") for t in whole[layer]
            ]
            self._layers[layer] = Slots(whole[layer], cached)
        self.buffers = alloc_zeros(contexts.values(), BufferUsage.WEIGHTS)

    def serves(self, layer: int, n_tokens: int) -> bool:
        """Whether a layer's cache slots suffice for all experts that `n_tokens` tokens may choose."""
        return layer in self._layers and min(n_tokens * self._experts.n_used, self._experts.n) <= self.n_slots

    def choose(self, ctx: Context, layer: int, chosen: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the chosen experts' slot numbers (i32), and the cached gate, up and down matrices."""
        slots = self._layers[layer]
        return ctx.custom_4d(DType.I32, *chosen.ne, [chosen], self._load, 1, slots), slots.cached

    def _load(
        self, dst: npt.NDArray[Any], ids: Sequence[npt.NDArray[Any]], ith: int, nth: int, slots: Slots
    ) -> None:
        """Compute slots from ids on the CPU, after all earlier work of the layer's device."""
        experts = np.unique(ids[0])
        missed = slots.load(experts)
        self.n_misses += missed
        self.n_hits += experts.size - missed
        dst[...] = slots.slot[ids[0]]

    def __repr__(self) -> str:
        share = self.n_hits / max(self.n_hits + self.n_misses, 1)
        return (
            f"<ExpertCache of {self.n_slots} of {self._experts.n} experts a layer, {self.nbytes:,} bytes: "
            f"{share:.0%} hits>"
        )

    def free(self) -> None:
        """Free the cache's memory."""
        for buffer in self.buffers:
            buffer.free()
