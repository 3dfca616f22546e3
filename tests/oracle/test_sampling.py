"""Samplers beside llama.cpp's, for 1,000 random logits each: tokens that stay, and their probabilities."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb.models import default_text_model
from ggmlb.models.gguf import GgufFile
from ggmlb.models.gguf.vocabulary import Vocabulary
from ggmlb.models.text.dry import breakers_of
from ggmlb.models.text.sampling import Options, Sampler
from tests.support.llama_c_api import Llama

pytestmark = pytest.mark.oracle

N_VOCAB = 300
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "penalties": {**OFF, "repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    "typical": {**OFF, "typical_p": 0.7},
    "typical and others": {"top_k": 50, "typical_p": 0.8, "top_p": 0.9, "min_p": 0.1},
    "xtc": {**OFF, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    "all": {"repeat_penalty": 1.1, "typical_p": 0.95, "xtc_probability": 1.0},
    "dry": {**OFF, "dry_multiplier": 0.8},
    "dry and others": {
        "repeat_penalty": 1.1,
        "dry_multiplier": 1.3,
        "dry_base": 1.2,
        "dry_allowed_length": 1,
    },
    "dry with breakers of several tokens": {
        **OFF,
        "dry_multiplier": 0.5,
        "dry_allowed_length": 1,
        "dry_sequence_breakers": ("01", "&", "-5(", "<2"),
    },
    "dry of long repetitions": {**OFF, "dry_multiplier": 0.1, "dry_base": 3.0, "dry_penalty_last_n": 30},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 2.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0},
}


class Data(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class DataArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(Data)), ("size", ctypes.c_size_t), ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Iterator[Any]:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs xllamacpp: pip install 'ggmlb[ggml]'")
    folder = Path(spec.submodule_search_locations[0])
    library = ctypes.CDLL(str(next(folder.glob("xllamacpp*.so"))))
    model = Llama(default_text_model(), n_threads=1)
    library.vocab, library.dry = model._vocab, {}
    yield library
    model.close()


def theirs(llama: Any, logits: np.ndarray, tokens: list[int], s: Options) -> dict[int, float]:
    """Return the probabilities of the tokens that stay, in llama.cpp's order of samplers."""
    real, size = ctypes.c_float, ctypes.c_size_t
    texts = [text.encode() for text in s.dry_sequence_breakers]
    penalties = s.repeat_penalty, s.frequency_penalty, s.presence_penalty
    chain: list[tuple[str, list[Any]]] = [
        ("penalties", [N_VOCAB, s.repeat_last, *map(real, penalties)]),
        ("dry", [
            ctypes.c_void_p(llama.vocab), real(s.dry_multiplier), real(s.dry_base), s.dry_allowed_length,
            s.dry_penalty_last_n, (ctypes.c_char_p * len(texts))(*texts), size(len(texts)),
        ]),
        ("top_k", [s.top_k]), ("typical", [real(s.typical_p), size(1)]), ("top_p", [real(s.top_p), size(1)]),
        ("min_p", [real(s.min_p), size(1)]),
        ("xtc", [real(s.xtc_probability), real(s.xtc_threshold), size(1), 0]),
        ("temp", [real(s.temperature)]),
    ]  # fmt: skip
    if s.mirostat == 1:
        chain = [chain[-1], ("mirostat", [N_VOCAB, 0, real(s.mirostat_tau), real(s.mirostat_eta), 100])]
    elif s.mirostat == 2:
        chain = [chain[-1], ("mirostat_v2", [0, real(s.mirostat_tau), real(s.mirostat_eta)])]
    data = (Data * N_VOCAB)(*((i, float(x), 0.0) for i, x in enumerate(logits)))
    found = DataArray(data, N_VOCAB, -1, False)
    for name, args in chain:
        if name == "dry" and not s.dry_multiplier:
            continue
        make = getattr(llama, f"llama_sampler_init_{name}")
        make.restype = ctypes.c_void_p
        if name == "dry":  # it looks for the breakers in the whole vocabulary
            if s not in llama.dry:
                llama.dry[s] = ctypes.c_void_p(make(*args))
            sampler = llama.dry[s]
            llama.llama_sampler_reset(sampler)
        else:
            sampler = ctypes.c_void_p(make(*args))
        if name in ("penalties", "dry"):
            for token in tokens:
                llama.llama_sampler_accept(sampler, token)
        llama.llama_sampler_apply(sampler, ctypes.byref(found))
        if name != "dry":
            llama.llama_sampler_free(sampler)
    kept = [found.data[i] for i in range(found.size)]
    best = max(each.logit for each in kept)
    odds = {each.id: float(np.exp(np.float64(each.logit) - best)) for each in kept}
    return {i: odd / sum(odds.values()) for i, odd in odds.items()}


@pytest.mark.parametrize("case", CASES)
def test_tokens_that_stay_are_llama_cpps(llama: Any, case: str, monkeypatch: Any) -> None:
    options = Options(**CASES[case])
    seen: list[dict[int, float]] = []

    def note(name: str) -> None:
        original = getattr(Sampler, name)

        def noted(self: Sampler, logits: np.ndarray) -> Any:
            ids, odds = original(self, logits)
            seen.append(dict(zip(ids.tolist(), (odds / odds.sum()).tolist(), strict=True)))
            return ids, odds

        monkeypatch.setattr(Sampler, name, noted)

    note("candidates")
    note("_surprising")
    vocabulary = Vocabulary(GgufFile(default_text_model()).metadata)
    breakers = breakers_of(vocabulary, options.dry_sequence_breakers)
    draw = np.random.default_rng(len(case))
    n_off = 0
    for _ in range(1000):
        logits = (draw.standard_normal(N_VOCAB) * draw.choice([0.5, 2, 5])).astype(np.float32)
        tokens = draw.integers(17, 47, 80).tolist()
        n = int(draw.integers(0, 20))  # the end repeats earlier tokens
        tokens[80 - n :] = tokens[40 - n : 40]
        chosen = Sampler(options, breakers=breakers)(logits, tokens)
        expected, found = theirs(llama, logits, tokens, options), seen.pop()
        assert chosen in found
        if expected.keys() != found.keys():  # a sum that float32 rounds over a limit
            n_off += 1
            assert len(expected.keys() ^ found.keys()) == 1
            continue
        assert max(abs(expected[i] - found[i]) for i in found) < 1e-5
    assert n_off <= 3
