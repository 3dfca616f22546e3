"""GGUF files: read, written, and loaded into the memory of devices."""

from ggmlb.models.gguf.metadata import Metadata
from ggmlb.models.gguf.reader import GgufFile, GgufTensor

__all__ = ["GgufFile", "GgufTensor", "Metadata"]
