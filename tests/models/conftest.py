from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ggmlb.models import default_model_dir

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
