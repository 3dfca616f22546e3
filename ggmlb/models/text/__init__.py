"""Language models: tokens to logits and text, on any devices."""

from ggmlb.models.text.adapter import Adapter
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.compare import Comparison, Differences
from ggmlb.models.text.draft import PromptLookup
from ggmlb.models.text.generation import Generation
from ggmlb.models.text.inside import LogitLens
from ggmlb.models.text.model import TextModel
from ggmlb.models.text.perplexity import Perplexity
from ggmlb.models.text.placement import Placement
from ggmlb.models.text.queue import Job, JobQueue
from ggmlb.models.text.sampling import Options
from ggmlb.models.text.session import Session

__all__ = [
    "Adapter",
    "Comparison",
    "Differences",
    "Generation",
    "Job",
    "JobQueue",
    "LogitLens",
    "Options",
    "Perplexity",
    "Placement",
    "PromptLookup",
    "Session",
    "TextModel",
    "register_architecture",
]
