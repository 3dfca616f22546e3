"""SmolLM2 with layers on two machines: the bits of this one, and few calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb.models import Placement, TextModel, default_text_model

PROMPT = "Once upon a time there was"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CPU", "LLVM"])
def test_layers_on_two_nodes(address: str, name: str) -> None:
    """A third of its layers on each machine; at most two calls for each token, and each machine."""
    path = default_text_model()
    with TextModel(path, [*dict.fromkeys([name, "CPU"])], n_ctx=128) as local:
        logits, text = local.logits(PROMPT), local.generate(PROMPT, max_tokens=12, temperature=0)
    layers = {f"node0/{name}": "0-9", f"node1/{name}": "10-19", name: "20-29"}
    with (
        ggmlb.connect(address, [name]) as cluster,
        TextModel(path, [*dict.fromkeys([*layers, "CPU"])], Placement(layers=layers), n_ctx=128) as model,
    ):
        np.testing.assert_array_equal(model.logits(PROMPT), logits)
        assert model.generate(PROMPT, max_tokens=12, temperature=0).tokens == text.tokens
        devices: Any = cluster.devices
        before = [device.link.n_calls for device in devices]
        n = len(model.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True).tokens)
        for device, n_calls in zip(devices, before, strict=True):
            assert device.link.n_calls - n_calls <= 2 * n
