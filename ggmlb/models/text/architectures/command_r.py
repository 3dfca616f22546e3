"""Command R, Command R7B and Command A."""

from __future__ import annotations

from collections.abc import Iterable

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import Attention, Layer, Parallel, Residual, attentions, feed_forwards, windowed
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

N_LAYER_PLUS = 64
"""Layers from which on queries and keys have norms (Command R+)."""


@register_architecture("command-r")
def command_r(keys: Keys) -> TextConfig:
    """Read a model: attention and feed-forward part have the same input, and norms subtract the mean."""
    norms = "heads" if keys.n_layer >= N_LAYER_PLUS else None
    return _parallel(keys, attentions(keys, RopeType.NORMAL, norms=norms), keys.real("logit_scale", 0.0))


@register_architecture("cohere2")
def cohere2(keys: Keys) -> TextConfig:
    """Read a model: three of four layers have a window, and only these have RoPE."""
    attention = windowed(keys, attentions(keys, RopeType.NORMAL), 4, None, only_local_rope=True)
    return _parallel(keys, attention, keys.real("logit_scale"))


def _parallel(keys: Keys, attention: Iterable[Attention], logit_scale: float) -> TextConfig:
    both = (Parallel(pair) for pair in zip(attention, feed_forwards(keys), strict=True))
    layers = [Layer((Residual("attn_norm", block),)) for block in both]
    return TextConfig.read(keys, layers, "layer", logit_scale=logit_scale or 1.0)
