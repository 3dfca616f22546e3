"""Mamba and FalconMamba."""

from __future__ import annotations

from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import Layer, Mamba, Residual
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("mamba")
def mamba(keys: Keys) -> TextConfig:
    """Read a model, whose layers have states instead of attention."""
    layer = Layer((Residual("attn_norm", Mamba.read(keys)),))
    return TextConfig.read(keys, [layer] * keys.n_layer)
