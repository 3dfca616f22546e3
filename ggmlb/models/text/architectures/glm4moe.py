"""GLM-4.5 to GLM-4.7."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.architectures.glm4 import check_positions
from ggmlb.models.text.blocks import attentions, decoder_layers, shared_mixtures
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("glm4moe")
def glm4moe(keys: Keys) -> TextConfig:
    """Read a mixture of experts whose first layers are dense; larger models have QK norms."""
    check_positions(keys)
    keys.skip_predictors()
    norms = "head" if "blk.0.attn_q_norm.weight" in keys.file else None
    attention = attentions(keys, RopeType.NEOX, norms=norms)
    parts = shared_mixtures(keys, is_sigmoid=True, has_choice_bias=True)
    return TextConfig.read(keys, decoder_layers(attention, parts, ("attn_norm", "post_attention_norm")))
