"""Generations of many threads in one queue, prefixes that they share, and the end of the context."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from ggmlb import ArgumentError, BackendError, FreedError, ModelError
from ggmlb.models import TextModel
from ggmlb.models.gguf import GgufFile
from ggmlb.models.text.decoder import Token

SHARED = [1, *(260 + (7 * i) % 55 for i in range(30))]


def test_jobs_of_many_threads_have_the_tokens_of_each_alone(models: Callable[..., Path]) -> None:
    prompts = [[*SHARED[: 5 + i], 261 + i] for i in range(12)]
    with TextModel(models(), ["CPU"], n_ctx=512, kv_type="f32") as model:
        alone = [model.generate(p, max_tokens=6, temperature=0, ignore_eos=True).tokens for p in prompts]
        with model.queue() as queue, ThreadPoolExecutor(12) as pool:
            jobs = list(
                pool.map(lambda p: queue.submit(p, max_tokens=6, temperature=0, ignore_eos=True), prompts)
            )
            assert [job.wait(600).tokens for job in jobs] == alone
            assert queue.n_generated == 72 and (queue.n_active, queue.n_waiting) == (0, 0)
        assert model._engine.memory.fits({99: 512})
        with pytest.raises(FreedError, match=r"submit: this queue was closed"):
            queue.submit([1])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba"])
def test_a_prefix_is_computed_once(models: Callable[..., Path], kind: str) -> None:
    prompts = [[*SHARED, 270 + i, 280] for i in range(3)]
    with TextModel(models(kind), ["CPU"], n_ctx=256, kv_type="f32") as model:
        alone = [model.generate(p, max_tokens=4, temperature=0, ignore_eos=True).tokens for p in prompts]
        with model.queue() as queue:
            at_once = [queue.submit(p, max_tokens=4, temperature=0, ignore_eos=True) for p in prompts]
            assert [job.wait(600).tokens for job in at_once] == alone
            again = queue.submit([*prompts[0], *alone[0], 265], max_tokens=1, ignore_eos=True)
            again.wait(600)
        if kind == "mamba":  # states of running sequences are not shared, and these have no checkpoints
            assert [job.n_reused for job in at_once] == [0, 0, 0]
        else:
            assert [job.n_reused for job in at_once] == [0, 31, 31]
        assert again.n_reused == len(prompts[0]) + 3
        assert model.generate(prompts[0], max_tokens=4, temperature=0, ignore_eos=True).tokens == alone[0]


def test_states_of_a_whole_sequence_are_continued(models: Callable[..., Path]) -> None:
    """Those of a sequence with a longer common prefix, but more tokens, cannot be."""
    with TextModel(models("mamba"), ["CPU"], n_ctx=256) as model, model.queue() as queue:
        n_reused = []
        for prompt in ([*SHARED, *range(270, 290)], SHARED, [*SHARED, 270, 281]):
            job = queue.submit(prompt, max_tokens=1, ignore_eos=True)
            job.wait(600)
            n_reused.append(job.n_reused)
        assert n_reused == [0, 0, len(SHARED)]


def test_jobs_that_outgrow_the_context_are_paused_and_end_alike(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 262 + i] for i in range(3)]
    with TextModel(models(), ["CPU"], n_ctx=144, kv_type="f32") as model:
        alone = [model.generate(p, max_tokens=80, temperature=0, ignore_eos=True).tokens for p in prompts]
        computed: list[Token] = []
        likeliest = model._engine.decoder.likeliest

        def noted(batch: list[Token], k: int) -> np.ndarray:
            computed.extend(batch)
            return likeliest(batch, k)

        monkeypatch.setattr(model._engine.decoder, "likeliest", noted)
        with model.queue() as queue:
            jobs = [queue.submit(p, max_tokens=80, temperature=0, ignore_eos=True) for p in prompts]
            assert [job.wait(600).tokens for job in jobs] == alone
    assert len({(t.sequence, t.position) for t in computed}) < len(computed)


def test_a_cancelled_job_ends_and_others_go_on(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=4096) as model, model.queue() as queue:
        begun = Event()
        endless = queue.submit(
            [1, 5], max_tokens=-1, ignore_eos=True, on_piece=lambda piece, done: begun.set(), logprobs=1
        )
        other = queue.submit([1, 6], max_tokens=5, ignore_eos=True)
        assert other.wait(600).stopped_by == "length" and not endless.is_done
        endless.cancel()
        assert endless.wait(600).stopped_by == "cancelled" and begun.is_set()


def test_a_failing_processor_fails_its_own_job_only(models: Callable[..., Path]) -> None:
    def shorter(tokens: object, logits: np.ndarray) -> np.ndarray:
        return logits[:3]

    with TextModel(models(), ["CPU"], n_ctx=64) as model, model.queue() as queue:
        bad = queue.submit([1, 5], max_tokens=5, logits_processor=shorter)
        good = queue.submit([1, 6], max_tokens=5, ignore_eos=True)
        assert len(good.wait(600).tokens) == 5
        with pytest.raises(ArgumentError, match="logits_processor returned"):
            bad.wait(600)
        with pytest.raises(ArgumentError, match="logits_processor returned"):
            model.generate([1, 5], logits_processor=shorter)


def test_a_failing_callback_fails_its_own_job_only(models: Callable[..., Path]) -> None:
    def fails(piece: str, is_done: bool) -> None:
        raise KeyError("of the callback")

    with TextModel(models(), ["CPU"], n_ctx=64) as model, model.queue() as queue:
        bad = queue.submit([1, 5], max_tokens=20, ignore_eos=True, on_piece=fails)
        good = queue.submit([1, 6], max_tokens=20, ignore_eos=True)
        assert len(good.wait(600).tokens) == 20
        with pytest.raises(KeyError, match="of the callback"):
            bad.wait(600)
        assert len(queue.submit([1, 7], max_tokens=3, ignore_eos=True).wait(600).tokens) == 3


def test_nan_fails_its_own_job_only(models: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "nan.gguf"
    path.write_bytes(models().read_bytes())
    tensor = GgufFile(path)["token_embd.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset + 5 * tensor.nbytes // tensor.ne[1])
        file.write(np.float32(np.nan).tobytes())
    with TextModel(path, ["CPU"], n_ctx=128, kv_type="f32") as model:
        alone = model.generate([1, 6], max_tokens=9, temperature=0, logit_bias={5: -np.inf}).tokens
        with model.queue() as queue:
            good, bad = (
                queue.submit([1, token], max_tokens=9, temperature=0, logit_bias={5: -np.inf})
                for token in (6, 5)
            )
            with pytest.raises(ModelError, match="NaN or infinity after token 2"):
                bad.wait(600)
            assert good.wait(600).tokens == alone


def test_a_device_that_fails_twice_ends_its_jobs_only(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails, and so does the end of its sequences; later jobs are computed."""

    def fail(*_: object) -> None:
        raise BackendError("no device")

    with TextModel(models(), ["CPU"], n_ctx=128, kv_type="f32") as model, model.queue() as queue:
        with monkeypatch.context() as patch:
            patch.setattr(model._engine, "step", fail)
            patch.setattr(model._engine.memory, "remove", fail)
            for _ in range(2):
                with pytest.raises(BackendError, match="no device"):
                    queue.submit(SHARED, max_tokens=2).wait(600)
        assert len(queue.submit(SHARED, max_tokens=2, ignore_eos=True).wait(600).tokens) == 2


