"""Models on a card: MiniLM, alone and split with the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ggmlb.core.errors import ModelError

GOLDEN = Path(__file__).parents[1] / "golden" / "minilm"


@pytest.mark.parametrize("devices", [("CUDA0",), ("CUDA0", "CPU"), ("CPU", "CUDA0")], ids="+".join)
@pytest.mark.parametrize("graphs", ["1", "0"])
def test_minilm(devices: tuple[str, ...], graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ggmlb.models import BertEmbedder, default_model_dir

    try:
        default_model_dir()
    except (ModelError, ImportError) as error:
        pytest.skip(f"the model is not installed: {error}")
    monkeypatch.setenv("GGMLB_CUDA_GRAPHS", graphs)
    sentences = json.loads((GOLDEN / "sentences.json").read_text(encoding="utf-8"))
    with np.load(GOLDEN / "embeddings.npz") as file:
        want = file["embeddings"]
    layers = {name: list(range(i, 6, len(devices))) for i, name in enumerate(devices)}
    with BertEmbedder(devices=devices, layers_on=layers if len(devices) > 1 else None) as embedder:
        for _ in range(3):
            found = embedder.embed(sentences)
            assert (found * want).sum(axis=1).min() > 0.9999
