"""Prompts whose batches are queued without a wait; what the host and the devices prepare of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import BackendError, Scheduler
from ggmlb.core.errors import ArgumentError
from ggmlb.models import Placement, TextModel
from ggmlb.models.runs import Runs
from ggmlb.models.text import graph
from ggmlb.models.text.decoder import N_BATCH, Decoder, Token
from ggmlb.models.text.kv_cache import FREE

DEVICES = [d.name for d in ggmlb.devices()]
ON_OPENCL: dict[str, Any] = {"devices": ["OpenCL0", "CPU"], "placement": Placement(layers={"OpenCL0": "all"})}
PROMPT = [260 + (7 * i) % 55 for i in range(200)]

pytestmark = pytest.mark.skipif("OpenCL0" not in DEVICES, reason="a device with memory of its own")


def tokens_of(sequence: int, numbers: list[int], start: int = 0, wants: bool = True) -> list[Token]:
    last = len(numbers) - 1
    return [Token(n, sequence, start + i, wants and i == last) for i, n in enumerate(numbers)]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
def test_a_prompt_is_queued_batch_by_batch(
    models: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last batch, which has logits, is waited for, though graphs of two sizes take turns."""
    n = len(PROMPT)
    with TextModel(models(kind), ["CPU"], n_ctx=512) as model:
        expected = model._engine.decoder.decode(tokens_of(1, PROMPT))
    waits: list[object] = []
    wait = Scheduler.synchronize
    monkeypatch.setattr(Scheduler, "synchronize", lambda s: (waits.append(s), wait(s)))
    with TextModel(models(kind), n_ctx=512, **ON_OPENCL) as model:
        decoder = model._engine.decoder
        for sequence in range(2):
            waits.clear()
            for start in range(0, n - 40, 32):
                size = 32 if start < 96 else 16
                found = decoder.decode(tokens_of(sequence, PROMPT[start : start + size], start, wants=False))
                assert not found.size
                if size == 16:
                    decoder.decode(
                        tokens_of(sequence, PROMPT[start + 16 : start + 32], start + 16, wants=False)
                    )
            assert not waits
            found = decoder.decode(tokens_of(sequence, PROMPT[160:], 160))
            has_states = model._loaded.memory.slots is not None  # a checkpoint waits
            assert len(waits) == 1 + has_states
            assert np.abs(found - expected).max() < 2e-2


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_masks_are_the_same_by_host_and_device(models: Callable[..., Path], kind: str) -> None:
    """Several sequences in a batch, some continued, with cells of removed ones between them."""
    found = []
    for _ in range(2):
        with TextModel(models(kind), n_ctx=700, **ON_OPENCL) as model:
            decoder = model._engine.decoder
            assert decoder._computes_masks
            if found:
                decoder._computes_masks.clear()
            decoder.decode(
                [*tokens_of(1, PROMPT[:50]), *tokens_of(2, PROMPT[:70]), *tokens_of(3, PROMPT[9:99])]
            )
            model._engine.memory.remove(2)
            batch = [
                *tokens_of(3, PROMPT[:60], 90),
                *tokens_of(4, PROMPT[3:90]),
                *tokens_of(1, PROMPT[:80], 50),
            ]
            found.append(decoder.decode(batch))
            last = decoder._runs.last
            assert last is not None and bool(last.computed) == (len(found) == 1)
    assert found[0].shape[0] == 3
    assert np.abs(found[0] - found[1]).max() < 1e-5


def test_the_mask_of_one_token_is_uploaded_however_large(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "MAX_UPLOADED", 0)
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with TextModel(models(), ["CPU"], n_ctx=256) as model:
        expected = model.generate(PROMPT[:60], **options).tokens
    with TextModel(models(), n_ctx=256, **ON_OPENCL) as model:
        assert model.generate(PROMPT[:60], **options).tokens == expected


