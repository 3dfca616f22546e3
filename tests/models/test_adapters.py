"""LoRA adapters: beside models whose weights hold the same products; files that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError, FreedError, ModelError
from ggmlb.cli import main
from ggmlb.models import TextModel
from tests.models.test_inside import PLACES, on_places
from tests.support.adapters import adapted, write_adapter, write_merged
from tests.support.gguf_files import write_gguf
from tests.support.text_models import KINDS, TIED

PROMPT = [1, *(260 + (7 * i) % 55 for i in range(20))]
GREEDY: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


@on_places(KINDS, fast=["CPU"])
def test_an_adapter_is_as_weights_that_hold_it(
    models: Callable[..., Path], tmp_path: Path, kind: str, place: str
) -> None:
    path = models(kind)
    names = adapted(path)
    if kind in TIED:  # the embeddings are the output, too: an adapter changes but one of them
        names.remove("token_embd.weight")
    adapter = write_adapter(tmp_path / "adapter.gguf", path, names)
    merged = write_merged(tmp_path / "merged.gguf", path, adapter, 0.7)
    with TextModel(merged, n_ctx=96, **PLACES[place]) as model:
        expected, text = model.logits(PROMPT), model.generate(PROMPT, **GREEDY).tokens
    with TextModel(path, n_ctx=96, **PLACES[place]) as model:
        plain, before = model.logits(PROMPT), model.generate(PROMPT, **GREEDY).tokens
        loaded = model.load_adapter(adapter, scale=0.7)
        assert set(loaded.factors) == set(names)
        assert np.abs(model.logits(PROMPT) - expected).max() < 2e-3 * np.abs(expected).max()
        assert np.abs(plain - expected).max() > 0.1
        assert model.generate(PROMPT, **GREEDY).tokens == text
        lens = model.logit_lens(PROMPT, [model.config.n_layer - 1]).logits[0]
        assert np.abs(lens - expected).max() < 2e-3 * np.abs(expected).max()
        loaded.scale = 0
        # Devices fuse by placement, which adapters change, and rounded keys jump by an ulp of float16.
        most = 0 if place == "CPU" else 1e-3
        assert np.abs(model.logits(PROMPT) - plain).max() <= most
        assert model.generate(PROMPT, **GREEDY).tokens == before
        loaded.scale = 0.7
        assert model.generate(PROMPT, **GREEDY).tokens == text
        loaded.close()
        assert np.abs(model.logits(PROMPT) - plain).max() <= most


def test_adapters_add_up(models: Callable[..., Path], tmp_path: Path) -> None:
    path = models()
    files = [
        write_adapter(tmp_path / f"{i}.gguf", path, adapted(path)[i::3], seed=i, size=0.2) for i in range(2)
    ]
    merged = write_merged(tmp_path / "one.gguf", path, files[0], 0.5)
    merged = write_merged(tmp_path / "two.gguf", merged, files[1], -1.5)
    with TextModel(merged, ["CPU"], n_ctx=64) as model:
        expected = model.logits(PROMPT)
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        with model.load_adapter(files[0], 0.5), model.load_adapter(files[1], -1.5) as second:
            assert "2.gguf" not in repr(second) and "scale -1.5" in repr(second)
            assert np.abs(model.logits(PROMPT) - expected).max() < 2e-3 * np.abs(expected).max()
        assert np.abs(model.logits(PROMPT) - expected).max() > 0.1
        for scale in ("1", np.nan, True):
            with pytest.raises(ArgumentError, match="scale is"):
                model.load_adapter(files[0], scale)
    with pytest.raises(FreedError, match="load_adapter"):
        model.load_adapter(files[0])


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"general.type": "model"}, "general.type.*'model'; a LoRA adapter of this model has 'adapter'"),
        ({"general.type": None}, "general.type"),
        ({"adapter.type": "control_vector"}, "adapter.type.*'control_vector'"),
        ({"general.architecture": "qwen2"}, "general.architecture.*'qwen2'.*'llama'"),
        ({"adapter.lora.alpha": "much"}, "adapter.lora.alpha"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "aLoRA"),
    ],
)
def test_files_that_are_no_adapter_of_the_model(
    models: Callable[..., Path], tmp_path: Path, metadata: dict[str, Any], says: str
) -> None:
    file = write_adapter(tmp_path / "a.gguf", models(), **metadata)
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        with pytest.raises(ModelError, match=says):
            model.load_adapter(file)
        assert len(model.generate([1], **GREEDY).tokens) == 5


Q, F32 = "blk.1.attn_q.weight", np.float32


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "has no tensors"),
        ({Q: np.ones((256, 256), F32)}, "multiplies with no weight of that name"),
        ({"blk.1.attn_norm.weight.lora_a": np.ones((1, 256), F32)}, "no weight of that name"),
        ({"blk.9.attn_q.weight.lora_a": np.ones((1, 256), F32)}, r"blk\.9.*did you mean 'blk.\d.attn_q.we"),
        ({Q + ".lora_a": np.ones((2, 256), F32)}, f"partner '{Q}.lora_b' is missing"),
        (
            {Q + ".lora_a": np.ones((256, 2), F32), Q + ".lora_b": np.ones((256, 2), F32)},
            r"lora_a'.*shape \[256, 2\].*rank 2, ask for \[2, 256\]",
        ),
        (
            {Q + ".lora_a": np.ones((2, 256), F32), Q + ".lora_b": np.ones((255, 2), F32)},
            r"lora_b'.*shape \[255, 2\].*ask for \[256, 2\]",
        ),
        (
            {Q + ".lora_a": np.ones((2, 256), F32), Q + ".lora_b": np.ones((256, 3), F32)},
            r"lora_a'.*shape \[2, 256\].*rank 3",
        ),
        (
            {Q + ".lora_a": np.ones((0, 256), F32), Q + ".lora_b": np.ones((256, 0), F32)},
            "lora_b'.*rank is 0",
        ),
        (
            {Q + ".lora_a": np.full((2, 256), np.nan, F32), Q + ".lora_b": np.ones((256, 2), F32)},
            "lora_a'.*NaN or infinity",
        ),
        (
            {Q + ".lora_a": np.ones((2, 256), np.int32), Q + ".lora_b": np.ones((256, 2), F32)},
            "lora_a.*type I32",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    models: Callable[..., Path], tmp_path: Path, tensors: dict[str, Any], says: str
) -> None:
    adapter = ggmlb.open_gguf(write_adapter(tmp_path / "a.gguf", models(), []))
    keys = {key: adapter.metadata[key] for key in adapter.metadata}
    file = write_gguf(tmp_path / "wrong.gguf", keys, tensors)
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        with pytest.raises(ModelError, match=says) as told:
            model.load_adapter(file)
        assert re.search(r"wrong\.gguf", str(told.value))
        assert len(model.generate([1], **GREEDY).tokens) == 5


def test_damaged_files_are_refused_or_loaded(models: Callable[..., Path], tmp_path: Path) -> None:
    """Bytes of the metadata and of the list of tensors are changed: nothing but a ModelError comes of it."""
    whole = write_adapter(tmp_path / "a.gguf", models(), [Q]).read_bytes()
    rng, file, refused = np.random.default_rng(4), tmp_path / "b.gguf", 0
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        for i in range(80):
            raw = bytearray(whole)
            for at in rng.integers(0, 400, 1 + i % 3):
                raw[at] = rng.integers(256)
            file.write_bytes(raw[: rng.integers(len(raw))] if i % 5 == 0 else raw)
            try:
                model.load_adapter(file).close()
            except ModelError:
                refused += 1
        assert 20 < refused < 80
        assert len(model.generate([1], **GREEDY).tokens) == 5


def test_generate_with_adapters(
    models: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = models()
    adapter = write_adapter(tmp_path / "a=b.gguf", path)
    args = ["generate", "-m", str(path), "-d", "CPU", "--prompt-tokens", ",".join(map(str, PROMPT))]
    args += ["-n", "5", "--temperature", "0", "--ignore-eos"]
    texts = []
    for options in ([], ["--lora", f"{adapter}=0"], ["--lora", str(adapter)], ["--lora", f"{adapter}=1.0"]):
        assert main([*args, *options]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2] == texts[3]
    for option, says in ((f"{adapter}=x", "no file"), (str(path), "general.type")):
        assert main([*args, "--lora", option]) == 1
        assert says in capfd.readouterr().err
