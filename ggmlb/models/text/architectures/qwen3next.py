"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterable

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import (
    Block,
    GatedDelta,
    attentions,
    decoder_layers,
    experts,
    feed_forwards,
    scaled_shared,
)
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

RECURRENT = "attention.recurrent_layers"


@register_architecture("qwen3next")
def qwen3next(keys: Keys) -> TextConfig:
    """Read a model: three of four layers have the gated delta rule instead of attention, all have experts."""
    keys.skip_predictors()
    return _hybrid(keys, scaled_shared(keys, experts(keys)), is_grouped=True)


@register_architecture("qwen35")
def qwen35(keys: Keys) -> TextConfig:
    """Read a dense model."""
    keys.skip_predictors()
    _check_positions(keys)
    return _hybrid(keys, feed_forwards(keys))


@register_architecture("qwen35moe")
def qwen35moe(keys: Keys) -> TextConfig:
    """Read a model with experts."""
    keys.skip_predictors()
    _check_positions(keys)
    return _hybrid(keys, scaled_shared(keys, experts(keys)))


def _hybrid(keys: Keys, parts: Iterable[Block], is_grouped: bool = False) -> TextConfig:
    is_recurrent = keys.by_layer(RECURRENT)
    if is_recurrent is None and f"{keys.name}.{RECURRENT}" in keys.file.metadata:
        raise keys.error(RECURRENT, "it is one value; it must be an array, a boolean for each layer")
    if is_recurrent is None:
        period = keys.count("full_attention_interval", 4)
        is_recurrent = tuple((i + 1) % period != 0 for i in range(keys.n_layer))
    delta = GatedDelta.read(keys, is_grouped)
    attention = attentions(keys, RopeType.NEOX, norms="head", is_gated=True)
    mixers = [delta if other else a for a, other in zip(attention, is_recurrent, strict=True)]
    return TextConfig.read(keys, decoder_layers(mixers, parts, ("attn_norm", "post_attention_norm")))


def _check_positions(keys: Keys) -> None:
    """Raise a ModelError unless the parts of a position, which are the same for text, rotate all elements."""
    sections = keys.numbers("rope.dimension_sections", 4)
    if sections is None:
        raise keys.error("rope.dimension_sections", "it is missing; it must be 4 integers")
    n = sum(sections)
    last = range(max(n - 3, 0), n)  # of each of the three parts, which take turns, if there are so many
    if n < 1 or any(i >= 3 * sections[i % 3] for i in last):
        raise keys.error(
            "rope.dimension_sections", f"it is {list(sections)}; parts without a position are not supported"
        )