def test_tokens_of_sequences_may_alternate(models: Callable[..., Path]) -> None:
    rows = {}
    with TextModel(models(), n_ctx=512, **ON_OPENCL) as model:
        decoder = model._engine.decoder
        for mixed in (False, True):
            a, b = (
                [Token(t, s + 4 * mixed, i, i > 37) for i, t in enumerate(PROMPT[s : s + 40])] for s in (1, 2)
            )
            batch = [x for pair in zip(a, b, strict=True) for x in pair] if mixed else [*a, *b]
            rows[mixed] = decoder.decode(batch)
    assert np.abs(rows[True] - rows[False][[0, 2, 1, 3]]).max() < 1e-4
    assert np.abs(rows[False][0] - rows[False][2]).max() > 1e-2


def test_outputs_are_those_of_the_tokens_that_want_them(models: Callable[..., Path]) -> None:
    """Three of four tokens: as many rows as the graph has tokens, and not the first ones."""
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        decoder = model._engine.decoder
        alone = [decoder.decode(tokens_of(s, PROMPT[:n])) for s, n in ((1, 2), (2, 1), (3, 1))]
        together = [*tokens_of(4, PROMPT[:2]), *tokens_of(5, PROMPT[:1]), *tokens_of(6, PROMPT[:1])]
        assert np.abs(decoder.decode(together) - np.concatenate(alone)).max() < 1e-4


def test_outputs_of_a_whole_batch_are_not_copied(models: Callable[..., Path]) -> None:
    with TextModel(models("llama"), ["CPU"], n_ctx=64) as model:
        rows = model._engine.decoder.likeliest([Token(5, i, 0, True) for i in range(2)], 0)
        assert not rows.flags.owndata


def test_spans_of_cells_are_the_mask(models: Callable[..., Path]) -> None:
    rng = np.random.default_rng(0)
    with TextModel(models(), ["CPU"], n_ctx=300) as model:
        memory = model._loaded.memory.cells
        assert memory is not None
        for step in range(40):
            lengths = {s: int(np.count_nonzero(memory.sequence == s)) for s in range(4)}
            runs = [(s, int(rng.integers(1, 30))) for s in rng.permutation(4)[: rng.integers(1, 5)]]
            sequences = np.concatenate([np.full(n, s, np.int32) for s, n in runs])
            positions = np.concatenate([lengths[s] + np.arange(n, dtype=np.int32) for s, n in runs])
            if sequences.size > np.count_nonzero(memory.sequence == FREE):
                for s in range(4):
                    memory.remove(s, int(rng.integers(lengths[s] + 1)))
                continue
            memory.occupy(memory.find_cells(sequences.size), sequences, positions)
            padding = np.full(step % 7, FREE, np.int32)
            given = np.append(sequences, padding), np.append(positions, 0 * padding)
            for window in (0, 1, 5, 64):
                centre, half = memory.spans(*given, 280, window)
                order = np.arange(given[0].size)[:, None]
                seen = np.abs(order - centre.astype(np.float32)) < half
                expected = memory.mask(*given, 280, window) == 0
                n = sequences.size
                assert np.array_equal(seen[:n], expected[:n])
                assert (seen[n:] >= seen[n - 1]).all()  # padding tokens see something


FAILING: dict[str, Callable[[Decoder], object]] = {
    "batch": lambda decoder: decoder.decode(tokens_of(3, PROMPT[:4])),
    "access": lambda decoder: decoder._memory.save(1),
}


