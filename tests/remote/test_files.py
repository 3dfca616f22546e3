"""Weights that machines read themselves, from files that all of them see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb.models import TextModel
from tests.support.text_models import write_text_model

PROMPT = [1, 270, 281, 292]


def test_weights_of_a_shared_file_do_not_pass_through_the_driver(address: str, tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "model.gguf", "llama", "q8_0")
    with TextModel(path, ["CPU"], n_ctx=64) as local:
        right = local.logits(PROMPT)
    sent = {}
    for shared in ((), (str(tmp_path),)):
        with ggmlb.connect(address, ["CPU"], shared) as cluster:
            device: Any = cluster.devices[1]
            before = device.link.n_sent
            with TextModel(path, ["node1/CPU", "CPU"], {"node1/CPU": "all"}, n_ctx=64) as model:
                sent[shared] = device.link.n_sent - before
                np.testing.assert_array_equal(model.logits(PROMPT), right)
    through, direct = sent.values()
    assert through > path.stat().st_size / 2
    assert direct < through / 4


def test_a_connection_is_refused_while_there_is_another(address: str) -> None:
    with ggmlb.connect(address, ["CPU"]), pytest.raises(ggmlb.RegistryError, match=r"close\(\) it first"):
        ggmlb.connect(address, ["CPU"])
