"""Gemma 3."""

from __future__ import annotations

from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.architectures.gemma2 import gemma, gemma_attentions
from ggmlb.models.text.blocks import base_in_windows, windowed
from ggmlb.models.text.blocks.attention import FREQ_BASE
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

N_LAYER_27B = 62
"""Layers of the variant whose scores are scaled by the width per head, not by the head's size."""


@register_architecture("gemma3")
def gemma3(keys: Keys) -> TextConfig:
    """Read a model: five of six layers have a window, and another RoPE."""
    attention = gemma_attentions(keys, N_LAYER_27B, norms="head")
    base = base_in_windows(keys, FREQ_BASE)
    return gemma(keys, windowed(keys, attention, 6, freq_base=base, freq_scale=1.0), 0.0)
