"""EXAONE 4."""

from __future__ import annotations

from dataclasses import replace

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, feed_forwards, post_norm, sliding_windows
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

N_LAYER_WINDOWED = 64
"""Layers of the variant in which three of four have a window, and only these have RoPE."""


@register_architecture("exaone4")
def exaone4(keys: Keys) -> TextConfig:
    """Read a model, whose norms are after the blocks."""
    layers = attentions(keys, RopeType.NEOX, norms="head")
    if keys.n_layer == N_LAYER_WINDOWED:
        windows = sliding_windows(keys, 4, 4096)
        layers = [
            a.windowed(window) if window else replace(a, rope=None)
            for a, window in zip(layers, windows, strict=True)
        ]
    return TextConfig.read(keys, map(post_norm, layers, feed_forwards(keys)))
