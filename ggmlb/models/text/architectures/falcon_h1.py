"""Falcon-H1."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import Mamba2, Parallel, attentions, decoder_layers, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("falcon-h1")
def falcon_h1(keys: Keys) -> TextConfig:
    """Read a model: each layer has attention and states, of the same input, whose outputs are added."""
    mamba = Mamba2.read(keys)
    mixers = [Parallel((attention, mamba)) for attention in attentions(keys, RopeType.NEOX)]
    return TextConfig.read(keys, decoder_layers(mixers, feed_forwards(keys)))
