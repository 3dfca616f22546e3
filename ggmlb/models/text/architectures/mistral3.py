"""Ministral 3 and Mistral Large 3."""

from __future__ import annotations

import math
from dataclasses import replace

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, dense_or_experts
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("mistral3")
def mistral3(keys: Keys) -> TextConfig:
    """Read a model: Llama, with queries scaled by position and more parameters of YaRN."""
    attention = attentions(keys, RopeType.NORMAL)
    rope = attention[0].rope
    assert rope is not None
    rope = replace(
        rope,
        beta_fast=keys.real("rope.scaling.yarn_beta_fast", rope.beta_fast),
        beta_slow=keys.real("rope.scaling.yarn_beta_slow", rope.beta_slow),
    )
    log_factor = 0.1 * keys.real("rope.scaling.yarn_log_multiplier", 0.0)
    if rope.ext_factor and rope.freq_scale < 1:
        rope = replace(rope, attn_factor=rope.attn_factor / (1 - log_factor * math.log(rope.freq_scale)))
    scale = keys.real("attention.temperature_scale", 0.0)
    temperature = (scale, rope.n_ctx_orig) if scale else None
    attention = [replace(a, rope=rope, temperature=temperature) for a in attention]
    return TextConfig.read(keys, decoder_layers(attention, dense_or_experts(keys)))
