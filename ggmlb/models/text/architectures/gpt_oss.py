"""gpt-oss."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, base_in_windows, decoder_layers, experts, windowed
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("gpt-oss")
def gpt_oss(keys: Keys) -> TextConfig:
    """Read a model: heads have sinks, every other layer a window, and experts biases."""
    attention = attentions(keys, RopeType.NEOX, has_sinks=True)
    attention = windowed(keys, attention, 2, None, freq_base=base_in_windows(keys))
    parts = experts(keys, activation="swiglu_oai", weighting="chosen", has_biases=True)
    return TextConfig.read(keys, decoder_layers(attention, parts, ("attn_norm", "post_attention_norm")))
