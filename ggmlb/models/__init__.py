"""Models as graphs on the public API: what a program that uses ggmlb looks like.

    from ggmlb.models import BertEmbedder

    with BertEmbedder(devices=["OpenCL0", "CPU"], layers_on={"OpenCL0": "0-2"}) as embedder:
        embeddings = embedder.embed(["A text.", "Another one."])

The weights of layers 0 to 2 lie on the first device, those of the others on the second; the scheduler does
the rest.
"""

from ggmlb.models.bert import BertConfig, BertGraph
from ggmlb.models.embedder import BertEmbedder
from ggmlb.models.folder import ModelFolder, default_model_dir
from ggmlb.models.text import Generation, Options, TextModel

__all__ = [
    "BertConfig",
    "BertEmbedder",
    "BertGraph",
    "Generation",
    "ModelFolder",
    "Options",
    "TextModel",
    "default_model_dir",
]
