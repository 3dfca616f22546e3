"""OLMo 2 and 3."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, feed_forwards, post_norm, sliding_windows
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("olmo2")
def olmo2(keys: Keys) -> TextConfig:
    """Read a model, whose norms are after the blocks; RoPE is not scaled in layers with a window."""
    unscaled = {"freq_scale": 1.0, "ext_factor": 0.0, "attn_factor": 1.0}
    layers = [
        a.windowed(window, **unscaled)
        for a, window in zip(
            attentions(keys, RopeType.NEOX, norms="row"), sliding_windows(keys, 4), strict=True
        )
    ]
    return TextConfig.read(keys, map(post_norm, layers, feed_forwards(keys)))
