"""Looking inside text models: traced values, attention weights, the logit lens, steering."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError
from ggmlb.models import Placement, TextModel
from tests.support.text_models import (
    CENTRED,
    GEMMA,
    KINDS,
    LFM,
    N_EMBD,
    N_HEAD,
    NO_NORMS,
    PARALLEL,
    POST_ATTENTION,
    RECURRENT,
    has_experts,
)

PROMPT = [1, *(260 + (7 * i) % 55 for i in range(70))]
"""Longer than what is traced at once."""

HERE = {d.name for d in ggmlb.devices()}

PLACES: dict[str, dict[str, Any]] = {
    "CPU": {"devices": ["CPU"]},
    "LLVM": {"devices": ["LLVM", "CPU"]},
    "OpenCL": {"devices": ["OpenCL0", "CPU"]},
    "split": {
        "devices": ["OpenCL0", "LLVM", "CPU"],
        "placement": Placement(layers={"OpenCL0": "0", "LLVM": "1"}),
    },
    "pipeline": {"devices": ["OpenCL0", "CPU"], "placement": Placement(layers=2), "n_ubatch": 8},
    "meta": {"devices": ["CPU+OpenCL0", "CPU"]},
}


def places_of(kind: str) -> list[str]:
    """The places here for a kind of model: devices that differ do not share layers with experts."""
    here = [name for name, place in PLACES.items() if HERE.issuperset("+".join(place["devices"]).split("+"))]
    return [name for name in here if name != "meta" or not has_experts(kind)]


def on_places(kinds: Iterable[str], fast: Sequence[str] = ("CPU", "split")) -> pytest.MarkDecorator:
    """Each kind in each place; of most kinds, places that are not `fast` are slow tests."""
    cases = [
        pytest.param(kind, place, marks=() if kind == "llama" or place in fast else pytest.mark.slow)
        for kind in kinds
        for place in places_of(kind)
    ]
    return pytest.mark.parametrize(("kind", "place"), cases)


MIXERS = ("attn_out", "conv_out", "mamba_out", "delta_out", "time_out")
"""Names of what the mixer of a layer gives."""

FLAT = [kind for kind in KINDS if kind not in RECURRENT]


def weights_of(path: Path) -> dict[str, np.ndarray]:
    """The weights of a model in f32."""
    file = ggmlb.open_gguf(path)
    return {name: file.array(name) for name in file}


def norm(kind: str, x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    x = x - x.mean(axis=-1, keepdims=True) if kind in CENTRED else x
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    return x * weights.get(name + ".weight", weights.get(name)) + weights.get(name + ".bias", 0)


@on_places(KINDS)
def test_traced_values_are_those_of_a_plain_run(models: Callable[..., Path], kind: str, place: str) -> None:
    """What is traced leads to the logits; a trace changes neither them nor what is generated after it."""
    path = models(kind)
    weights = weights_of(path)
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    # Devices that fuse a node with the next one round otherwise; a trace keeps them from it. A KV cache of
    # f16 may round such keys and values to neighbours.
    is_exact = place == "CPU"
    with TextModel(path, n_ctx=96, kv_type="f16" if is_exact else "f32", **PLACES[place]) as model:
        logits = model.logits(PROMPT)
        tokens = model.generate(PROMPT[:9], **options).tokens
        found = model.trace(PROMPT, "*")
        assert list(found) == model.trace_names()
        assert np.array_equal(found["logits"], logits) or not is_exact
        near(found["logits"], logits)
        again = model.trace(PROMPT, ["blk.1.*", "logits"])
        assert all(np.array_equal(again[name], found[name]) for name in again if is_exact)
        assert np.array_equal(model.logits(PROMPT), logits)
        assert model.generate(PROMPT[:9], **options).tokens == tokens
        last = model.config.n_layer - 1
    assert all(np.isfinite(values).all() for values in found.values())
    assert all(len(v) == len(PROMPT) for name, v in found.items() if not name.endswith("weights"))
    # What each layer adds, and the norms, computed here.
    scale = N_EMBD**0.5 if kind in GEMMA else KINDS[kind].get("embedding_scale", 1)
    x = scale * weights["token_embd.weight"][PROMPT]
    assert np.allclose(found["token_embd"], x, rtol=1e-6)
    if kind == "rwkv7":
        x = norm(kind, x, weights, "token_embd_norm")
        near(found["token_embd_norm"], x)
    for i in range(last + 1):
        at = f"blk.{i}."
        if kind not in NO_NORMS:
            near(found[at + "attn_norm"], norm(kind, x, weights, at + "attn_norm"))
        if kind in PARALLEL:
            x = x + found[at + "attn_out"] + found[at + "ffn_out"]
        elif kind.startswith("mamba"):
            x = x + found[at + "ssm_out"]
        elif kind == "nemotron_h":
            x = x + sum(found[at + name] for name in (*MIXERS, "ffn_out") if at + name in found)
        else:
            near(found[at + "ffn_inp"], x + sum(found[at + name] for name in MIXERS if at + name in found))
            before = at + (
                "post_attention_norm"
                if kind in POST_ATTENTION
                else "attn_norm_2"
                if kind == "rwkv7"
                else "ffn_norm"
            )
            if kind not in NO_NORMS:
                near(found[before], norm(kind, found[at + "ffn_inp"], weights, before))
            x = found[at + "ffn_inp"] + found[at + "ffn_out"] + found.get(at + "per_layer_out", 0)
            x = x * weights.get(at + "layer_output_scale.weight", 1)
        near(found[at + "out"], x)
    last_norm = "token_embd_norm" if kind in LFM else "output_norm"
    near(found["output_norm"], norm(kind, x, weights, last_norm))
    output = weights.get("output.weight", weights["token_embd.weight"])
    near(found["output"], found["output_norm"] @ output.T, 1e-4)


def near(found: np.ndarray, expected: np.ndarray, most: float = 1e-5) -> None:
    assert np.abs(found - expected).max() < most * np.abs(expected).max()


@on_places(FLAT)
def test_attention_weights_mix_the_values(models: Callable[..., Path], kind: str, place: str) -> None:
    """Of each head and token they sum to 1, see no later token, and give what the fused attention gave."""
    with TextModel(models(kind), n_ctx=200, kv_type="f32", **PLACES[place]) as model:
        session = model.session()  # other sequences' cells lie between those that are traced
        session.generate(PROMPT[3:9], max_tokens=3, temperature=0, ignore_eos=True)
        is_latent = kind.startswith("deepseek2")
        values = "attn_qkv" if kind == "phi3" else "attn_kv_a_norm" if is_latent else "attn_v"
        values += "_norm" if kind.startswith("gemma4") else ""
        found = model.trace(PROMPT, ["blk.*.attn_weights", "blk.*.attn_heads", f"blk.*.{values}"])
        attentions = {i: a for i, a in enumerate(model.config.attentions) if a}
    for i, attention in attentions.items():
        window = attention.window
        weights = found[f"blk.{i}.attn_weights"]
        n = len(PROMPT)
        assert weights.shape == (N_HEAD, n, n)
        share = 1 - weights.sum(axis=-1)  # of the sinks
        assert (share > 1e-3).all() if kind == "gpt-oss" else np.allclose(share, 0, atol=1e-3)
        late = np.arange(n) - np.arange(n)[:, None]
        assert not weights[:, (late > 0) | ((late <= -window) & bool(window))].any()
        n_kv, size = attention.n_head_kv, attention.n_value
        kept = found[f"blk.{attention.source_of(i)}.{values}"].reshape(n, -1)
        kept = kept[:, -n_kv * size :].reshape(n, n_kv, size)
        mixed = np.einsum("hts,shd->thd", weights, np.repeat(kept, N_HEAD // n_kv, axis=1))
        near(found[f"blk.{i}.attn_heads"], mixed, 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_all_names_are_documented(models: Callable[..., Path], kind: str) -> None:
    page = (Path(__file__).parents[2] / "docs/text-models.md").read_text()
    with TextModel(models(kind), ["CPU"], n_ctx=32) as model:
        parts = {name.rpartition(".")[2] for name in model.trace_names()}
    assert [part for part in parts if not re.search(rf"`(blk\.N\.)?(\w+\.)?{part}`", page)] == []


def test_names_that_no_node_has(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        with pytest.raises(ArgumentError, match=r"'blk.\*.atn_out'; did you mean 'blk.\*.attn_out'"):
            model.trace([1], "blk.*.atn_out")
        with pytest.raises(
            ArgumentError, match=r"with 3 layers has the name 'blk.7.out'; did you mean 'blk.\*.out'"
        ):
            model.trace([1], ["logits", "blk.7.out"])
        for bad in ([7], [-1], []):
            with pytest.raises(ArgumentError, match="give indices from 0 to 2"):
                model.logit_lens([1], bad)


@on_places(["llama", "gemma2", "mamba"])
def test_the_lens_of_the_last_layer_is_the_output(models: Callable[..., Path], kind: str, place: str) -> None:
    with TextModel(models(kind), n_ctx=96, **PLACES[place]) as model:
        found = model.logit_lens(PROMPT, [1, model.config.n_layer - 1])
        logits = model.logits(PROMPT)
        states = model.trace(PROMPT, "blk.1.out")["blk.1.out"]
    assert found.logits.shape == (2, *logits.shape)
    near(found.logits[1], logits, 1e-4)
    assert np.abs(found.logits[0] - found.logits[1]).max() > 0.1
    weights = weights_of(models(kind))
    expected = (
        norm(kind, states, weights, "output_norm")
        @ weights.get("output.weight", weights["token_embd.weight"]).T
    )
    near(found.logits[0], 3 * np.tanh(expected / 3) if kind == "gemma2" else expected, 1e-4)
    ids, shares = found.best()
    assert ids.shape == (2, len(PROMPT)) and ((shares > 0) & (shares <= 1)).all()
    page = found._repr_html_()
    assert page.count("<tr>") == 3 and "background:rgba" in page and len(found.texts()[0]) == len(PROMPT)


@on_places(KINDS)
def test_steering_adds_to_the_hidden_states(models: Callable[..., Path], kind: str, place: str) -> None:
    rng = np.random.default_rng(5)
    vectors = {0: rng.standard_normal(N_EMBD), 2: rng.standard_normal(N_EMBD)}
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with TextModel(models(kind), n_ctx=96, **PLACES[place]) as model:
        plain, text = model.trace(PROMPT[:20], "blk.*.out"), model.generate(PROMPT[:20], **options).tokens
        logits = model.logits(PROMPT[:20])
        with model.steering(vectors, 1e-30):
            near(model.logits(PROMPT[:20]), logits, 1e-3)
        with model.steering(vectors), model.steering(vectors, -1):  # nothing, to the last bit
            assert np.array_equal(model.logits(PROMPT[:20]), logits)
            assert model.generate(PROMPT[:20], **options).tokens == text
        with model.steering({0: vectors[0]}), model.steering({0: vectors[0], 2: vectors[2]}, 10):
            steered = model.trace(PROMPT[:20], "blk.*.out")
            other = model.generate(PROMPT[:20], **options).tokens
            far = model.logits(PROMPT[:20])
        near(steered["blk.0.out"], plain["blk.0.out"] + 11 * vectors[0])
        assert np.abs(far - logits).max() > 0.1
        assert model.generate(PROMPT[:20], **options).tokens == text != other
        assert np.array_equal(model.logits(PROMPT[:20]), logits)


def test_vectors_that_do_not_fit(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        for vectors, says in (
            ({3: np.zeros(N_EMBD)}, "no layer 3; layers are 0 to 2"),
            ({"1": np.zeros(N_EMBD)}, "no layer '1'"),
            ({1: np.zeros(7)}, r"layer 1 has shape \(7,\); give 256 finite"),
            ({1: np.full(N_EMBD, np.nan)}, "give 256 finite"),
        ):
            with pytest.raises(ArgumentError, match=says), model.steering(vectors):
                pass
