"""Shards: how a language model is split over a meta device (tensor parallelism)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ggmlb import SplitAxis, SplitState, Tensor, split_evenly

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
        c, file = layout.config, layout.file
        queries = c.n_head // c.n_head_kv
        q, k, v = queries * c.n_key, c.n_key, c.n_value
        # For each tensor, the split axis, and the elements of each segment per KV head.
        self._heads: dict[str, tuple[int, tuple[int, ...]]] = {
            "attn_q.weight": (1, (q,)), "attn_q.bias": (0, (q,)),
            "attn_k.weight": (1, (k,)), "attn_k.bias": (0, (k,)), "cache_k": (0, (k,)),
            "attn_v.weight": (1, (v,)), "attn_v.bias": (0, (v,)), "cache_v": (0, (v,)),
            "attn_qkv.weight": (1, (q, k, v)), "attn_qkv.bias": (0, (q, k, v)),
            "attn_output.weight": (0, (queries * v,)),
        }  # fmt: skip
        fused = 1 if "blk.0.ffn_gate.weight" in file or c.experts else 2
        # For each tensor, the split axis, and the number of segments.
        self._slices: dict[str, tuple[int, int]] = {
            "ffn_gate.weight": (1, 1), "ffn_gate.bias": (0, 1), "ffn_up.weight": (1, fused),
            "ffn_up.bias": (0, fused), "ffn_down.weight": (0, 1), "ffn_gate_exps.weight": (1, 1),
            "ffn_up_exps.weight": (1, 1), "ffn_down_exps.weight": (0, 1),
        }  # fmt: skip
        sources = {name: s for layer in layout.layers for name, s in layer.items()}
        blocks = {"attn_output": 1, "ffn_down": 1}
        for name, source in sources.items():
            for part in blocks:
                if name.partition(f".{part}")[2] in (".weight", "_exps.weight"):
                    size = file.weight(source.names[0], source.shape).dtype.block_size
                    blocks[part] = max(blocks[part], size)
        self._block = blocks["ffn_down"]
        self._n_heads = c.n_head_kv
        self._unit = next(n for n in range(1, 257) if n * queries * v % blocks["attn_output"] == 0)

    def __call__(self, tensor: Tensor, n_devices: int) -> SplitState:
        """Return the split state of a weight or KV cache tensor."""
        part = re.sub(r"^blk\.\d+\.|\.\d+$", "", tensor.name)
        axis, segments = 1, tuple([tensor.ne[1]])
        if part in self._heads:
            axis, sizes = self._heads[part]
            if self._n_heads % self._unit or self._n_heads < n_devices * self._unit:
                return MIRRORED
            heads = split_evenly(self._n_heads, n_devices, self._unit)
            return SplitState(axis, tuple(tuple(n * size for n in heads) for size in sizes))
        if part in self._slices:
            axis, n_segments = self._slices[part]
            segments = (tensor.ne[axis] // n_segments,) * n_segments
            unit = self._block
        elif part == "output.weight":
            unit = 1
        else:
            return MIRRORED
        if segments[0] % unit or segments[0] < n_devices * unit:
            return MIRRORED
        return SplitState(axis, tuple(split_evenly(n, n_devices, unit) for n in segments))
