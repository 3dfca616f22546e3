"""Blocks: the parts of which the layers of language models consist; each has its weights and its nodes."""

from ggmlb.models.text.blocks.attention import (
    Attention,
    Rope,
    attention_or,
    attentions,
    base_in_windows,
    windowed,
)
from ggmlb.models.text.blocks.block import Block, Parallel, Recurrent, Slices, Weight, norm_weights
from ggmlb.models.text.blocks.convolution import ShortConv
from ggmlb.models.text.blocks.delta import GatedDelta
from ggmlb.models.text.blocks.feed_forward import (
    Experts,
    FeedForward,
    dense_or_experts,
    experts,
    feed_forwards,
    leading_dense,
    routing,
    scaled_shared,
    shared_mixtures,
)
from ggmlb.models.text.blocks.latent import LatentAttention
from ggmlb.models.text.blocks.layer import NONE, POST, PRE, Layer, Residual, decoder_layers
from ggmlb.models.text.blocks.mamba import Mamba, Mamba2
from ggmlb.models.text.blocks.rwkv import ChannelMix, TimeMix

__all__ = [
    "NONE",
    "POST",
    "PRE",
    "Attention",
    "Block",
    "ChannelMix",
    "Experts",
    "FeedForward",
    "GatedDelta",
    "LatentAttention",
    "Layer",
    "Mamba",
    "Mamba2",
    "Parallel",
    "Recurrent",
    "Residual",
    "Rope",
    "ShortConv",
    "Slices",
    "TimeMix",
    "Weight",
    "attention_or",
    "attentions",
    "base_in_windows",
    "decoder_layers",
    "dense_or_experts",
    "experts",
    "feed_forwards",
    "leading_dense",
    "norm_weights",
    "routing",
    "scaled_shared",
    "shared_mixtures",
    "windowed",
]
