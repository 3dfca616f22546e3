"""Encoders in GGUF files: embeddings and scores on all devices, tokens of pairs, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ggmlb import open_gguf
from ggmlb.core.errors import ArgumentError, ModelError
from ggmlb.models import BertEmbedder, TextModel
from tests.support import encoders

TEXTS = ["w1 w2 w3", "w4", "w5x w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17", "other"]
WHERE: dict[str, dict[str, Any]] = {
    "llvm": {"devices": ["LLVM", "CPU"]},
    "opencl": {"devices": ["OpenCL0", "CPU"]},
    "both": {"devices": ["OpenCL0", "LLVM", "CPU"], "layers_on": {"OpenCL0": "0", "LLVM": "1-2"}},
    "together": {"devices": ["CPU+OpenCL0", "CPU"]},
}


def embeddings(path: Path, texts: Sequence[str] = TEXTS, **options: Any) -> npt.NDArray[np.float32]:
    with BertEmbedder(path, **{"devices": ["CPU"], **options}) as embedder:
        return embedder.embed(texts)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("arch", encoders.VARIANTS)
def test_embeddings_are_those_of_the_cpu(tmp_path: Path, arch: str, where: str) -> None:
    path = encoders.write_encoder(tmp_path / "m.gguf", arch)
    assert np.abs(embeddings(path, **WHERE[where]) - embeddings(path)).max() < 1e-6


@pytest.mark.parametrize("arch", encoders.VARIANTS)
def test_a_text_has_the_same_embedding_in_any_batch(tmp_path: Path, arch: str) -> None:
    """Masks and windows hide padding and other texts."""
    path = encoders.write_encoder(tmp_path / "m.gguf", arch)
    alone = np.concatenate([embeddings(path, [text]) for text in TEXTS])
    assert np.abs(embeddings(path) - alone).max() < 1e-6


@pytest.mark.parametrize("arch", ["bert", "nomic-bert"])
def test_queries_keys_and_values_may_be_of_one_tensor_or_of_several_types(tmp_path: Path, arch: str) -> None:
    mixed = encoders.write_encoder(tmp_path / "m.gguf", arch, "q4_K", values="q8_0")
    plain = encoders.write_encoder(tmp_path / "p.gguf", arch)
    fused = encoders.write_encoder(tmp_path / "f.gguf", arch, fused=True)
    found = np.einsum("ij,ij->i", embeddings(mixed), embeddings(plain))
    assert (found > 0.95).all() and (found < 1 - 1e-6).all()
    assert np.isfinite(embeddings(fused)).all()


def test_a_window_hides_what_is_outside(tmp_path: Path) -> None:
    """Without layers that see all, a token 5 places away changes nothing in a window of 4 on each side."""
    options = {"attention.sliding_window_pattern": [True] * encoders.LAYERS, "block_count": 1}
    path = encoders.write_encoder(tmp_path / "m.gguf", "modern-bert", **{**options, "pooling_type": 2})
    with pytest.raises(ModelError, match="does not use the tensor"):
        embeddings(path)
    options = {"attention.sliding_window_pattern": [True] * encoders.LAYERS, "attention.sliding_window": 2}
    path = encoders.write_encoder(tmp_path / "w.gguf", "modern-bert", **{**options, "pooling_type": 2})
    near, far = ("w1 w2 w3 w4 w5 " + end for end in ("w6", "w7"))  # three layers of one token on each side
    first = embeddings(path, [near, far])
    assert np.abs(first[0] - first[1]).max() == 0
    near, far = ("w1 " + end + " w3 w4 w5 w6" for end in ("w6", "w7"))
    first = embeddings(path, [near, far])
    assert np.abs(first[0] - first[1]).max() > 1e-3


def test_documents_are_scored_for_a_query(tmp_path: Path) -> None:
    path = encoders.write_encoder(tmp_path / "m.gguf", "bert", **encoders.RERANKER)
    documents = ["w5 w6", "w7 w8 w9 w10", "w11", "w5 w6"]
    with BertEmbedder(path, devices=["CPU"]) as ranker:
        scores = ranker.rerank("w1 w2", documents)
        assert scores.shape == (4,)
        assert scores[0] == pytest.approx(scores[3])
        assert np.ptp(scores) > 1e-3
        assert ranker.rerank("w1 w2", documents[1:2], batch=1)[0] == pytest.approx(scores[1], abs=1e-5)
        assert ranker.rerank("w1", []).shape == (0,)
        with pytest.raises(ArgumentError, match="is a reranker"):
            ranker.embed(["w1"])
        with pytest.raises(ArgumentError, match="rerank: batch is 0"):
            ranker.rerank("w1", documents, batch=0)
        tokens, n_first = ranker._tokenizer.pair("w1 w2", "w3")  # type: ignore[union-attr]
        assert tokens.tolist() == [2, 6, 7, 3, 8, 3]
        assert n_first == 4
        long, _ = ranker._tokenizer.pair("w1", "w2 " * 100)  # type: ignore[union-attr]
        assert (long.size, long[-1]) == (encoders.N_CTX, 3)


def test_types_of_the_second_text_count(tmp_path: Path) -> None:
    path = encoders.write_encoder(tmp_path / "m.gguf", "bert", **encoders.RERANKER)
    with BertEmbedder(path, devices=["CPU"]) as ranker:
        tokens = [np.array([2, 6, 3, 7, 3], np.int32)]
        one, two = (next(ranker._computed("t", tokens, [n], 1, None))[1] for n in (3, 5))
    assert np.abs(one - two).max() > 1e-3


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"attention.causal": True}, "attention.causal.*an encoder has false"),
        ({"without": ("attention.causal",)}, "attention.causal.*or missing"),
        ({"pooling_type": 0}, "pooling_type.*none"),
        ({"attention.head_count": 3}, "head_count.*it must divide 256"),
        ({"attention.head_count_kv": 2}, "head_count.*as KV heads"),
        ({"context_length": 63}, "position_embd.weight.*has shape"),
        ({"feed_forward_length": 128}, "ffn_up.weight.*has shape"),
        ({"expert_count": 4}, "expert_count.*it is 4"),
        ({"fused": True, "block_count": 2}, "does not use the tensor 'blk.2"),
        ({"classifier.activation": "sine"}, "'sine' is not known"),
        ({"pooling_type": 4, "without": ("cls.output.weight",)}, "has no tensor 'cls.output.weight'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    path = encoders.write_encoder(tmp_path / "m.gguf", "bert", **changed)
    with pytest.raises(ModelError, match=says):
        BertEmbedder(path, devices=["CPU"])


@pytest.mark.parametrize("arch", encoders.VARIANTS)
def test_a_file_without_one_of_its_tensors_is_refused(tmp_path: Path, arch: str) -> None:
    """But for biases of products and segment types, which some models have not."""
    whole = open_gguf(encoders.write_encoder(tmp_path / "m.gguf", arch))
    may_lack = {name for name in whole if name.endswith(".bias") and "norm" not in name}
    for name in whole.keys() - may_lack - {"token_types.weight"}:
        path = encoders.write_encoder(tmp_path / "w.gguf", arch, without=(name,))
        with pytest.raises(ModelError, match=name.replace("qkv.weight", "q")):
            BertEmbedder(path, devices=["CPU"])
    some = tuple(may_lack | {"token_types.weight"})
    path = encoders.write_encoder(tmp_path / "b.gguf", arch, without=some)
    assert np.isfinite(embeddings(path)).all()


@pytest.mark.parametrize("name", ["blk.0.ffn_down.bias", "blk.1.ffn_up.bias", "blk.1.ffn_gate.bias"])
def test_biases_that_llama_cpp_leaves_out_are_refused(tmp_path: Path, name: str) -> None:
    path = encoders.write_encoder(tmp_path / "m.gguf", "nomic-bert", tensors={name: np.zeros(encoders.E)})
    with pytest.raises(ModelError, match=f"does not use the tensor {name!r}"):
        BertEmbedder(path, devices=["CPU"])


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("token_types.weight", (2 * encoders.E,), r"token_types.weight' has shape \[512\]"),
        ("token_types.weight", (0, encoders.E), r"token_types.weight' has shape \[0, 256\]"),
        ("blk.x.weight", (1,), "does not use the tensor 'blk.x.weight'"),
        ("blk.99999999999.weight", (1,), "does not use the tensor 'blk.99999999999.weight'"),
    ],
)
def test_a_wrong_tensor_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...], says: str) -> None:
    path = encoders.write_encoder(tmp_path / "m.gguf", "bert", tensors={name: np.zeros(shape, np.float32)})
    with pytest.raises(ModelError, match=says):
        BertEmbedder(path, devices=["CPU"])


@pytest.mark.parametrize("pooling", [1, 2, 3])
def test_a_text_without_tokens_is_refused(tmp_path: Path, pooling: int) -> None:
    """A vocabulary of SentencePiece adds no tokens to a text if its file says so."""
    path = encoders.write_encoder(tmp_path / "m.gguf", "bert", pooling_type=pooling, spm=True)
    with BertEmbedder(path, devices=["CPU"]) as embedder:
        assert embedder.embed(["w1"]).shape == (1, encoders.E)
        with pytest.raises(ArgumentError, match="text 1 has no tokens"):
            embedder.embed(["w1", ""])


def test_each_kind_of_model_has_its_class(tmp_path: Path) -> None:
    path = encoders.write_encoder(tmp_path / "m.gguf", "bert")
    with pytest.raises(ModelError, match="open it with BertEmbedder"):
        TextModel(path, devices=["CPU"])
    with BertEmbedder(path, devices=["CPU"]) as embedder:
        assert "3 layers of 256" in str(embedder.summary())
        with pytest.raises(ArgumentError, match="is not a reranker"):
            embedder.rerank("w1", ["w2"])
    text = encoders.write_encoder(tmp_path / "t.gguf", "nomic-bert")
    with BertEmbedder(text, devices=["CPU"]) as embedder:
        assert "nomic-bert, 3 layers of 256" in str(embedder.summary())
    raw = text.read_bytes()
    text.write_bytes(raw.replace(b"nomic-bert", b"comic-bert"))
    with pytest.raises(ModelError, match=r"'comic-bert' is no encoder .*TextModel"):
        BertEmbedder(text, devices=["CPU"])
