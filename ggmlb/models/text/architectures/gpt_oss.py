"""gpt-oss."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, experts, sliding_windows, windowed
from ggmlb.models.text.blocks.attention import MIN_BASE
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("gpt-oss")
def gpt_oss(keys: Keys) -> TextConfig:
    """Read a model: heads have sinks, every other layer a window, and experts biases."""
    attention = attentions(keys, RopeType.NEOX, has_sinks=True)
    base = keys.real("rope.freq_base_swa", keys.real("rope.freq_base", 10000.0, MIN_BASE), MIN_BASE)
    attention = windowed(attention, sliding_windows(keys, 2, None), freq_base=base)
    parts = experts(keys, activation="swiglu_oai", weighting="chosen", has_biases=True)
    return TextConfig.read(keys, decoder_layers(attention, parts, ("attn_norm", "post_attention_norm")))
