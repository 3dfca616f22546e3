"""Speculative decoding: drafts change how tokens are computed, never the tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb import ArgumentError
from ggmlb.cli import main
from ggmlb.models import Options, PromptLookup, TextModel, default_text_model
from ggmlb.models.text.decoder import Token
from tests.support import text_models
from tests.support.text_models import write_text_model

PROMPTS = [[1, *(260 + (7 * i + j) % 55 for i in range(12))] for j in range(5)]
OPTIONS = [
    Options(max_tokens=40, temperature=0, ignore_eos=True),
    Options(max_tokens=40, temperature=1.5, top_k=0, seed=3, ignore_eos=True, repeat_penalty=1.2),
    Options(max_tokens=40, temperature=1.0, xtc_probability=0.5, typical_p=0.9, seed=4, ignore_eos=True),
    Options(max_tokens=40, mirostat=2, mirostat_tau=3, seed=5, ignore_eos=True, logprobs=2),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and another with the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    return write_text_model(folder / "a.gguf"), write_text_model(folder / "b.gguf", n_layer=1, seed=1)


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "penalties", "xtc", "mirostat"])
@pytest.mark.parametrize("drafts", ["itself", "another", "lookup"])
def test_tokens_are_those_without_a_draft(files: tuple[Path, Path], options: Options, drafts: str) -> None:
    draft = {"itself": files[0], "another": files[1], "lookup": PromptLookup()}[drafts]
    with TextModel(files[0], ["CPU"], n_ctx=512, kv_type="f32") as model:
        alone = [model.generate(prompt, options) for prompt in PROMPTS]
    with TextModel(files[0], ["CPU"], n_ctx=512, kv_type="f32", draft=draft) as model:
        found = [model.generate(prompt, options) for prompt in PROMPTS]
        many = model.generate_many(PROMPTS, options)
        streamed = "".join(model.stream(PROMPTS[0], options))
        with model.queue() as queue:
            jobs = [queue.submit(prompt, options) for prompt in PROMPTS]
            queued = [job.wait(600) for job in jobs]
            assert queue.n_generated == 5 * 40
        assert model._engine.memory.fits({999: 512})  # nothing of the drafts stays
    for results in (found, many, queued):
        assert [result.tokens for result in results] == [result.tokens for result in alone]
        assert [result.stopped_by for result in results] == ["length"] * 5
        assert [len(result.logprobs) for result in results] == [len(result.logprobs) for result in alone]
    assert streamed == alone[0].text
    n_drafted, n_accepted = (sum(getattr(r, name) for r in found) for name in ("n_drafted", "n_accepted"))
    if drafts == "itself":
        assert n_accepted == n_drafted >= 5 * 29
    elif drafts == "another":
        assert n_accepted < n_drafted
    assert all(result.n_drafted == 0 for result in alone)


def test_several_tokens_are_verified_in_a_batch(files: tuple[Path, Path]) -> None:
    with TextModel(files[0], ["CPU"], n_ctx=256, draft=files[0], n_draft=7) as model:
        sizes = []
        likeliest = model._engine.decoder.likeliest

        def noted(batch: Sequence[Any], k: int) -> Any:
            sizes.append(len(batch))
            return likeliest(batch, k)

        model._engine.decoder.likeliest = noted  # type: ignore[method-assign]
        model.generate(PROMPTS[0], max_tokens=21, temperature=0, ignore_eos=True)
        assert sizes == [len(PROMPTS[0]), 4, 8, 8]  # the first drafts are short
        del sizes[:]
        model.generate_many(PROMPTS, max_tokens=5, temperature=0, ignore_eos=True)
        assert sizes[1:] == [15, 5]  # of many requests, too


def test_a_session_continues_after_rejected_tokens(files: tuple[Path, Path]) -> None:
    def talk(model: TextModel) -> list[list[int]]:
        found, tokens = [], list(PROMPTS[0])
        with model.session() as session:
            for seed in range(3):
                result = session.generate(tokens, max_tokens=11, temperature=1.5, seed=seed, ignore_eos=True)
                assert session.tokens == [*tokens, *result.tokens][: len(session.tokens)]
                assert model._engine.memory.length(session._sequence) == len(session.tokens)
                found.append(result.tokens)
                tokens += [*result.tokens, 270]
        return found

    with TextModel(files[0], ["CPU"], n_ctx=256, kv_type="f32") as model:
        alone = talk(model)
    with TextModel(files[0], ["CPU"], n_ctx=256, kv_type="f32", draft=files[1]) as model:
        assert talk(model) == alone


def test_a_session_lacks_drafted_tokens_that_were_not_sampled(files: tuple[Path, Path]) -> None:
    def fails(tokens: Sequence[int], logits: Any) -> Any:
        if len(tokens) == len(PROMPTS[0]) + 3:
            raise KeyError("of the processor")
        return logits

    with TextModel(files[0], ["CPU"], n_ctx=256, draft=files[0]) as model, model.session() as session:
        with pytest.raises(KeyError, match="of the processor"):
            session.generate(PROMPTS[0], temperature=0, ignore_eos=True, logits_processor=fails)
        assert model._engine.memory.length(session._sequence) == len(session.tokens) == len(PROMPTS[0]) + 1


def test_jobs_need_no_room_for_drafts_beyond_their_end(files: tuple[Path, Path]) -> None:
    with TextModel(files[0], ["CPU"], n_ctx=64, draft=files[0], n_draft=40) as model, model.queue() as queue:
        jobs = [queue.submit(prompt, max_tokens=8, ignore_eos=True) for prompt in PROMPTS[:2]]
        assert [len(job.wait(600).tokens) for job in jobs] == [8, 8]
        assert queue.n_prompt == 2 * len(PROMPTS[0])


def test_text_ends_as_without_a_draft(files: tuple[Path, Path]) -> None:
    """At the end of the context, at a stop text, at an end token, with a processor, and in a form."""
    pytest.importorskip("llguidance")

    def never_260(tokens: Sequence[int], logits: Any) -> Any:
        assert tokens[: len(PROMPTS[1])] == PROMPTS[1]
        logits[260] = -np.inf
        return logits

    def ends(model: TextModel) -> list[tuple[list[int], str, str]]:
        free = {"temperature": 1.5, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "seed": 7}
        text = model.generate(PROMPTS[0], max_tokens=20, **free, ignore_eos=True).text
        results = [
            model.generate(PROMPTS[0], max_tokens=-1, **free, ignore_eos=True),
            model.generate(PROMPTS[0], max_tokens=-1, **free, ignore_eos=True, stop=text[8:11]),
            model.generate(PROMPTS[0], max_tokens=100, **free, logit_bias={2: 4.0}),
            model.generate(PROMPTS[1], max_tokens=30, **free, ignore_eos=True, logits_processor=never_260),
            model.generate(PROMPTS[2], max_tokens=30, **free, grammar='root ::= ("ab" | "cd")+ "."'),
        ]
        return [(result.tokens, result.text, result.stopped_by) for result in results]

    with TextModel(files[0], ["CPU"], n_ctx=144, kv_type="f32") as model:
        alone = ends(model)
    assert [stop for *_, stop in alone[:3]] == ["context", "stop", "end"]
    for draft in (files[0], files[1]):
        with TextModel(files[0], ["CPU"], n_ctx=144, kv_type="f32", draft=draft) as model:
            assert ends(model) == alone


def test_an_open_model_drafts_as_far_as_its_context_goes(files: tuple[Path, Path]) -> None:
    options = Options(max_tokens=60, temperature=0, ignore_eos=True)
    with TextModel(files[0], ["CPU"], n_ctx=32) as draft:
        with TextModel(files[0], ["CPU"], n_ctx=256, draft=draft) as model:
            assert model.draft is draft
            result = model.generate(PROMPTS[0], options)
            assert 0 < result.n_drafted < 32
        assert not any(draft._engine.memory.length(sequence) for sequence in range(999))
    with (
        TextModel(files[0], ["CPU"], n_ctx=32) as draft,
        draft.session() as session,  # another user of its context
        TextModel(files[0], ["CPU"], n_ctx=256, draft=draft) as model,
    ):
        session.generate([1, *range(260, 285)], max_tokens=1)
        again = model.generate(PROMPTS[0], options)
        assert again.n_drafted == 0
    assert again.tokens == result.tokens


def test_idle_drafts_make_room_for_other_users_of_an_open_model(files: tuple[Path, Path]) -> None:
    """The drafts used last stay; a full context takes prompts, sessions and jobs of the smaller model."""
    options = Options(max_tokens=12, temperature=0, ignore_eos=True)
    with (
        TextModel(files[0], ["CPU"], n_ctx=64) as draft,
        TextModel(files[0], ["CPU"], n_ctx=256, draft=draft) as model,
    ):
        alone = [draft.generate(prompt, options).tokens for prompt in PROMPTS]
        for prompt in PROMPTS[:2]:
            assert model.generate(prompt, options).n_drafted
        cells = draft._engine.memory.cells
        assert cells is not None and len(cells.idle) == 2
        last = list(cells.idle)[1]
        assert draft.generate(PROMPTS[2], options).tokens == alone[2] and list(cells.idle) == [last]
        assert draft.logits([1] * 64).shape[0] == 64 and not cells.idle
        assert model.generate(PROMPTS[3], options).n_drafted and cells.idle
        with draft.session() as session, draft.queue() as queue:
            assert session.generate(PROMPTS[3], options).tokens == alone[3]
            job = queue.submit(PROMPTS[4], options)
            assert job.wait(600).tokens == alone[4] and not cells.idle
            assert model.generate(PROMPTS[0], options).tokens == alone[0]


def test_what_cannot_draft_is_refused(
    files: tuple[Path, Path],
    models: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(path: Path, draft: Any, **options: Any) -> TextModel:
        return TextModel(path, ["CPU"], n_ctx=64, draft=draft, **options)

    for path, draft in ((models("mamba"), files[0]), (files[0], models("mamba"))):
        with pytest.raises(ArgumentError, match=r"draft: a model of the architecture mamba has recurrent"):
            opened(path, draft)
    with pytest.raises(ArgumentError, match="mamba has recurrent"):
        opened(models("mamba"), PromptLookup())
    words, vocabulary = [f"<{i}>" for i in range(320)], text_models.vocabulary
    monkeypatch.setattr(text_models, "vocabulary", lambda: {**vocabulary(), "tokenizer.ggml.tokens": words})
    other = write_text_model(tmp_path / "o.gguf")
    with pytest.raises(ArgumentError, match=r"draft: the vocabulary of the draft model .* same family"):
        opened(files[0], other)
    with pytest.raises(ArgumentError, match=r"n_draft is 0; give 1 to 512"):
        opened(files[0], None, n_draft=0)
    with pytest.raises(ArgumentError, match=r"PromptLookup\(2, 0\): give 1 or more"):
        PromptLookup(2, 0)
    for wrong in ([100000], [-1], [0.5], [[1]]):
        with opened(files[0], lambda tokens, wrong=wrong: wrong) as model:
            with pytest.raises(ArgumentError, match=r"draft returned .*; give tokens from 0 to 319"):
                model.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)
            assert model._engine.memory.fits({999: 64})


def test_prompt_lookup_finds_what_followed_before() -> None:
    def drafted(tokens: Sequence[int], **options: int) -> list[int]:
        return PromptLookup(**options)(np.array(tokens, np.int32)).tolist()

    assert drafted([5, 6, 7, 8, 9, 5, 6], num_pred_tokens=3) == [7, 8, 9]
    assert drafted([5, 6, 1, 2, 5, 6, 3, 4, 5, 6], num_pred_tokens=2) == [3, 4]  # the latest
    assert drafted([5, 6, 1, 2, 5, 6, 3, 5, 6], num_pred_tokens=4) == [1, 2, 5, 6]  # that is long enough
    assert drafted([5, 6, 7, 6], num_pred_tokens=9) == [7, 6]  # a shorter part
    assert drafted([5, 6, 7]) == drafted([5]) == []


def test_smollm2_drafts_for_itself_and_copies_of_the_prompt_are_looked_up() -> None:
    text = "Repeat this list: red, green, blue, yellow, white, black, brown, purple.\nred, green, blue,"
    options = Options(max_tokens=24, temperature=0)
    with TextModel(default_text_model(), n_ctx=256) as model:
        alone = model.generate(text, options)
    for draft in (default_text_model(), PromptLookup()):
        with TextModel(default_text_model(), n_ctx=256, draft=draft) as model:
            result = model.generate(text, options)
        assert result.tokens == alone.tokens
        assert 6 <= result.n_accepted <= result.n_drafted


def test_the_command_line_takes_a_draft(files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "-m", str(files[0]), "--prompt-tokens", "1,260,270", "-n", "9", "--temperature", "0"]
    told = []
    for more in ([], ["--draft", str(files[0]), "--draft-max", "4"]):
        assert main([*args, "--ignore-eos", "--json", "-d", "CPU", *more]) == 0
        told.append(json.loads(capfd.readouterr().out))
    assert told[0]["tokens"] == told[1]["tokens"]
    assert told[1]["timings"]["draft_n"] == told[1]["timings"]["draft_n_accepted"] > 0


def test_few_tokens_round_as_single_ones_on_llvm() -> None:
    """So that greedy text with short drafts is that without them."""
    with TextModel(default_text_model(), ["LLVM", "CPU"], n_ctx=256) as model:
        decoder, tokens = model._engine.decoder, model.tokens_of("The quick brown fox jumps over the lazy")

        def logits(sequence: int, size: int) -> Any:
            batch = [Token(token, sequence, i, True) for i, token in enumerate(tokens[:8])]
            return np.concatenate([decoder.decode(batch[i : i + size]) for i in range(0, 8, size)])

        alone = logits(1, 1)
        assert np.array_equal(logits(2, 2), alone) and np.array_equal(logits(3, 4), alone)
        assert np.abs(logits(4, 8) - alone).max() < 1e-3
