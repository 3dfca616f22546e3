"""Text models through the CUDA backend on the simulated driver: two cards and the CPU, as a pipeline too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb.backends.cuda.plan import CudaPlan
from ggmlb.models import Placement, TextModel
from ggmlb.models.text.sampling import N_BEST
from tests.support.adapters import adapted, write_adapter
from tests.support.cuda_played import on_played_cards
from tests.support.text_models import KINDS, write_text_model

PROMPT = [1, *(260 + (7 * i) % 55 for i in range(9))]
ON_CPU: dict[str, Any] = {"devices": ["CPU"]}
ON_CARDS: dict[str, Any] = {
    "devices": ["CUDA0", "CUDA1", "CPU"],
    "placement": Placement(layers={"CUDA0": "0", "CUDA1": "1"}),
}


def compare(path: Path) -> None:
    logits, texts, devices = [], [], set[str]()
    for options in (ON_CPU, ON_CARDS, {**ON_CARDS, "n_ubatch": 4}):
        with TextModel(path, n_ctx=64, **options) as model:
            logits.append(model.logits(PROMPT))
            texts.append(model.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).tokens)
            devices = {p.device for p in model.scheduler.placement}
    assert devices == {"CUDA0", "CUDA1", "CPU"}
    assert np.abs(np.array(logits[1:]) - logits[0]).max() < 2e-2
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_two_cards_and_the_cpu(tmp_path: Path, kind: str) -> None:
    on_played_cards(compare, write_text_model(tmp_path / "model.gguf", kind))


def compare_inside(path: Path, adapter: Path) -> None:
    values: list[dict[str, Any]] = []
    for options in (ON_CPU, ON_CARDS):
        with TextModel(path, n_ctx=64, **options) as model:
            values.append(dict(model.trace(PROMPT, "*")))
            for _ in range(3):  # by steps, captured, replayed
                assert np.abs(values[-1]["logits"] - model.logits(PROMPT)).max() < 1e-3
            with model.steering({0: np.ones(256)}), model.load_adapter(adapter):
                values[-1]["changed"] = model.logits(PROMPT)
    cpu, cards = values
    for name in cpu.keys() - {name for name in cpu if any(w in name for w in ("chosen", "_exps", "ffn_act"))}:
        assert np.abs(cards[name] - cpu[name]).max() < 2e-3 * np.abs(cpu[name]).max(), name
    assert np.abs(cpu["changed"] - cpu["logits"]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3moe", "gemma2", "mamba"])
def test_what_is_inside_two_cards(tmp_path: Path, kind: str) -> None:
    path = write_text_model(tmp_path / "model.gguf", kind)
    adapter = write_adapter(tmp_path / "adapter.gguf", path, [w for w in adapted(path) if "embd" not in w])
    on_played_cards(compare_inside, path, adapter)


def with_and_without_candidates(path: Path) -> list[list[list[int]]]:
    """Return tokens sampled from candidates that the card finds, and from all logits."""
    found = []
    for n_best in (N_BEST, 0):
        with TextModel(path, n_ctx=64, devices=["CUDA0", "CPU"]) as model:
            decoder = model._engine.decoder
            assert decoder._n_best == N_BEST
            decoder._n_best = n_best
            found.append([
                model.generate(PROMPT, max_tokens=6, ignore_eos=True, **options).tokens
                for options in ({"temperature": 0}, {"seed": 2})
            ])  # fmt: skip
            assert bool(decoder._runs.last.best) == (n_best > 0)  # type: ignore[union-attr]
    return found


def test_a_card_finds_the_most_likely_tokens(tmp_path: Path) -> None:
    few, whole = on_played_cards(with_and_without_candidates, write_text_model(tmp_path / "model.gguf"))
    assert few == whole


def launches_of_a_token(paths: list[Path]) -> list[int]:
    """Return the launches of a token's step, for models that are loaded one after another."""
    found = []
    for path in paths:
        with TextModel(path, n_ctx=64, devices=["CUDA0", "CPU"]) as model:
            model.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
            plans = [x for x in gc.get_objects() if isinstance(x, CudaPlan) and x.parts]
            steps = [len(plan.segments[0].steps) for plan in plans if plan.segments]
        found.append(min(steps))
    return found


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("llama", 9), ("qwen2", 9), ("qwen3", 9), ("gemma3", 11), ("qwen3moe", 12), ("gpt-oss", 12)],
)
def test_launches_per_layer_of_a_token(tmp_path: Path, kind: str, limit: int) -> None:
    paths = [write_text_model(tmp_path / f"{n}.gguf", kind, "q8_0", n_layer=n) for n in (2, 3)]
    fewer, more = on_played_cards(launches_of_a_token, paths)
    assert more - fewer <= limit
