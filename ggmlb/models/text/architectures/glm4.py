"""GLM-4 (0414)."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import POST, attentions, decoder_layers, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("glm4")
def glm4(keys: Keys) -> TextConfig:
    """Read a model, with norms before and after the blocks."""
    check_positions(keys)
    attention = attentions(keys, RopeType.NORMAL)
    return TextConfig.read(keys, decoder_layers(attention, feed_forwards(keys), after=POST))


def check_positions(keys: Keys) -> None:
    """Raise a ModelError if positions have several parts, as those of pictures."""
    if any(keys.numbers("rope.dimension_sections", 4) or ()):
        raise keys.error("rope.dimension_sections", "positions in images are not supported; use a text model")
