"""Text models through the CUDA backend on the played driver: on two cards and the CPU, as a pipeline too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.adapters import adapted, write_adapter
from tests.support.processes import python
from tests.support.text_models import KINDS, write_text_model

PROGRAM = """
import sys
import numpy as np
import ggmlb.backends.cuda
from tests.support.host_driver import HostDriver
driver = HostDriver(n_devices=2)
ggmlb.backends.cuda.load_driver = lambda: driver
from ggmlb.models import TextModel
prompt = [1, *(260 + (7 * i) % 55 for i in range(9))]
path, found = sys.argv[1:]
on_cards = {"devices": ["CUDA0", "CUDA1", "CPU"], "layers_on": {"CUDA0": "0", "CUDA1": "1"}}
logits, texts = [], []
for options in ({"devices": ["CPU"]}, on_cards, {**on_cards, "n_ubatch": 4}):
    with TextModel(path, n_ctx=64, **options) as model:
        logits.append(model.logits(prompt))
        texts.append(model.generate(prompt, max_tokens=6, temperature=0, ignore_eos=True).tokens)
        devices = {p.device for p in model.scheduler.placement}
assert devices == {"CUDA0", "CUDA1", "CPU"}, devices
assert driver.counts["replay"] > 0, driver.counts
np.savez(found, logits=np.array(logits), texts=np.array(texts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_two_cards_and_the_cpu(tmp_path: Path, kind: str) -> None:
    path, file = write_text_model(tmp_path / "model.gguf", kind), tmp_path / "found.npz"
    done = python("-c", PROGRAM, str(path), str(file))
    assert done.returncode == 0, done.stderr
    with np.load(file) as found:
        expected, *others = found["logits"]
        assert np.abs(np.array(others) - expected).max() < 2e-2
        assert (found["texts"] == found["texts"][0]).all()


INSIDE = (
    PROGRAM[: PROGRAM.index("logits, texts")]
    + """
adapter = found
values = []
for options in ({"devices": ["CPU"]}, on_cards):
    with TextModel(path, n_ctx=64, **options) as model:
        values.append(model.trace(prompt, "*"))
        assert np.abs(values[-1]["logits"] - model.logits(prompt)).max() < 1e-3
        with model.steering({0: np.ones(256)}), model.load_adapter(adapter):
            values[-1]["changed"] = model.logits(prompt)
cpu, cards = values
for name in cpu.keys() - {name for name in cpu if "chosen" in name or "_exps" in name or "ffn_act" in name}:
    assert np.abs(cards[name] - cpu[name]).max() < 2e-3 * np.abs(cpu[name]).max(), name
assert np.abs(cpu["changed"] - cpu["logits"]).max() > 0.1
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3moe", "gemma2", "mamba"])
def test_what_is_inside_two_cards(tmp_path: Path, kind: str) -> None:
    path = write_text_model(tmp_path / "model.gguf", kind)
    adapter = write_adapter(tmp_path / "adapter.gguf", path, [w for w in adapted(path) if "embd" not in w])
    done = python("-c", INSIDE, str(path), str(adapter))
    assert done.returncode == 0, done.stderr
