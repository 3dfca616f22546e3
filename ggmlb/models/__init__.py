"""Models built on the public API; also examples of programs that use ggmlb.

    from ggmlb.models import BertEmbedder

    with BertEmbedder(devices=["OpenCL0", "CPU"], layers_on={"OpenCL0": "0-2"}) as embedder:
        embeddings = embedder.embed(["A text.", "Another one."])

The weights of layers 0 to 2 are on the first device, the others on the second; the scheduler runs each layer
where its weights are.
"""

from ggmlb.models.bert import BertConfig, BertGraph
from ggmlb.models.embedder import BertEmbedder
from ggmlb.models.exported import from_torch
from ggmlb.models.folder import ModelFolder, default_model_dir, default_text_model
from ggmlb.models.text import (
    Adapter,
    Comparison,
    Differences,
    Generation,
    Job,
    JobQueue,
    LogitLens,
    Options,
    Perplexity,
    Placement,
    PromptLookup,
    Session,
    TextModel,
    register_architecture,
)

__all__ = [
    "Adapter",
    "BertConfig",
    "BertEmbedder",
    "BertGraph",
    "Comparison",
    "Differences",
    "Generation",
    "Job",
    "JobQueue",
    "LogitLens",
    "ModelFolder",
    "Options",
    "Perplexity",
    "Placement",
    "PromptLookup",
    "Session",
    "TextModel",
    "default_model_dir",
    "default_text_model",
    "from_torch",
    "register_architecture",
]
