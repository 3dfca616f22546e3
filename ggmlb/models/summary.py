"""Summary: the sizes of a model, its parts on each device, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ggmlb.inspect.html import card, memory_table
from ggmlb.interface.memory_table import MemoryReport


class Summary(NamedTuple):
    """Sizes, parts and memory of a model on devices; shown as text and in notebooks.

    Attributes:
        name: The model's class and file.
        facts: Sizes, types and settings by name.
        parts: The parts of the model on each device, in words.
        memory: The memory of each device, predicted and allocated.
    """

    name: str
    facts: Mapping[str, str]
    parts: Mapping[str, str]
    memory: MemoryReport

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return {**self._asdict(), "memory": self.memory.as_list()}

    def __str__(self) -> str:
        facts = [f"{name}: {fact}" for name, fact in (*self.facts.items(), *self.parts.items())]
        return "\n".join([self.name, *facts, str(self.memory)])

    def _repr_html_(self) -> str:
        return card(self.name, {**self.facts, **self.parts}, memory_table(self.memory))
