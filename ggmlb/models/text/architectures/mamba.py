"""Mamba, FalconMamba and Mamba 2."""

from __future__ import annotations

from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import Layer, Mamba, Mamba2, Residual
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("mamba")
def mamba(keys: Keys) -> TextConfig:
    """Read a model, whose layers have states instead of attention."""
    layer = Layer((Residual("attn_norm", Mamba.read(keys)),))
    return TextConfig.read(keys, [layer] * keys.n_layer)


@register_architecture("mamba2")
def mamba2(keys: Keys) -> TextConfig:
    """Read a model, whose states are those of heads."""
    layer = Layer((Residual("attn_norm", Mamba2.read(keys)),))
    return TextConfig.read(keys, [layer] * keys.n_layer)
