"""Encoders in GGUF files are as near to float32 as llama.cpp (xllamacpp) is, on every device."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

if importlib.util.find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

from ggmlb.models import BertEmbedder
from tests.support.encoders import N_CTX, N_VOCAB, RERANKER, VARIANTS, write_encoder
from tests.support.llama_cpp import ROOT, llama_cpp_embeddings

F32 = npt.NDArray[np.float32]

RATIO = 1.1
"""Largest ratio of our mean distance from float32 to llama.cpp's own."""

WHERE: dict[str, dict[str, Any]] = {
    "cpu": {"devices": ["CPU"]},
    "llvm": {"devices": ["LLVM", "CPU"]},
    "opencl": {"devices": ["OpenCL0", "CPU"]},
    "both": {"devices": ["OpenCL0", "LLVM", "CPU"], "layers_on": {"OpenCL0": "0", "LLVM": "1-2"}},
}

RANK = r"""
import json, sys
from urllib.request import Request, urlopen
import xllamacpp

path, query, documents = json.loads(sys.stdin.read())
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = path, 256, 1
params.warmup, params.embedding, params.verbosity = False, True, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
server = xllamacpp.Server(params)
asked = json.dumps({"query": query, "documents": documents}).encode()
with urlopen(Request(f"{server.listening_address}/v1/rerank", asked)) as answer:
    found = sorted(json.load(answer)["results"], key=lambda result: result["index"])
print("[" + json.dumps([result["relevance_score"] for result in found]))
"""


def ours(path: Path, sequences: list[list[int]], **options: Any) -> F32:
    with BertEmbedder(path, **options) as embedder:
        tokens = [np.array(s, np.int32) for s in sequences]
        width = embedder.config.n_score or embedder.config.n_embd
        found = np.empty((len(tokens), width), np.float32)
        for members, rows in embedder._computed("embed", tokens, [], 32, None):
            found[members] = rows
    return found


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_K"])
@pytest.mark.parametrize("arch", VARIANTS)
def test_embeddings_are_as_near_to_float32_as_llama_cpp(tmp_path: Path, arch: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    lengths = [*range(1, 48, 3)]
    sequences = [[2, *rng.integers(5, N_VOCAB, n).tolist(), 3] for n in lengths]
    path = write_encoder(tmp_path / "m.gguf", arch, dtype)
    exact = ours(path, sequences, **WHERE["cpu"])
    theirs = np.array(llama_cpp_embeddings(path, sequences)).reshape(exact.shape)
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    bound = RATIO * np.abs(theirs - exact).mean()
    assert bound < 2e-3
    for options in WHERE.values():
        assert np.abs(ours(path, sequences, **options) - exact).mean() <= bound


@pytest.mark.parametrize("arch", ["bert", "modern-bert"])
def test_scores_are_those_of_llama_cpp(tmp_path: Path, arch: str) -> None:
    """It has one [SEP] token, after the query, and no second segment type."""
    path = write_encoder(tmp_path / "m.gguf", arch, **RERANKER)
    query, documents = "w1 w2 w3", ["w5 w6", "w7 w8 w9 w10", "w11", "w12 w13 " * 12]
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        input=json.dumps([str(path), query, documents]),
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    theirs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[["))[1:])
    pairs = [[2, 6, 7, 8, 3, *(5 + int(w[1:]) for w in text.split())] for text in documents]
    assert max(map(len, pairs)) < N_CTX
    for options in WHERE.values():
        assert ours(path, pairs, **options)[:, 0] == pytest.approx(np.array(theirs), abs=2e-3)
