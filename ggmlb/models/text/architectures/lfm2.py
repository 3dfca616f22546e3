"""LFM2 and LFM2.5, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterable

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import (
    Block,
    ShortConv,
    attention_or,
    decoder_layers,
    experts,
    feed_forwards,
    leading_dense,
    routing,
)
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("lfm2")
def lfm2(keys: Keys) -> TextConfig:
    """Read a model: layers without KV heads have a short convolution instead of attention."""
    if n := keys.count("decision.block_count", 0, 0):
        raise keys.error("decision.block_count", f"it is {n}; models that score are not supported")
    return _hybrid(keys, feed_forwards(keys), keys.count("attention.sliding_window", 0, 0, 1 << 30))


@register_architecture("lfm2moe")
def lfm2moe(keys: Keys) -> TextConfig:
    """Read a model with experts in all but the first layers."""
    router = {**routing(keys), "weighting": "normalised share", "has_choice_bias": True}
    return _hybrid(keys, leading_dense(keys, experts(keys, **router)))


def _hybrid(keys: Keys, parts: Iterable[Block], window: int = 0) -> TextConfig:
    conv = ShortConv(keys.count("shortconv.l_cache", least=2), keys.n_embd)
    mixers = attention_or(keys, RopeType.NEOX, conv, norms="head", window=window)
    return TextConfig.read(keys, decoder_layers(mixers, parts), output_norm="token_embd_norm")
