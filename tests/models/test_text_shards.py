"""Text models whose layers several devices share: whole heads, and slices of the feed-forward part."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError, DType, Tensor
from ggmlb.models import Placement, TextModel
from ggmlb.models.text.planner import open_planner
from ggmlb.models.text.shards import Shards
from tests.models.test_text_model import PROMPT, log_probs
from tests.support.text_models import KINDS, RECURRENT, has_experts, write_text_model

NAMES = {d.name for d in ggmlb.devices()}
PAIRS = [pair for pair in ("OpenCL0+CPU", "OpenCL0+OpenCL1") if {*pair.split("+")} <= NAMES]
SLOW = pytest.mark.slow
SOON = ("llama", "gemma3", "phi3")


def shards_of(path: Path) -> Shards:
    with ExitStack() as resources:
        planner = open_planner(resources, path, Placement(["CPU"]))
        return Shards(planner.layout)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", [k if k in SOON else pytest.param(k, marks=SLOW) for k in KINDS])
def test_shared_layers_compute_the_same(tmp_path: Path, kind: str, pair: str) -> None:
    path = write_text_model(tmp_path / "model.gguf", kind, "q8_0")
    if has_experts(kind) and pair.endswith("CPU"):
        with pytest.raises(ArgumentError, match="different devices cannot share layers with experts"):
            TextModel(path, [pair, "CPU"])
        return
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
        text = model.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).tokens
    with TextModel(path, [pair, "CPU"], n_ctx=64) as model:
        assert np.abs(log_probs(model.logits(PROMPT)) - expected).max() < 2e-2
        assert model.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).tokens == text
        session = model.session()
        session.generate(PROMPT, max_tokens=3, temperature=0)
        forecast, allocated = model.memory
    assert forecast == allocated
    if kind in RECURRENT:
        return
    kept = [use.nbytes for use in allocated if use.kind == "kv"]
    assert len(kept) == 2 and kept[0] == kept[1], "each device keeps the keys of its heads"


@pytest.mark.skipif("OpenCL0" not in NAMES, reason="there is no device with memory of its own")
def test_shared_layers_are_fitted(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "model.gguf", "llama", "q8_0", n_layer=4)
    tables = []
    for n in range(5):
        with ExitStack() as resources:
            planner = open_planner(resources, path, Placement(["OpenCL0+CPU", "CPU"], n), 64)
            tables.append(planner.forecast(planner.asked).total("OpenCL0"))
    for n in (1, 3):
        limits = {"OpenCL0": tables[n]}
        with ExitStack() as resources:
            asked = Placement(["OpenCL0+CPU", "CPU"], limits=limits)
            planner = open_planner(resources, path, asked, 64)
            found = planner.best()
            assert [found.placement.homes[i] for i in range(4)] == ["CPU"] * (4 - n) + ["OpenCL0+CPU"] * n
            cost = planner.costs(found.placement)["OpenCL0+CPU"]
            # Two sums a layer, of 256 elements that go to the other device and back; and what is copied.
            assert 2 * n * 2 * 256 * 4 <= cost.copied < 2 * n * 2 * 256 * 4 + 8192


def test_states(tmp_path: Path) -> None:
    """Heads stay whole, and meet those of keys; parts of rows are whole blocks."""
    shards = shards_of(write_text_model(tmp_path / "model.gguf", "llama", "q8_0"))

    def state(name: str, n_devices: int, *ne: int) -> Any:
        return str(shards(Tensor(DType.Q8_0, (*ne, 1, 1)[:4], name=name), n_devices))

    assert state("blk.1.attn_q.weight", 2, 256, 256, 1) == "axis 1: 128|128"
    assert state("blk.1.attn_k.weight", 2, 256, 128, 1) == "axis 1: 64|64"
    assert state("blk.1.attn_output.weight", 2, 256, 256, 1) == "axis 0: 128|128"
    assert state("cache_v.1", 2, 128, 64, 1) == "axis 0: 64|64"
    assert state("blk.1.ffn_down.weight", 3, 512, 256, 1) == "axis 0: 160|192|160"
    assert state("blk.1.ffn_up.weight", 3, 256, 512, 1) == "axis 1: 160|192|160"
    assert state("output.weight", 3, 256, 320, 1) == "axis 1: 107|106|107"
    assert state("blk.1.attn_norm.weight", 2, 256, 1, 1) == "MIRRORED"
    for name, n in (("attn_q", 256), ("attn_k", 128)):  # two heads of keys for three devices
        assert state(f"blk.1.{name}.weight", 3, 256, n, 1) == "MIRRORED"
    # Of q4_K, a block spans the 128 elements that a head of keys has of the output's columns.
    coarse = shards_of(write_text_model(tmp_path / "coarse.gguf", "llama", "q4_K"))
    assert str(coarse(Tensor(DType.Q4_K, (256, 256, 1, 1), name="blk.0.attn_q.weight"), 2)) == "MIRRORED"


@pytest.mark.skipif("OpenCL0" not in NAMES, reason="there is no device with memory of its own")
def test_rows_are_spread_over_devices_of_a_kind(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "model.gguf", "llama", "q8_0")
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    spread = {r"(attn_[qkv]|ffn_up)\.weight": "OpenCL0_Split"}
    with TextModel(path, placement=Placement(["OpenCL0", "CPU"], overrides=spread), n_ctx=64) as model:
        assert np.abs(log_probs(model.logits(PROMPT)) - expected).max() < 2e-2
        forecast, allocated = model.memory
        assert forecast == allocated
        of_rows = {u.device for u in allocated if u.kind == "weights" and u.device != "CPU"}
        assert of_rows == {name for name in NAMES if name.startswith("OpenCL")}
    with pytest.raises(ArgumentError, match="CPU_Split: CPU cannot split rows; name a device"):
        TextModel(path, placement=Placement(["CPU"], overrides={"ffn": "CPU_Split"}))
    with pytest.raises(ArgumentError, match="'ffn' is for 'CUDA9_Split'; the devices are CPU"):
        TextModel(path, placement=Placement(["CPU"], overrides={"ffn": "CUDA9_Split"}))
