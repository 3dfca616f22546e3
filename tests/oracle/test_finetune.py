"""LoRA training of SmolLM2 beside PyTorch's, and its adapter in llama.cpp (xllamacpp): `make test-oracle`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)
pytest.importorskip("torch", reason="PyTorch is not installed")

from ggmlb.models import TextModel, default_text_model
from ggmlb.optimize import AdamW
from tests.support.llama_cpp import distances, float32_log_probs, llama_cpp_log_probs, our_log_probs

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]

# llama.cpp tells no probabilities of tokens that are parts of characters.
TEXT = (ROOT / "docs/architecture.md").read_text().encode("ascii", "ignore").decode()


@pytest.mark.parametrize(
    ("devices", "n_steps", "mean", "most"), [("CPU", 8, 1e-3, 2e-3), ("LLVM,CPU", 30, 0.01, 0.03)]
)
def test_the_loss_falls_as_pytorchs_does(
    monkeypatch: pytest.MonkeyPatch, devices: str, n_steps: int, mean: float, most: float
) -> None:
    """Steps from the same factors, with two batches by turns; the LLVM device rounds activations to bytes."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    train = importlib.import_module("train")
    monkeypatch.setattr(train, "N_CTX", 64)
    monkeypatch.setitem(train.RATES, "SmolLM2", 3e-4)
    with TextModel(default_text_model(), ["CPU"], n_ctx=64) as model:
        tokens = np.array(model.tokens_of(TEXT), np.int32)
    sequences = tokens[: len(tokens) // 65 * 65].reshape(-1, 65)
    steps = [train.our_llama(2, devices), train.torch_llama(2, "")]
    ours, theirs = (np.array([step(sequences[4 * (i % 2) :][:4]) for i in range(n_steps)]) for step in steps)
    far = np.abs(ours / theirs - 1)
    assert far.mean() < mean and far.max() < most
    assert theirs[-2:].mean() < (0.98 if n_steps < 10 else 0.85) * theirs[:2].mean()


def test_llama_cpp_has_the_same_adapter(tmp_path: Path) -> None:
    path, file = Path(default_text_model()), tmp_path / "adapter.gguf"
    with TextModel(path, ["LLVM", "CPU"], n_ctx=128) as model:
        adapter = model.new_adapter(rank=8)
        first, *_, last = model.finetune(adapter, TEXT[:6000], AdamW(2e-3), n_epochs=3, n_ctx=64)
        assert last.train.loss < 0.8 * first.train.loss
        adapter.save(file)
        tokens = model.tokens_of(TEXT[:2000])
        n_vocab = model.config.n_vocab
    sequences = [tokens[40 * i : 40 * i + 40] for i in range(6)]
    theirs = llama_cpp_log_probs(path, sequences, n_vocab, adapters={file: 1.0})
    ours = our_log_probs(path, sequences, {file: 1.0}, devices=["LLVM", "CPU"])
    reference = float32_log_probs(path, sequences, {file: 1.0})
    without = float32_log_probs(path, sequences)
    far = np.nanmean(distances(theirs, reference))
    assert np.nanmean(distances(ours, reference)) < 1.5 * far
    assert np.nanmean(distances(without, reference)) > 5 * far