@pytest.mark.parametrize("failing", FAILING)
def test_a_failure_loses_the_batches_queued_before_it(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    with TextModel(models(), n_ctx=256, **ON_OPENCL) as model:
        decoder, memory = model._engine.decoder, model._engine.memory.cells
        assert memory is not None
        expected = decoder.decode(tokens_of(1, PROMPT[:40]))
        decoder.decode(tokens_of(2, PROMPT[:20], wants=False))
        with monkeypatch.context() as patch, pytest.raises(BackendError, match="lost"):
            patch.setattr(Runs, "wait", lambda self: (_ for _ in ()).throw(BackendError("lost")))
            FAILING[failing](decoder)
        assert {*memory.sequence.tolist()} == {FREE, 1}, "what was computed before stays"
        for _ in range(2):
            with pytest.raises(BackendError, match="sequence 2 continues at position 20, but only 0 of its"):
                decoder.decode(tokens_of(2, PROMPT[20:40], 20))
        found = decoder.decode(tokens_of(2, PROMPT[:40]))
        assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "rwkv7"])
@pytest.mark.parametrize("failing", FAILING)
def test_a_failure_of_a_recurrent_model_loses_the_steps_queued_before_it(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, failing: str, kind: str
) -> None:
    with TextModel(models(kind), n_ctx=256, **ON_OPENCL) as model:
        decoder = model._engine.decoder
        expected = decoder.decode(tokens_of(1, PROMPT[:40]))
        decoder.decode(tokens_of(2, PROMPT[:20], wants=False))
        with monkeypatch.context() as patch, pytest.raises(BackendError, match="lost"):
            patch.setattr(Runs, "wait", lambda self: (_ for _ in ()).throw(BackendError("lost")))
            FAILING[failing](decoder)
        with pytest.raises(ArgumentError, match="continues at position 20, but its states hold 0 tokens"):
            decoder.decode(tokens_of(2, PROMPT[20:40], 20))
        found = decoder.decode(tokens_of(2, PROMPT[:40]))
        assert np.abs(found - expected).max() < 1e-4


def test_many_queued_batches_wait_now_and_then(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[object] = []
    wait = Runs.wait
    monkeypatch.setattr(Runs, "wait", lambda runs: (waits.append(runs), wait(runs)))
    with TextModel(models(), n_ctx=256, **ON_OPENCL) as model:
        for i in range(40):
            model._engine.decoder.decode(tokens_of(1, PROMPT[i : i + 1], i, wants=False))
    assert len(waits) == 2


@pytest.mark.parametrize("dtype", ["q4_0", "f16", "f32"])
def test_embeddings_in_host_memory_are_looked_up_there(models: Callable[..., Path], dtype: str) -> None:
    """The device dequantises the rows; no node is computed by the CPU."""
    with TextModel(models(dtype=dtype), ["CPU"], n_ctx=64) as model:
        expected = model.logits(PROMPT[:9])
    with TextModel(models(dtype=dtype), n_ctx=64, **ON_OPENCL) as model:
        found = model.logits(PROMPT[:9])
        assert {p.device for p in model.scheduler.placement} == {"OpenCL0"}
        for wrong in (-1, 1 << 20):
            with pytest.raises(ArgumentError, match="token numbers must be 0 to"):
                model._engine.decoder.decode(tokens_of(7, [5, wrong]))
    assert np.abs(found - expected).max() < 2e-2


@pytest.mark.parametrize(("n_tokens", "n_used", "coarse", "n_kv"), [
    (1, 1, True, 256), (1, 2049, True, 2560), (64, 4500, True, 5120), (1, 7000, True, 7168),
    (512, 300, True, 4096), (512, 4097, True, 8192), (512, 8300, True, 10000), (512, 300, False, 512),
    (1, 2049, False, 2304),
])  # fmt: skip
def test_graphs_read_few_different_numbers_of_cells(
    models: Callable[..., Path], n_tokens: int, n_used: int, coarse: bool, n_kv: int
) -> None:
    with TextModel(models(), ["CPU"], n_ctx=10000) as model:
        decoder = model._engine.decoder
        assert n_tokens <= N_BATCH and not decoder._is_coarse
        assert decoder._memory.cells is not None
        decoder._is_coarse, decoder._memory.cells.n_used = coarse, n_used
        assert decoder._n_kv(n_tokens) == n_kv
