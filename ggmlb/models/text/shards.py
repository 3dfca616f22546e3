"""Shards: how a language model is split over a meta device (tensor parallelism)."""

from __future__ import annotations

from collections import defaultdict
from math import lcm
from typing import TYPE_CHECKING

from ggmlb import SplitAxis, SplitState, Tensor, split_evenly
from ggmlb.models.text.blocks import Slices

if TYPE_CHECKING:
    from ggmlb.models.text.layout import ModelLayout

MIRRORED = SplitState(SplitAxis.MIRRORED)


class Shards:
    """Split states (how a meta device's devices share each tensor) of a model's weights and KV cache.

    Each device has whole heads, with their part of the KV cache, and a slice of the feed-forward part and of
    the vocabulary. A layer therefore needs two sums over the devices: after the last products of attention
    and of the feed-forward part. Tensors that cannot be split are mirrored: fewer heads than devices,
    blocks of weights that span heads, recurrent states.

    Args:
        layout: The model's sizes and weights.
    """

    def __init__(self, layout: ModelLayout) -> None:
        config, file = layout.config, layout.file
        vocabulary = Slices(1, (1,), config.n_vocab, "vocabulary")
        self._slices: dict[str, tuple[Slices, int]] = {"output.weight": (vocabulary, 1)}
        for i, layer in enumerate(config.layers):
            units: dict[str, int] = defaultdict(lambda: 1)  # the fewest parts whose rows are whole blocks
            found: dict[str, Slices] = {}
            for weight in layer.weights(config.n_embd):
                name = f"blk.{i}.{weight.name}"
                if weight.slices is None or name not in layout.layers[i]:
                    continue
                found[name] = weight.slices
                axis, (size, *_), _, group = weight.slices
                if axis == 0 and weight.kind == "product":
                    block = file.weight(name, weight.shape).dtype.block_size
                    units[group] = lcm(units[group], lcm(size, block) // size)
            attention = config.attentions[i]
            for kind, n in attention.memory.items() if attention else ():
                slices = attention.slices(0, n // attention.n_head_kv) if attention else None
                found |= {f"{kind}.{i}": slices} if slices else {}
            self._slices |= {name: (slices, units[slices.group]) for name, slices in found.items()}

    def __call__(self, tensor: Tensor, n_devices: int) -> SplitState:
        """Return the split state of a weight or KV cache tensor."""
        if tensor.name not in self._slices:
            return MIRRORED
        (axis, sizes, n, _), unit = self._slices[tensor.name]
        if n % unit or n < n_devices * unit:
            return MIRRORED
        parts = split_evenly(n, n_devices, unit)
        return SplitState(axis, tuple(tuple(part * size for part in parts) for size in sizes))
