"""MiniLM through the CUDA backend on the simulated driver: layers on two devices, and all on two cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb.models import BertEmbedder
from tests.support.cuda_played import on_played_cards

GOLDEN = Path(__file__).parents[1] / "golden/minilm"
HOW: dict[str, dict[str, Any]] = {
    "layers": {"devices": ["CUDA0", "CPU"], "layers_on": {"CUDA0": "0-2", "CPU": "3-5"}},
    "rows": {"devices": ["CUDA0", "CPU"]},
    "meta": {"devices": ["CUDA0+CUDA1", "CPU"]},
}


def embeddings(how: str) -> list[Any]:
    """Return those of three texts, three times."""
    texts, options = json.loads((GOLDEN / "sentences.json").read_text())[:3], HOW[how]
    if how == "rows":
        by_rows = ggmlb.reg_by_name("CUDA").get_proc_address("split_buffer_type")(0, (1, 2))
        options["override_tensors"] = {"(qkv|out|up|down).*weight": by_rows}
    with BertEmbedder(**options) as embedder:
        return [embedder.embed(texts) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_minilm_on_several_devices(how: str) -> None:
    with np.load(GOLDEN / "embeddings.npz") as golden:
        want = golden["embeddings"][:3]
    for found in on_played_cards(embeddings, how):
        assert found.shape == want.shape and np.abs(found - want).max() < 1e-5
