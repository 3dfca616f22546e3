"""SmolLM3."""

from __future__ import annotations

from dataclasses import replace

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, feed_forwards, pre_norm
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("smollm3")
def smollm3(keys: Keys) -> TextConfig:
    """Read a model: every fourth layer has no RoPE."""
    layers = attentions(keys, RopeType.NORMAL)
    layers[3::4] = [replace(a, rope=None) for a in layers[3::4]]
    return TextConfig.read(keys, map(pre_norm, layers, feed_forwards(keys)))
