"""Options of generation as parameters, and what a generation and a session show of themselves."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from ggmlb import ArgumentError
from ggmlb.models import Generation, Options, Session, TextModel, default_text_model
from ggmlb.models.text.sampling import OptionValues, Sampler

TAKE_OPTIONS = (TextModel.generate, TextModel.stream, TextModel.generate_many, Session.generate)

SNIPPET = """
from ggmlb.models import Session, TextModel

def use(model: TextModel, session: Session) -> None:
    model.generate("A", max_tokens=5, stop=["."])
    model.generate("A", max_token=5)
    model.generate("A", max_tokens="5")
    model.stream("A", temprature=0)
    session.generate("A", top=1)
"""


def test_parameters_are_the_fields_of_options() -> None:
    assert OptionValues.__annotations__.keys() == {field.name for field in fields(Options)}
    for field in fields(Options):
        assert OptionValues.__annotations__[field.name].__forward_arg__ == field.type
    for function in TAKE_OPTIONS:
        assert inspect.signature(function).parameters["changes"].annotation == "Unpack[OptionValues]"


@pytest.mark.slow
def test_mypy_refuses_an_option_that_there_is_not(tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    done = subprocess.run([sys.executable, "-m", "mypy", path], capture_output=True, text=True, check=False)
    found = [line.partition(": error: ")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert len(found) == 4, done.stdout
    assert "max_token" in found[0] and "incompatible type" in found[1], found
    assert "temprature" in found[2] and '"top"' in found[3], found


@pytest.mark.parametrize("call", ["generate", "generate_many", "stream", "session"])
def test_an_unknown_option_is_an_error_with_the_nearest(models: Callable[..., Path], call: str) -> None:
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        function = model.session().generate if call == "session" else getattr(model, call)
        with pytest.raises(ArgumentError, match=r"max_token is no option; did you mean 'max_tokens'"):
            list(function([[1]] if call == "generate_many" else [1], max_token=5))


def test_a_generation_shows_its_text() -> None:
    found = Generation([1, 2, 3], [4, 5, 6], "a <b>\n", stopped_by="length", prompt_seconds=0.1, seconds=0.5)
    assert f"{found}" == "a <b>\n" and "<Generation 'a <b>" in repr(found)
    html = found._repr_html_()
    assert "a &lt;b&gt;" in html and "3 tokens at 4.0 per second, after 3 of prompt at 30.0" in html


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("llama", "q8_0 KV cache of"),
        ("mamba", "f32 recurrent states of"),
        ("lfm2", "q8_0 KV cache and f32 recurrent states of"),
    ],
)
def test_a_session_shows_what_it_holds(models: Callable[..., Path], kind: str, memory: str) -> None:
    with TextModel(models(kind), ["CPU"], n_ctx=64, kv_type="q8_0") as model:
        session = model.session()
        session.generate([5, 6, 7], max_tokens=2, ignore_eos=True)
        told = repr(session)
        assert f"{len(session.tokens)} of 64 tokens of context" in told and len(session.tokens) == 4
        assert memory in told and told.endswith("on CPU>") and memory in session._repr_html_()


def test_logits_are_biased_and_recent_tokens_penalised() -> None:
    logits = np.array([1, 2, -1, 4, 0.5], np.float32)
    recent = [9 % 5, 3, 3, 2]  # 4, 3, 3, 2

    def seen(**options: float) -> list[float]:
        found: list[np.ndarray] = []
        probe = Sampler(Options(temperature=0, **options), lambda tokens, x: found.append(x) or x)
        probe(logits, recent)
        return found[0].tolist()

    penalties = {"repeat_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    assert seen(**penalties) == [1, 2, -2 - 0.75, 2 - 1.25, 0.25 - 0.75]
    assert seen(**penalties, repeat_last=1)[2:] == [-2 - 0.75, 4, 0.5]
    assert logits.tolist() == [1, 2, -1, 4, 0.5]
    assert Sampler(Options(temperature=0, logit_bias={0: 10, 3: -np.inf}))(logits, recent) == 0
    for token, bias in ((-1, 2), (0, 1e300), (0, np.nan)):
        with pytest.raises(ArgumentError, match=f"logit_bias has {token}: {re.escape(repr(bias))}"):
            Options(logit_bias={token: bias})


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 0}, {"top_k": 2}, {"mirostat": 2}])
def test_an_exclusion_of_all_tokens_is_an_error(options: dict[str, float]) -> None:
    sampler = Sampler(Options(logit_bias={0: -np.inf, 2: -np.inf}, **options))
    logits = np.array([1, 2, 3], np.float32)
    assert sampler(logits, [0]) == 1
    with pytest.raises(ArgumentError, match="no token is left to choose"):
        sampler(np.array([1, -np.inf, 3], np.float32), [0])


def test_typical_sampling_leaves_the_likeliest_out_where_it_tells_too_little() -> None:
    p = np.array([0.4, *[0.12] * 5])
    drawn = {
        Sampler(Options(top_k=0, top_p=1, min_p=0, temperature=1, typical_p=0.2, seed=seed))(
            np.log(p).astype(np.float32), [0]
        )
        for seed in range(40)
    }
    assert 0 not in drawn and len(drawn) == 2  # entropy 1.64: nearer to the 2.12 of 0.12 than to 0.92


@pytest.mark.parametrize("streamed", [False, True])
def test_a_text_has_the_form_that_was_asked_for(streamed: bool) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'ggmlb[models]'")
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["age", "kind"],
        "additionalProperties": False,
    }
    with TextModel(default_text_model(), n_ctx=256) as model:
        for seed in range(3):
            options = Options(max_tokens=60, temperature=1.5, seed=seed, json_schema=schema)
            text = (
                "".join(model.stream("A pet:", options))
                if streamed
                else model.generate("A pet:", options).text
            )
            told = json.loads(text)
            assert told["kind"] in ("cat", "dog") and told["age"] <= 99
            bnf = model.generate(
                "A pet:", max_tokens=60, seed=seed, grammar='root ::= ("cat" | "dog") " 1"+ "."'
            )
            assert re.fullmatch(r"(cat|dog)( 1+)\.", bnf.text) or bnf.stopped_by == "length", bnf.text
        lines = {model.vocabulary.tokens.index(text): 100.0 for text in ("\u010a", "\u010a\u010a")}
        spaced = model.generate("A pet:", max_tokens=60, json_schema=schema, temperature=0, logit_bias=lines)
        assert "\n\n" in spaced.text and "\n\n\n" not in spaced.text and json.loads(spaced.text)
        assert model.generate("A pet:", grammar='root ::= "cat"', ignore_eos=True).stopped_by == "end"
        with pytest.raises(ArgumentError, match="grammar and json_schema are both given"):
            model.generate("A", grammar='root ::= "a"', json_schema={})
        with pytest.raises(ArgumentError, match="grammar: "):
            model.generate("A", grammar="root ::= (")
        with pytest.raises(ArgumentError, match="json_schema: "):
            model.generate("A", json_schema={"type": "nothing"})
