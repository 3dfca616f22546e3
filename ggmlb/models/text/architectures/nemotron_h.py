"""Nemotron-H and Nemotron Nano 2, dense."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import Block, FeedForward, Layer, Mamba2, Residual, attentions
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("nemotron_h")
def nemotron_h(keys: Keys) -> TextConfig:
    """Read a model: a layer is a feed-forward part, attention without positions, or has states."""
    n_head_kv = keys.counts("attention.head_count_kv", least=0)
    attention = attentions(keys, RopeType.NEOX, [n or 1 for n in n_head_kv], rope=None)
    sizes, mamba = keys.counts("feed_forward_length", least=0), Mamba2.read(keys)
    blocks: list[Block] = [
        FeedForward(n_ff, "relu_sqr") if n_ff else a if n_kv else mamba
        for a, n_kv, n_ff in zip(attention, n_head_kv, sizes, strict=True)
    ]
    return TextConfig.read(keys, [Layer((Residual("attn_norm", block),)) for block in blocks])
