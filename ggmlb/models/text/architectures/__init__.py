"""Architectures: how the configuration of a language model is read from its file, one file for each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Final

from ggmlb.core.arguments import checked
from ggmlb.core.errors import ArgumentError, ModelError, did_you_mean
from ggmlb.models.text.keys import Keys

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile
    from ggmlb.models.text.config import TextConfig

GROUP: Final = "ggmlb.architectures"
"""Entry points of other packages: the name of an architecture, and its function."""

Architecture = Callable[[Keys], "TextConfig"]
"""Reads the metadata of a file, and returns the configuration: sizes, and the blocks of each layer."""

_known: dict[str, Architecture] = {}


@checked
def register_architecture(name: str) -> Callable[[Architecture], Architecture]:
    """Return a decorator that makes a function the reader of files of an architecture.

    Example: `@register_architecture("toy")`, before `def toy(keys: Keys) -> TextConfig`.

    Args:
        name: `general.architecture` of its files.

    Raises:
        ArgumentError: Another function is the reader of this architecture.
    """

    def register(function: Architecture) -> Architecture:
        if _known.setdefault(name, function) is not function:
            raise ArgumentError(f"register_architecture: {name!r} has a reader already; choose another name")
        return function

    return register


def architectures() -> list[str]:
    """Return the names of the architectures that are registered, those of ggmlb among them."""
    for info in iter_modules(__path__):
        import_module(f"{__name__}.{info.name}")  # each registers its own
    return sorted(_known)


def read_config(file: GgufFile) -> TextConfig:
    """Return the configuration of a GGUF language model.

    Raises:
        ModelError: The architecture is unknown, or metadata is missing, wrong or contradictory.
    """
    name = file.metadata.text("general.architecture")
    if name not in _known and name not in architectures():
        _load(name)
    if name not in _known:
        from ggmlb.models.encoder_file import ENCODERS

        if name in ENCODERS:
            raise ModelError(
                f"{file.path}: {name!r} is an encoder, which generates no text; open it with BertEmbedder"
            )
        raise ModelError(
            f"{file.path}: the architecture {name!r} is not known{did_you_mean(name, sorted(_known))}; "
            "llama.cpp computes others on ggmlb's devices, see docs/llama-cpp.md"
        )
    return _known[name](Keys(file, name))


def _load(name: str) -> None:
    """Register the architecture of an installed package, if one has an entry point of this name."""
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=name):
        try:
            _known[name] = point.load()
        except Exception as error:
            raise ModelError(
                f"the architecture {name!r}, {point.value}, cannot be loaded: {type(error).__name__}: {error}"
            ) from error
