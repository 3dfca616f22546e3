from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ggmlb.models import default_model_dir
from tests.support.text_models import write_text_model

GOLDEN = Path(__file__).parents[1] / "golden" / "minilm"


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    texts: list[str] = json.loads((GOLDEN / "sentences.json").read_text(encoding="utf-8"))
    assert len(texts) == 20
    return texts


@pytest.fixture(scope="session")
def reference() -> npt.NDArray[np.float32]:
    with np.load(GOLDEN / "embeddings.npz") as file:
        return file["embeddings"]


@pytest.fixture
def folder_copy(tmp_path: Path) -> Path:
    """A copy of the default model folder to be damaged; its weights are a link to the real ones."""
    source = default_model_dir()
    copy = tmp_path / "model"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("model.safetensors", "*.txt", "README.md"))
    (copy / "model.safetensors").symlink_to(source / "model.safetensors")
    return copy


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a small random text model of a kind and type, once; returns its path."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def write(kind: str = "llama", dtype: str = "f32", n_layer: int = 0) -> Path:
        return write_text_model(folder / f"{kind}-{dtype}-{n_layer}.gguf", kind, dtype, n_layer=n_layer)

    return write
