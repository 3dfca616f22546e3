"""GGUF files: read, written, and loaded into the memory of devices."""

from ggmlb.models.gguf.chat import ChatTemplate
from ggmlb.models.gguf.loaded import LoadedTensors
from ggmlb.models.gguf.metadata import Metadata
from ggmlb.models.gguf.reader import GgufFile, GgufTensor
from ggmlb.models.gguf.vocabulary import Detokenizer, Vocabulary
from ggmlb.models.gguf.writer import save_gguf

__all__ = [
    "ChatTemplate", "Detokenizer", "GgufFile", "GgufTensor", "LoadedTensors", "Metadata", "Vocabulary",
    "save_gguf",
]  # fmt: skip
