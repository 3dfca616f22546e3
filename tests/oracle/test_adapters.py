"""LoRA adapters change text models as they change llama.cpp's (xllamacpp): `make test-oracle`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

from tests.oracle.test_text_models import HERE, PLACES, random_sequences
from tests.support.adapters import adapted, write_adapter
from tests.support.llama_cpp import (
    distances,
    float32_log_probs,
    llama_cpp_log_probs,
    n_disagreeing,
    our_log_probs,
)
from tests.support.text_models import KINDS, N_VOCAB, TIED, has_experts, write_text_model

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

MOST = 0.02
"""Greatest distance of log-probabilities from llama.cpp's, with weights in f32."""

PLAIN = re.compile(r"attn_(q|q_a|q_b|kv_a_mqa|k_b|v_b)\.|^output\.")

TWO = {0: 0.75, 1: -0.4}
"""Seeds and scales of adapters that are on together."""


@pytest.mark.parametrize("place", ["CPU", "OpenCL-LLVM"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_adapters(tmp_path: Path, kind: str, place: str) -> None:
    if not HERE.issuperset(PLACES[place].devices):
        pytest.skip(f"not here: one of {', '.join(PLACES[place].devices)}")
    path = write_text_model(tmp_path / "model.gguf", kind)
    names = adapted(path)
    if kind in TIED:  # the embeddings are the output, too: which of them changes is open
        names.remove("token_embd.weight")
    if kind.startswith("deepseek2"):  # llama.cpp leaves out the factors of these products
        names = [name for name in names if not PLAIN.search(name)]
    files = {
        write_adapter(tmp_path / f"{seed}.gguf", path, names, seed): scale for seed, scale in TWO.items()
    }
    sequences = random_sequences()
    reference = float32_log_probs(path, sequences, files)
    theirs = llama_cpp_log_probs(path, sequences, N_VOCAB, adapters=files)
    found = our_log_probs(path, sequences, files, **PLACES[place].of(path))
    most = np.nanmedian if has_experts(kind) else np.nanmax
    assert most(np.nanmax(distances(found, theirs), axis=-1)) < MOST
    assert n_disagreeing(found, theirs, reference) == 0
    without = float32_log_probs(path, sequences)
    assert np.nanmax(distances(without, theirs)) > 10 * MOST
