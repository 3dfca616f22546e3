"""DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Mistral Large 3: latent attention."""

from __future__ import annotations

import math
from dataclasses import replace

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import LatentAttention, Rope, decoder_layers, shared_mixtures
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

GLM_VOCAB, GLM_LAYERS = 154880, (47, 48)
"""Sizes of GLM-4.7-Flash, whose first files do not say that its router has sigmoids."""


@register_architecture("deepseek2")
def deepseek2(keys: Keys) -> TextConfig:
    """Read a model: keys and values are products of a latent vector, which alone is cached."""
    keys.skip_predictors()
    is_glm = keys.n_layer in GLM_LAYERS and keys.file["token_embd.weight"].ne[1] == GLM_VOCAB
    attention = [_attention(keys)] * keys.n_layer
    return TextConfig.read(keys, decoder_layers(attention, shared_mixtures(keys, is_sigmoid=is_glm)))


def _attention(keys: Keys) -> LatentAttention:
    n_key, n_out = keys.count("attention.key_length_mla"), keys.count("attention.value_length_mla")
    n_latent = keys.count("attention.kv_lora_rank")
    n_rotated = keys.count("rope.dimension_count", most=n_key - 1)
    for key, n in (("attention.key_length", n_latent + n_rotated), ("attention.value_length", n_latent)):
        if (found := keys.count(key, n)) != n:
            raise keys.error(key, f"it is {found}; it must be {n}, of the latent vector")
    if (found := keys.count("attention.head_count_kv", 1)) != 1:
        raise keys.error("attention.head_count_kv", f"it is {found}; it must be 1")
    rope = Rope.read(keys, RopeType.NORMAL, n_rotated)
    growth, multiplier = -math.log(rope.freq_scale), keys.real("rope.scaling.yarn_log_multiplier", 0.0)
    factor = rope.attn_factor * (1 + 0.1 * growth)  # of YaRN, which RoPE multiplies by
    if rope.ext_factor and multiplier:
        factor = rope.attn_factor
        rope = replace(rope, attn_factor=factor / (1 + 0.1 * growth))
    temperature = keys.real("attention.temperature_scale", 0.0)
    period = keys.count("attention.temperature_length") if temperature else 0
    return LatentAttention(
        n_head=keys.count("attention.head_count", most=keys.n_embd),
        n_head_kv=1,
        n_key=n_latent + n_rotated,
        n_value=n_latent,
        scale=(factor * (1 + multiplier * growth)) ** 2 * n_key**-0.5,
        rope=rope,
        temperature=(temperature, period) if temperature else None,
        n_plain=n_key - n_rotated,
        n_out=n_out,
        n_latent_query=keys.count("attention.q_lora_rank", 0, 0),
    )
