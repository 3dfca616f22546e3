"""Quantisations beside each other, and models whose first wrong node is known: `ggmlb compare` and `diff`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError
from ggmlb.cli import main
from ggmlb.models import TextModel
from tests.models.test_inside import PLACES, places_of
from tests.support.llama_cpp import log_probs
from tests.support.text_models import KINDS, write_text_model

PROMPT = [1, *(260 + (7 * i) % 55 for i in range(20))]
TEXT = "abc def ghi jkl " * 12


def damaged(model: Path, path: Path, name: str) -> Path:
    """A model whose file differs in one weight, by up to 80 % of each element."""
    file = ggmlb.open_gguf(model)
    tensors = {key: np.array(file.array(key)) for key in file}
    values = tensors[name]
    tensors[name] = values * (1 + 0.8 * np.sin(np.arange(values.size, dtype=np.float32))).reshape(
        values.shape
    )
    ggmlb.save_gguf(path, {key: file.metadata.raw(key) for key in file.metadata}, tensors)
    return path


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
def test_quantisations_are_compared(models: Callable[..., Path], kind: str) -> None:
    """All figures, computed here from the logits and hidden states of each chunk."""
    found = {}
    with TextModel(models(kind, "f32"), ["CPU"], n_ctx=32) as a:
        for dtype in ("f32", "q8_0", "q4_0"):
            with TextModel(models(kind, dtype), ["CPU"], n_ctx=32) as b:
                c = found[dtype] = a.compare(b, TEXT, max_tokens=40)
                tokens = a.tokens_of(TEXT)[:40]
                layers, kl, same = [], [], []
                for chunk in (tokens[:32], [1, *tokens[33:]]):
                    traces = [model.trace(chunk) for model in (a, b)]
                    logs = [log_probs(model.logits(chunk)) for model in (a, b)]
                    layers += [
                        [
                            (np.square(y[t] - x[t]).sum() / np.square(x[t]).sum())
                            for x, y in zip(*(trace.values() for trace in traces), strict=True)
                        ]
                        for t in range(len(chunk))
                    ]
                    kl += list((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1))
                    same += list(logs[0].argmax(axis=-1) == logs[1].argmax(axis=-1))
            assert c.n_tokens == 40
            assert np.allclose(c.layers, np.mean(layers, axis=0), rtol=1e-3, atol=1e-12)
            assert np.allclose(c.divergences, kl, rtol=1e-3, atol=1e-6)
            assert c.same_top == np.mean(same)
            assert c.divergence() == np.median(c.divergences) and c.divergence(1) == max(c.divergences)
    assert not any(found["f32"].layers) and found["f32"].same_top == 1 and not found["f32"].divergences.any()
    assert 0 < found["q8_0"].layers[-1] < found["q4_0"].layers[-1] < 1
    assert 0 < found["q8_0"].divergences.mean() < found["q4_0"].divergences.mean()


def test_models_that_cannot_be_compared(models: Callable[..., Path], tmp_path: Path) -> None:
    other = write_text_model(tmp_path / "m.gguf", "llama", n_layer=2)
    with TextModel(models(), ["CPU"], n_ctx=32) as a, TextModel(other, ["CPU"], n_ctx=32) as b:
        with pytest.raises(
            ArgumentError, match=r"differ in more than their weights: llama of 3 layers.* and llama of 2"
        ):
            a.compare(b, TEXT)
        with pytest.raises(ArgumentError, match="differ in more than"):
            a.differences(b, PROMPT)
        with pytest.raises(ArgumentError, match="max_tokens is 0"):
            a.compare(a, "abc", max_tokens=0)


@pytest.mark.parametrize(
    ("kind", "weight", "first"),
    [
        ("llama", "blk.1.ffn_down.weight", "blk.1.ffn_down"),
        ("gemma3", "blk.5.attn_k.weight", "blk.5.attn_k"),
        ("llama-experts", "blk.2.ffn_up_exps.weight", "blk.2.ffn_up_exps"),
        ("mamba", "blk.1.ssm_x.weight", "blk.1.ssm_x"),
        ("qwen2", "output_norm.weight", "output_norm"),
    ],
)
def test_the_first_wrong_node_is_found(
    models: Callable[..., Path], tmp_path: Path, kind: str, weight: str, first: str
) -> None:
    wrong = damaged(models(kind), tmp_path / "wrong.gguf", weight)
    with TextModel(models(kind), ["CPU"], n_ctx=96) as a, TextModel(wrong, ["CPU"], n_ctx=96) as b:
        found = a.differences(b, PROMPT)
        assert found.first is not None and found.token is None
        assert found.first.name == first
        x, y = (model.trace(PROMPT, first)[first].reshape(len(PROMPT), -1) for model in (a, b))
        at = found.first.token, found.first.element
        assert found.first.values == (x[at], y[at])
        assert np.isclose(found.first.max_error, np.abs(x - y).max())
        assert np.isclose(found.first.nmse, np.square(x - y).mean() / np.square(x).mean())
        before = [d for d in found.nodes if d.nmse <= found.limit][: found.nodes.index(found.first)]
        assert before and all(d.nmse == 0 for d in before)


@pytest.mark.parametrize(
    ("kind", "weight", "layer"),
    [
        ("llama", "blk.1.ffn_down.weight", 1),
        ("llama", "output.weight", None),
        ("qwen3", "blk.2.attn_v.weight", 2),
        ("mamba", "blk.1.ssm_out.weight", 1),
        ("lfm2", "blk.0.shortconv.out_proj.weight", 0),
        ("lfm2", "blk.1.attn_output.weight", 1),
    ],
)
def test_the_first_token_that_differs_and_its_layer(
    models: Callable[..., Path], tmp_path: Path, kind: str, weight: str, layer: int | None
) -> None:
    wrong = damaged(models(kind), tmp_path / "wrong.gguf", weight)
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with TextModel(models(kind), ["CPU"], n_ctx=96) as a, TextModel(wrong, ["CPU"], n_ctx=96) as b:
        found = a.differences(b, PROMPT, max_tokens=40).token
        texts = [model.generate(PROMPT, **options).tokens for model in (a, b)]
        assert found is not None
        n = found.place
        assert texts[0][:n] == texts[1][:n] and found.tokens == (texts[0][n], texts[1][n])
        assert found.tokens[0] != found.tokens[1]
        assert found.margins[0] > 0 > found.margins[1] and found.layer == layer
        logits = [model.logits(PROMPT + texts[0][:n])[-1] for model in (a, b)]
        for margin, row in zip(found.margins, logits, strict=True):
            assert np.isclose(margin, row[found.tokens[0]] - row[found.tokens[1]], atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "weight", "read"),
    [
        ("rwkv7", "time_mix_output", "blk.0.time_mix_value"),
        ("gemma4-inputs", "ffn_down", "per_layer_inputs"),
    ],
)
def test_layers_that_read_earlier_ones_are_not_resumed(
    models: Callable[..., Path], tmp_path: Path, kind: str, weight: str, read: str
) -> None:
    wrong = damaged(models(kind), tmp_path / "wrong.gguf", f"blk.1.{weight}.weight")
    with TextModel(models(kind), ["CPU"], n_ctx=96) as a, TextModel(wrong, ["CPU"], n_ctx=96) as b:
        first = a.differences(b, PROMPT).first
        assert first is not None and first.name == f"blk.1.{weight}"
        with pytest.raises(ArgumentError, match=rf"layers of \w+ read '{read}'.*max_tokens=0"):
            a.differences(b, PROMPT, max_tokens=40)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in ("llama", "qwen3moe") else pytest.mark.slow) for k in KINDS]
)
def test_devices_do_not_part(models: Callable[..., Path], kind: str) -> None:
    with TextModel(models(kind), ["CPU"], n_ctx=64) as a:
        for place in places_of(kind)[1:]:
            with TextModel(models(kind), n_ctx=64, **PLACES[place]) as b:
                found = a.differences(b, PROMPT)
                assert found.first is None
                assert [d.name for d in found.nodes] == [
                    n for n in a.trace_names() if "attn_weights" not in n
                ]


def test_compare_by_command(models: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    files = [str(models("llama", dtype)) for dtype in ("f32", "q4_0")]
    args = ["compare", *files, "-d", "CPU", "-c", "64", "-n", "80"]
    assert main([*args, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["tokens"] == 80 and len(told["layers"]) == 3 and 0 < told["same_top"] <= 1
    shares = [told["divergence"][name] for name in ("median", "99 %", "largest")]
    assert 0 < shares[0] < shares[1] <= shares[2]
    assert main(args) == 0
    out = capfd.readouterr().out
    assert f"{told['layers'][2]:.2e}" in out and f"{100 * told['same_top']:.1f} %" in out
    for wrong, says in (
        (
            ["compare", files[0]],
            "give two GGUF files; for one file on two devices, use ggmlb diff",
        ),
        ([*args, "-f", "/nowhere"], "cannot read"),
    ):
        assert main(wrong) == 1
        assert says in capfd.readouterr().err


def test_diff_by_command(models: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    file = str(models("llama", "q4_0"))
    assert main(["diff", file, "-d", "CPU,CPU", "--prompt", "abc", "-n", "3"]) == 0
    out = capfd.readouterr().out
    assert "no node differs" in out and "all 3 tokens are the same" in out
    pytest.importorskip("llvmlite")
    args = ["diff", file, "-d", "CPU,LLVM", "--prompt", "abc abc", "--nmse", "1e-9"]
    assert main([*args, "--json"]) == 1
    told = json.loads(capfd.readouterr().out)
    assert told["first_difference"]["name"] == "blk.0.attn_q" and told["token"] is None
    assert main(args) == 1
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "first difference" in line]
    assert "blk.0.attn_q" in line and f"{told['first_difference']['values'][0]:.5g}" in line
