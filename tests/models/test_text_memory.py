"""Memory of text models: all graphs share what was reserved at load."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import ggmlb
from ggmlb.models import TextModel
from ggmlb.models.text.decoder import N_OUT, SIZES, Decoder
from ggmlb.models.text.graph import TextGraph
from ggmlb.models.text.mamba import MambaGraph
from tests.support.text_models import KINDS, write_text_model

DEVICES = [d.name for d in ggmlb.devices()]
N_CTX = 700
SPLITS = {
    name: split
    for name, split in {
        "CPU": {"devices": ["CPU"]},
        "LLVM": {"devices": ["LLVM", "CPU"]},
        "OpenCL": {"devices": ["OpenCL0", "CPU"]},
        "layers of OpenCL": {"devices": ["OpenCL0", "CPU"], "layers_on": {"OpenCL0": "1-2"}},
        "kv q8_0": {"devices": ["OpenCL0", "CPU"], "gpu_layers": 1, "kv_type": "q8_0"},
        "feed-forward on the CPU": {"devices": ["OpenCL0", "CPU"], "override_tensors": {"ffn|ssm_x": "CPU"}},
    }.items()
    if {*split["devices"]} <= {*DEVICES}
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def write(kind: str, dtype: str = "f32") -> Path:
        return write_text_model(folder / f"{kind}-{dtype}.gguf", kind, dtype)

    return write


EACH = [
    pytest.param(kind, split, marks=() if (i + j) % len(SPLITS) == 0 else pytest.mark.slow)
    for i, kind in enumerate(KINDS)
    for j, split in enumerate(SPLITS)
]
"""Every kind of model with every split; one of each kind without the slow ones."""


@pytest.mark.parametrize(("kind", "split"), EACH)
def test_no_batch_needs_more_than_was_reserved(models: Callable[..., Path], kind: str, split: str) -> None:
    with TextModel(models(kind), n_ctx=N_CTX, **SPLITS[split]) as model:  # type: ignore[arg-type]
        decoder = model._engine.decoder
        scheduler = decoder._runs.scheduler  # type: ignore[attr-defined]
        reserved = [scheduler.buffer_size(b) for b in model.backends]
        parts = decoder._config, decoder._weights, decoder._memory  # type: ignore[attr-defined]
        if isinstance(decoder, Decoder):
            graphs = (
                TextGraph(*parts, n, n_out, n_kv)
                for n in SIZES
                for n_out in {1, min(n, 16), min(n, N_OUT)}
                for n_kv in (256, N_CTX)
            )
        else:
            graphs = (
                MambaGraph(*parts, n, n_sequences, n_out)
                for n_sequences in (1, 2, 4, 8, 16)
                for n in (1, 16, 512 // n_sequences)
                if n * n_sequences <= 512
                for n_out in {1, min(n * n_sequences, 16), min(n * n_sequences, N_OUT)}
            )
        for built in graphs:
            needed = scheduler.reserve_size(built.graph)
            assert all(n <= m for n, m in zip(needed, reserved, strict=True)), (needed, reserved)
        model.generate([5, 6, 7], max_tokens=3)
        model.perplexity("a b " * 40, n_ctx=32)
        assert [scheduler.buffer_size(b) for b in model.backends] == reserved
