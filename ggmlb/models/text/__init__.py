"""Language models: from tokens to logits to text, on any devices."""

from ggmlb.models.text.generation import Generation
from ggmlb.models.text.model import TextModel
from ggmlb.models.text.sampling import Options

__all__ = ["Generation", "Options", "TextModel"]
