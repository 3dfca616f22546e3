"""What a card must answer first: each test records a sentence, and `make test-gpu` shows them at the end."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda import backend_reg
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.buffer import PeerAccess
from ggmlb.backends.cuda.device import CudaDevice
from ggmlb.backends.cuda.plan import Segment
from ggmlb.models import TextModel
from tests.support.text_models import write_text_model

Answer = Callable[[str], None]

PROMPT = [1, *(260 + (7 * i) % 55 for i in range(39))]


@pytest.fixture
def answer(record_property: Callable[[str, object], None]) -> Answer:
    """Records a sentence for the summary."""
    return partial(record_property, "answer")


def test_direct_copies_between_cards(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an IOMMU, CUDA may report success and corrupt the data: that is an answer, no failure."""
    cards: Any = backend_reg().devices
    monkeypatch.setenv("GGMLB_CUDA_P2P", "1")
    for a, b in itertools.combinations(cards, 2):
        peers = PeerAccess()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            peers.enable(a, b)
        if told:
            answer(f"Direct copies: {told[0].message}.")
            continue
        for x, y in ((a, b), (b, a)):
            x.driver.disable_peer(x.index, y.index)
        answer(
            f"Direct copies between {a.name} and {b.name}: a pattern arrived intact in both directions; use "
            "GGMLB_CUDA_P2P=1."
        )
    if len(cards) == 1:
        answer("Direct copies: there is one card.")


@pytest.mark.parametrize("kind", ["llama", "qwen3moe", "gemma3", "mamba"])
def test_every_step_of_a_model_is_captured(
    card: CudaDevice, kind: str, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt three times and its continuation: whatever runs again must be replayed."""
    seen: dict[int, Segment] = {}
    run = Segment.run

    def watched(segment: Segment, stream: Any) -> None:
        seen[id(segment)] = segment
        run(segment, stream)

    monkeypatch.setattr(Segment, "run", watched)
    path = write_text_model(tmp_path / "model.gguf", kind, "q4_0")
    with TextModel(path, [card.name, "CPU"], n_ctx=128) as model:
        for _ in range(3):
            model.logits(PROMPT)
        seen.clear()
        model.logits(PROMPT)
        model.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
        model.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
    refused = {s.why_not for s in seen.values() if s.why_not is not None}
    replayed = [s for s in seen.values() if s.is_captured]
    alone = [s for s in seen.values() if not s.is_captured and s.why_not is None and s.can_capture]
    n, n_alone = (sum(len(s.steps) for s in some) for some in (replayed, alone))
    answer(
        f"Capture of {kind}: {n} steps are replayed in {len(replayed)} CUDA graphs"
        + (f"; {n_alone} steps of graphs that ran once are not yet" if alone else "")
        + (f"; refused: {', '.join(map(str, refused))}." if refused else "; none was refused.")
    )
    assert not refused
    assert replayed


def test_dependent_launches(
    card: CudaDevice, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of many short kernels, without and with GGMLB_CUDA_PDL=1: the same bits, and the rates."""
    logits, rates = [], []
    path = write_text_model(tmp_path / "model.gguf", "llama", "q4_0", n_layer=4)
    for wanted in ("0", "1"):
        monkeypatch.setenv("GGMLB_CUDA_PDL", wanted)
        for kept in ("_dependent", "_compiled"):
            monkeypatch.setattr(card.driver, kept, {})
        with TextModel(path, [card.name, "CPU"], n_ctx=128) as model:
            for _ in range(2):
                found = model.generate(PROMPT[:9], max_tokens=9, temperature=0, ignore_eos=True)
            rates.append(found.tokens_per_second)
            logits.append(model.logits([*PROMPT[:9], *found.tokens]))
        is_dependent: bool = card.driver._dependent[card.index]  # type: ignore[attr-defined]
    if not is_dependent:
        answer("Programmatic dependent launch: not on this card, or its driver.")
        return
    answer(
        f"Programmatic dependent launch: {'the same' if np.array_equal(*logits) else 'other'} logits, "
        f"{rates[1] / rates[0]:.2f} times the tokens per second (GGMLB_CUDA_PDL=1)."
    )
    assert np.array_equal(*logits)


def test_executable_graphs_are_updated(
    stream: CudaBackend, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs with the same kernels, of other sizes, after the first ones were dropped."""
    driver, updates = stream.device.driver, list[bool]()
    update = driver.exec_update

    def watched(executable: int, graph: int) -> bool:
        updates.append(update(executable, graph))
        return updates[-1]

    monkeypatch.setattr(driver, "exec_update", watched)
    for columns in (2, 40):  # kernels alone; with a product of cuBLAS
        for n_rows in (96, 96, 64):  # by cuBLAS, other sizes have other kernels, and are not asked for
            ctx = Context()
            w, x = ctx.new_tensor(DType.F16, (64, n_rows)), ctx.new_tensor(DType.F32, (64, columns))
            y = ctx.rms_norm(ctx.relu(ctx.scale(ctx.mul_mat(w, x), 2.0)), 1e-5)
            graph = Graph().build_forward_expand(y)
            with alloc_ctx_tensors(ctx, stream):
                w.set_array(np.ones((n_rows, 64), np.float32))
                x.set_array(np.ones((columns, 64), np.float32))
                for _ in range(3):
                    stream.graph_compute(graph)
                assert np.allclose(y.to_numpy(), 1, atol=1e-3)
                stream._plans.clear()
    n = sum(updates)
    answer(
        f"cuGraphExecUpdate: {n} of {len(updates)} updates accepted"
        + ("." if n == len(updates) else "; each of the others costs an instantiation.")
    )
    assert updates
    assert n == len(updates)
