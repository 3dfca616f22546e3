"""Models with layers on other machines: the bits of this one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ggmlb.backends.ray.cluster import Cluster
from ggmlb.models import BertEmbedder, TextModel
from tests.support.text_models import write_text_model

REMOTE = ["node0/CPU", "node1/CPU", "CPU"]
PROMPT = [1, *(260 + (7 * i) % 55 for i in range(12))]


@pytest.mark.parametrize("kind", ["llama", "mamba", "lfm2"])
def test_a_text_model_on_two_nodes(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    path = write_text_model(tmp_path / "model.gguf", kind)
    with TextModel(path, ["CPU"], n_ctx=64) as local:
        logits, text = local.logits(PROMPT), local.generate(PROMPT, max_tokens=8, temperature=0)
    with TextModel(path, REMOTE, {"node0/CPU": "0", "node1/CPU": "2"}, n_ctx=64) as model:
        assert set(model.homes.values()) == {*REMOTE}
        np.testing.assert_array_equal(model.logits(PROMPT), logits)
        assert model.generate(PROMPT, max_tokens=8, temperature=0).tokens == text.tokens


def test_minilm_on_two_nodes(cluster: Cluster) -> None:
    """Its products read weights in memory that stores them in another layout, there as here."""
    texts = ["a first sentence", "and a second, which is somewhat longer than the first"]
    with BertEmbedder(devices=["CPU"]) as local:
        right = local.embed(texts)
    with BertEmbedder(devices=REMOTE, layers_on={"node0/CPU": "0-2", "node1/CPU": "3-5"}) as embedder:
        for _ in range(2):
            np.testing.assert_array_equal(embedder.embed(texts), right)
