"""Memory of text models: the forecast is what is allocated at load, and all graphs share that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ggmlb
from ggmlb.models import Placement, TextModel
from ggmlb.models.text.decoder import N_OUT, SIZES
from tests.support.text_models import KINDS, has_experts

DEVICES = [d.name for d in ggmlb.devices()]
N_CTX = 700
OPENCL = ["OpenCL0", "CPU"]
SPLITS: dict[str, dict[str, Any]] = {
    name: split
    for name, split in {
        "CPU": {"devices": ["CPU"]},
        "LLVM": {"devices": ["LLVM", "CPU"]},
        "OpenCL": {"devices": OPENCL},
        "layers of OpenCL": {"devices": OPENCL, "placement": Placement(layers={"OpenCL0": "1-2"})},
        "output on the CPU": {
            "devices": OPENCL,
            "placement": Placement(layers={"OpenCL0": "all", "CPU": "output"}),
        },
        "kv q8_0": {"devices": OPENCL, "placement": Placement(layers=1), "kv_type": "q8_0"},
        "feed-forward on the CPU": {
            "devices": OPENCL,
            "placement": Placement(overrides={"ffn|ssm_x|ssm_out|channel_mix": "CPU"}),
        },
        "OpenCL beside LLVM": {
            "devices": ["OpenCL0", "LLVM", "CPU"],
            "placement": Placement(layers={"LLVM": "0,2"}),
        },
        "two of OpenCL": {
            "devices": ["OpenCL0", "OpenCL1", "CPU"],
            "placement": Placement(layers={"OpenCL1": "0-1"}),
        },
        "shared": {"devices": ["OpenCL0+CPU", "CPU"]},
        "layers shared by two": {
            "devices": ["OpenCL0+OpenCL1", "CPU"],
            "placement": Placement(layers=2),
        },
        "rows of two": {
            "devices": OPENCL,
            "placement": Placement(
                overrides={r"(attn_[qkv]|attn_qkv|ffn_up|ssm_in|channel_mix_key)\.weight": "OpenCL0_Split"}
            ),
        },
        "pipeline": {"devices": OPENCL, "placement": Placement(layers=2), "n_ubatch": 32},
    }.items()
    if {part for name in split["devices"] for part in name.split("+")} <= {*DEVICES}
}


def is_possible(kind: str, split: str) -> bool:
    """Whether a split is of this kind of model: devices that differ share no experts."""
    return split != "shared" or not has_experts(kind)


EACH = [
    pytest.param(kind, split, marks=() if (i + j) % len(SPLITS) == 0 else pytest.mark.slow)
    for i, kind in enumerate(KINDS)
    for j, split in enumerate(SPLITS)
    if is_possible(kind, split)
]
"""Every kind of model with every split; one of each kind without the slow ones."""


@pytest.mark.parametrize(("kind", "split"), EACH)
def test_no_batch_needs_more_than_was_reserved(models: Callable[..., Path], kind: str, split: str) -> None:
    with TextModel(models(kind), n_ctx=N_CTX, **SPLITS[split]) as model:
        decoder = model._engine.decoder
        scheduler = decoder._runs.scheduler  # type: ignore[attr-defined]
        reserved = [scheduler.buffer_size(b) for b in model.backends]
        if decoder._memory.slots is None:
            sizes = [(n, 1) for n in SIZES if n <= SPLITS[split].get("n_ubatch", 512)]
        else:  # as many tokens of each sequence
            most = SPLITS[split].get("n_ubatch", 512)
            each = [(min(n, most), m) for m in (1, 2, 4, 8, 16) for n in (1, 16, 512 // m)]
            sizes = [(n * m, m) for n, m in each if n * m <= 512]
        graphs = (
            decoder._new_graph(n, n_out, n_kv, n_sequences)
            for n, n_sequences in sizes
            for n_out in {1, min(n, 16), min(n, N_OUT)}
            for n_kv in ((256, N_CTX) if decoder._memory.cells else (0,))
            if n <= n_kv or not n_kv  # the tokens of a batch are among the cells that it reads
        )
        for built in graphs:
            needed = scheduler.reserve_size(built.graph)
            assert all(n <= m for n, m in zip(needed, reserved, strict=True)), (needed, reserved)
        devices = apart(model)
        free = [d.memory[0] for d in devices]
        model.generate([5, 6, 7], max_tokens=3)
        model.perplexity("a b " * 40, n_ctx=32)
        assert [scheduler.buffer_size(b) for b in model.backends] == reserved
        now = [d.memory[0] for d in devices]
        # Records of bad indices; of what devices share, sums that arrive, and what is sent and gathered.
        more = (1 << 10) + (1 << 20 if "shared" in split else 8 << 20 if "rows" in split else 0)
        assert all(0 <= then - n <= more for then, n in zip(free, now, strict=True))


def apart(model: TextModel) -> list[ggmlb.Device]:
    """The devices that count their own memory."""
    return [s.device for b in model.backends for s in b.streams if s.name.startswith("OpenCL")]


TYPES = ("f16", "q8_0", "q4_0", "q4_K", "q6_K")
TYPED = [
    pytest.param(
        kind,
        split,
        dtype,
        marks=() if 3 * i % len(SPLITS) == j and TYPES[i % 5] == dtype else pytest.mark.slow,
    )
    for i, kind in enumerate(KINDS)
    for j, split in enumerate(SPLITS)
    if is_possible(kind, split)
    for dtype in TYPES
]


@pytest.mark.parametrize(("kind", "split", "dtype"), TYPED)
def test_the_forecast_is_what_is_allocated(
    models: Callable[..., Path], kind: str, split: str, dtype: str
) -> None:
    before = {d.name: d.memory[0] for d in ggmlb.devices()}
    with TextModel(models(kind, dtype), n_ctx=N_CTX, **SPLITS[split]) as model:
        taken = {d.name: before[d.name] - d.memory[0] for d in apart(model)}
        forecast, allocated = model.memory
        assert forecast == allocated and forecast.uses == allocated.uses
        assert {d: n for d, n in taken.items() if n} == {
            d: allocated.total(d) for d in allocated.devices if d in taken
        }
        assert {"weights", "kv", "compute"} == {use.kind for use in allocated}
        assert allocated.total() == sum(use.nbytes for use in allocated)
        assert f"{allocated.uses[0].nbytes:,}" in str(model.memory)
    now = {d.name: d.memory[0] for d in ggmlb.devices()}
    assert all(now[name] == before[name] for name in taken)
