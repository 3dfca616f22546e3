"""Adapters trained beside a model's weights: the loss of its logits, kept in a file, on all devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb import ArgumentError, open_gguf
from ggmlb.models import TextModel
from ggmlb.optimize import AdamW, Result
from tests.models.test_inside import PLACES, on_places
from tests.support.text_models import HYBRID, KINDS, RECURRENT, has_experts

TRAINABLE = [
    k for k in KINDS if not (has_experts(k) or k in (*RECURRENT, *HYBRID, "falcon-h1", "nemotron_h"))
]

TEXT = [1, *(260 + i * i % 23 for i in range(96))]
"""Squares, which repeat."""

SIZES: dict[str, Any] = {"n_ctx": 12, "n_batch": 2}


def loss_of(logits: np.ndarray, following: np.ndarray) -> float:
    x = logits.astype("f8")
    return float((np.log(np.exp(x).sum(axis=-1)) - x[np.arange(len(x)), following]).mean())


@on_places(TRAINABLE, fast=["CPU"])
def test_training_measures_the_logits_and_makes_them_likelier(
    models: Callable[..., Path], tmp_path: Path, kind: str, place: str
) -> None:
    if place == "meta":
        pytest.skip("devices that share layers have no gradients")
    with TextModel(models(kind), n_ctx=64, **PLACES[place]) as model:
        untrained = model.logits(TEXT[:12])
        adapter = model.new_adapter("attn_(q|v|output)|attn_qkv|ffn_down", rank=3, seed=5)
        # It adds zeros. OpenCL fuses less then, so that sums round otherwise, and kept keys to other halves.
        most = 1e-3 if "OpenCL0" in PLACES[place]["devices"] else 0.0
        np.testing.assert_allclose(model.logits(TEXT[:12]), untrained, rtol=0, atol=most)
        with model.training(adapter, AdamW(0.01), **SIZES) as training:
            data, before = training.dataset(TEXT), Result()
            training.opt.epoch(data, None, before, n_train=0)
            tokens = np.array(TEXT)
            parts = [model.logits(list(tokens[12 * i : 12 * i + 12])) for i in range(8)]
            np.testing.assert_allclose(before.loss, loss_of(np.concatenate(parts), tokens[1:97]), rtol=2e-3)
            first, *_, last = training.opt.fit(data, n_epochs=4)
            assert last.train.loss < 0.9 * first.train.loss
            inside = model.logits(TEXT[:12])  # the model can be used while it is trained
        trained = model.logits(TEXT[:12])
        assert np.array_equal(inside, trained) and np.abs(trained - untrained).max() > 0.1
        file = tmp_path / "adapter.gguf"
        adapter.save(file)
        adapter.close()
        assert np.array_equal(model.logits(TEXT[:12]), untrained)
        for trainable in (False, True):
            with model.load_adapter(file, trainable=trainable) as loaded:
                np.testing.assert_allclose(model.logits(TEXT[:12]), trained, rtol=1e-3, atol=5e-3)
                if trainable:
                    again = model.finetune(loaded, TEXT, AdamW(0.001), **SIZES)
                    assert again[0].train.loss < last.train.loss
                else:
                    with pytest.raises(ArgumentError, match="is not trainable; load it with trainable=True"):
                        model.training(loaded)
    metadata = open_gguf(file).metadata
    assert metadata.text("adapter.type") == "lora" and metadata.real("adapter.lora.alpha", 0.0) == 6


def test_quantised_weights_stay_as_they_are(models: Callable[..., Path]) -> None:
    path = models("llama", "q4_0")
    for place in ("CPU", "LLVM"):
        with TextModel(path, n_ctx=64, **PLACES[place]) as model:
            untrained = model.logits(TEXT[:12])
            adapter = model.new_adapter()
            first, *_, last = model.finetune(adapter, TEXT, AdamW(0.02), n_epochs=4, val_split=0.25, **SIZES)
            assert last.train.loss < 0.9 * first.train.loss and last.eval.n_data == 2
            adapter.scale = 0
            assert np.array_equal(model.logits(TEXT[:12]), untrained)


def test_training_repeats_itself(models: Callable[..., Path]) -> None:
    def trained(seed: int) -> list[float]:
        with TextModel(models(), ["CPU"], n_ctx=32) as model:
            adapter = model.new_adapter(seed=seed)
            epochs = model.finetune(adapter, TEXT, n_epochs=2, seed=seed, opt_period=2, n_ctx=12, n_batch=1)
            return [loss for epoch in epochs for loss in epoch.train.losses]

    assert trained(1) == trained(1) != trained(2)


def test_the_memory_of_a_new_adapter_is_foreseen(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        adapter = model.new_adapter(rank=4)
        memory = model.memory
        assert memory.forecast.uses == memory.allocated.uses
        assert sum(use.nbytes for use in memory.allocated.uses if use.kind == "adapters") == adapter.nbytes
        adapter.close()
        memory = model.memory
        assert memory.forecast.uses == memory.allocated.uses


def test_what_cannot_be_trained_is_told(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        with pytest.raises(ArgumentError, match=r"targets 'attn_z' match none of .*blk\.N\.attn_q"):
            model.new_adapter("attn_z")
        with pytest.raises(ArgumentError, match=r"targets 'attn_\(q' are no regular expression: missing"):
            model.new_adapter("attn_(q")
        for rank, why in (
            (0, "the rank is 0"),
            ("8", "rank is '8'; give a whole number"),
            (9999, "the rank is 9999; give at most"),
        ):
            with pytest.raises(ArgumentError, match=why):
                model.new_adapter(rank=rank)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="new_adapter: seed is -1; give 0 or more"):
            model.new_adapter(seed=-1)
        adapter = model.new_adapter()
        with pytest.raises(ArgumentError, match="a batch has 2 sequences of 12, and needs 25"):
            model.finetune(adapter, TEXT[:20], **SIZES)
        with pytest.raises(ArgumentError, match="n_ctx is 0, n_batch 2"):
            model.training(adapter, n_ctx=0, n_batch=2)
        with pytest.raises(ArgumentError, match="the model was made for sequences of up to"):
            model.training(adapter, n_ctx=1 << 18)
        adapter.scale = 0
        with pytest.raises(ArgumentError, match="is off, closed, or of another model"):
            model.training(adapter)
    for kind, why in (("llama-experts", "has experts"), ("rwkv7", "is recurrent"), ("lfm2", "is recurrent")):
        with TextModel(models(kind), ["CPU"], n_ctx=32) as model:
            adapter = model.new_adapter("time_mix_value|attn_q|in_proj")
            with pytest.raises(ArgumentError, match=f"the model {why}: its ops have no gradients"):
                model.training(adapter, **SIZES)