def test_finished_sequences_make_room_for_a_single_job(models: Callable[..., Path]) -> None:
    """It starts beside what is kept of another, and outgrows the rest of the context later."""
    with TextModel(models(), ["CPU"], n_ctx=256) as model, model.queue() as queue:
        queue.submit(SHARED * 4, max_tokens=40, ignore_eos=True).wait(600)
        long = queue.submit([1, 262], max_tokens=200, ignore_eos=True).wait(600)
        assert (long.stopped_by, len(long.tokens)) == ("length", 200)


def test_the_end_of_the_context_is_told(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        full = model.generate([1, 5], max_tokens=-1, ignore_eos=True)
        assert (full.stopped_by, len(full.tokens)) == ("context", 31)
        assert model.generate([1, 5], max_tokens=3, ignore_eos=True).stopped_by == "length"
        with pytest.raises(ArgumentError, match="max_tokens is -2; give -1 to"):
            model.generate([1], max_tokens=-2)


def test_a_stop_text_need_not_be_in_a_list(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        text = model.generate([1, 5], max_tokens=20, temperature=0, ignore_eos=True).text
        part = text[3:5]
        stopped = model.generate([1, 5], max_tokens=20, temperature=0, ignore_eos=True, stop=part)
        assert stopped.text == text[: text.index(part)] and stopped.stopped_by == "stop"


def test_a_session_is_a_context_manager(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        with model.session() as session:
            session.generate([1, 5], max_tokens=4, ignore_eos=True)
            assert len(session.tokens) == 5
        assert session.tokens == [] and model._engine.memory.fits({99: 64})
