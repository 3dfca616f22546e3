"""What `TextConfig` does with metadata keys `<architecture>.*`, all that llama.cpp knows among them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ggmlb import ModelError
from ggmlb.models.gguf import GgufFile
from ggmlb.models.text.architectures import read_config
from ggmlb.models.text.config import TextConfig
from tests.support.gguf_files import write_gguf
from tests.support.text_models import N_EMBD, N_VOCAB, parts_of, sizes_of

KEYS = [
    line
    for line in Path(__file__).with_name("llama_cpp_keys.txt").read_text().splitlines()
    if not line.startswith("#")
]


class Reader:
    """Reads the configuration of files that have no more tensors than that takes.

    Args:
        folder: Where the files are written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.gguf"

    def __call__(self, kind: str, changes: Mapping[str, Any] = {}, n_vocab: int = N_VOCAB) -> TextConfig:
        """Return the configuration of a kind of model; a key that is changed to `None` is left out."""
        arch = parts_of(kind)[0]
        keys = {f"{arch}.{key}": v for key, v in {**sizes_of(kind, 7), **changes}.items() if v is not None}
        table = np.zeros((n_vocab, N_EMBD), np.float16)
        write_gguf(self._path, {"general.architecture": arch, **keys}, {"token_embd.weight": table})
        return read_config(GgufFile(self._path))

    def outcome(self, kind: str, key: str, value: Any, plain: TextConfig | None = None) -> str:
        """Return what a value does: it is read, refused, warned of, or passed over."""
        plain = plain or self(kind)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                found = self(kind, {key: value})
            except ModelError as error:
                return "refused" if f".{key}'" in str(error) else "read"
        if told:
            assert f".{key}" in str(told[0].message)
            return "warned of"
        return "passed over" if found == plain else "read"
