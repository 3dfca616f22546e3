"""Mixtures as llama.cpp's files have them: the types by layer are written out, not computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb import ModelError, open_gguf
from ggmlb.cli import main
from ggmlb.models.gguf import GgufFile
from ggmlb.models.gguf.mixtures import MIXTURES
from ggmlb.models.gguf.quantizing import plan_types, quantize_gguf
from tests.support.gguf_files import write_gguf

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def model(path: Path, n_layer: int, parts: Any = PARTS, arch: str = "llama", **sizes: Any) -> GgufFile:
    """A file with matrices of two rows, and heads of queries that share one of keys by fours."""
    sizes = {"block_count": n_layer, "attention.head_count": 8, "attention.head_count_kv": 2} | sizes
    matrix = np.ones((2, 256), np.float16)
    names = [f"blk.{i}.{part}.weight" for i in range(n_layer) for part in parts]
    metadata: dict[str, Any] = {f"{arch}.{key}": value for key, value in sizes.items()}
    metadata["general.architecture"] = arch
    return open_gguf(
        write_gguf(path, metadata, dict.fromkeys(["token_embd.weight", "output.weight", *names], matrix))
    )


def layers(source: GgufFile, mixture: str, part: str) -> dict[str, set[int]]:
    """The layers of each type that a part has."""
    found: dict[str, set[int]] = {}
    for change in plan_types(source, MIXTURES[mixture], {}):
        name = change.tensor.name
        if f".{part}." in name:
            found.setdefault(change.dtype.name, set()).add(int(name.split(".")[1]))
    return found


MORE = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
FEWER = {4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26}
ALL = MORE | FEWER

OF_32_LAYERS: dict[str, dict[str, dict[str, set[int]]]] = {
    "Q4_K_M": {
        "attn_v": {"Q6_K": MORE, "Q4_K": FEWER}, "ffn_down": {"Q6_K": MORE, "Q4_K": FEWER},
        "attn_output": {"Q4_K": ALL}, "attn_q": {"Q4_K": ALL},
    },
    "Q4_K_S": {
        "attn_v": {"Q5_K": {0, 1, 2, 3}, "Q4_K": ALL - {0, 1, 2, 3}},
        "ffn_down": {"Q5_K": {0, 1, 2, 3}, "Q4_K": ALL - {0, 1, 2, 3}}, "attn_output": {"Q4_K": ALL},
    },
    "Q5_K_M": {
        "attn_v": {"Q6_K": MORE, "Q5_K": FEWER}, "ffn_down": {"Q6_K": MORE, "Q5_K": FEWER},
        "attn_output": {"Q5_K": ALL},
    },
    "Q5_K_S": {"attn_v": {"Q5_K": ALL}, "ffn_down": {"Q5_K": ALL}, "attn_output": {"Q5_K": ALL}},
    "Q3_K_S": {"attn_v": {"Q3_K": ALL}, "ffn_down": {"Q3_K": ALL}, "attn_output": {"Q3_K": ALL}},
    "Q3_K_M": {
        "attn_v": {"Q5_K": {0, 1}, "Q4_K": ALL - {0, 1}}, "ffn_down": {"Q5_K": {0, 1}, "Q4_K": ALL - {0, 1}},
        "attn_output": {"Q4_K": ALL}, "ffn_up": {"Q3_K": ALL},
    },
    "Q3_K_L": {
        "attn_v": {"Q5_K": ALL}, "ffn_down": {"Q5_K": ALL}, "attn_output": {"Q5_K": ALL},
        "attn_k": {"Q3_K": ALL},
    },
    "Q2_K_S": {
        "attn_v": {"Q4_K": ALL}, "ffn_down": {"Q4_K": {0, 1, 2, 3}, "Q2_K": ALL - {0, 1, 2, 3}},
        "attn_output": {"Q2_K": ALL},
    },
}  # fmt: skip


@pytest.mark.parametrize("mixture", MIXTURES)
def test_types_of_32_layers(tmp_path: Path, mixture: str) -> None:
    source = model(tmp_path / "in.gguf", 32)
    for part, expected in OF_32_LAYERS[mixture].items():
        assert layers(source, mixture, part) == expected, part
    by_name = {change.tensor.name: change.dtype.name for change in plan_types(source, MIXTURES[mixture], {})}
    assert (by_name["token_embd.weight"], by_name["output.weight"]) == (mixture[:4], "Q6_K")


def test_eight_experts(tmp_path: Path) -> None:
    parts = (*PARTS[:4], "ffn_gate_exps", "ffn_down_exps")
    source = model(tmp_path / "in.gguf", 32, parts, expert_count=8)
    assert layers(source, "Q4_K_M", "attn_v") == layers(source, "Q4_K_M", "attn_k") == {"Q8_0": ALL}
    assert layers(source, "Q4_K_M", "attn_output") == {"Q5_K": ALL}
    assert layers(source, "Q4_K_M", "ffn_down_exps") == {"Q6_K": MORE, "Q4_K": FEWER}
    assert layers(source, "Q3_K_L", "attn_output") == {"Q3_K": ALL}
    four = model(tmp_path / "four.gguf", 32, parts, expert_count=4)
    assert layers(four, "Q4_K_M", "attn_k") == {"Q4_K": ALL}


def test_sizes_of_llama_2_70b(tmp_path: Path) -> None:
    source = model(tmp_path / "in.gguf", 80)
    more = {
        *range(10), 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, 48, 51, 54, 57, 60, 63, 66, 69,
        *range(70, 80),
    }  # fmt: skip
    assert layers(source, "Q4_K_M", "attn_v") == {"Q6_K": more, "Q5_K": {*range(80)} - more}
    assert layers(source, "Q4_K_M", "ffn_down") == {"Q6_K": more, "Q4_K": {*range(80)} - more}
    assert layers(source, "Q3_K_S", "attn_v") == {"Q5_K": {*range(80)}}
    by_layer = model(tmp_path / "by_layer.gguf", 80, **{"attention.head_count_kv": [2] * 80})
    assert layers(by_layer, "Q3_K_S", "attn_v") == {"Q5_K": {*range(80)}}
    alone = model(tmp_path / "alone.gguf", 80, **{"attention.head_count_kv": 8})
    assert layers(alone, "Q3_K_S", "attn_v") == {"Q3_K": {*range(80)}}


def test_fused_queries_keys_and_values(tmp_path: Path) -> None:
    source = model(tmp_path / "in.gguf", 2, ("attn_qkv",), "phi3")
    assert layers(source, "Q4_K_M", "attn_qkv") == {"Q5_K": {0, 1}}
    assert layers(source, "Q3_K_M", "attn_qkv") == {"Q4_K": {0, 1}}
    assert layers(source, "Q5_K_M", "attn_qkv") == {"Q6_K": {0, 1}}


@pytest.mark.parametrize(
    ("given", "number", "kinds"),
    [("q4_K_M", 15, {"Q4_K", "Q6_K", "Q8_0"}), ("Q3_K_L", 13, {"Q3_K", "Q5_K", "Q6_K", "Q8_0"})],
)
def test_a_mixture_is_written(tmp_path: Path, given: str, number: int, kinds: set[str]) -> None:
    source = model(tmp_path / "in.gguf", 3)
    rules = {"attn_q": "q8_0"}
    changes = quantize_gguf(source, tmp_path / "out.gguf", given, rules=rules)
    out = open_gguf(tmp_path / "out.gguf")
    assert {c.tensor.name: c.dtype for c in changes} == {name: t.dtype for name, t in out.items()}
    assert out["blk.2.attn_q.weight"].dtype.name == "Q8_0"
    assert {tensor.dtype.name for tensor in out.values()} == kinds
    assert out.metadata["general.file_type"] == number
    pure = quantize_gguf(source, tmp_path / "pure.gguf", given, pure=True)
    assert {c.dtype.name for c in pure} == {given[:4].upper()}


def test_narrow_rows_get_types_of_smaller_blocks(tmp_path: Path) -> None:
    """As those of SmolLM2, of 576 elements."""
    names = [f"blk.{i}.{part}.weight" for i in range(2) for part in ("attn_v", "attn_q")]
    tensors = dict.fromkeys([*names, "token_embd.weight"], np.ones((2, 576), np.float32))
    source = open_gguf(
        write_gguf(tmp_path / "in.gguf", {"general.architecture": "a", "a.block_count": 2}, tensors)
    )
    changes = {c.tensor.name: c.dtype.name for c in plan_types(source, MIXTURES["Q4_K_M"], {})}
    assert changes == {
        "blk.0.attn_v.weight": "Q5_0", "blk.0.attn_q.weight": "Q5_0", "blk.1.attn_v.weight": "Q8_0",
        "blk.1.attn_q.weight": "Q5_0", "token_embd.weight": "Q8_0",
    }  # fmt: skip


def test_a_model_without_its_number_of_layers(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_v.weight": np.ones((2, 256), np.float32)}
    source = open_gguf(write_gguf(tmp_path / "in.gguf", {"general.architecture": "llama"}, tensors))
    with pytest.raises(ModelError, match=r"in\.gguf has no metadata key 'llama\.block_count'"):
        quantize_gguf(source, tmp_path / "out.gguf", "q4_K_M")
    quantize_gguf(source, tmp_path / "out.gguf", "q4_K")
    wrong = model(tmp_path / "wrong.gguf", 2, **{"attention.head_count": "many"})
    with pytest.raises(ModelError, match=r"attention\.head_count.*a whole number, or one for each layer"):
        quantize_gguf(wrong, tmp_path / "out.gguf", "q4_K_M")


def test_the_command_takes_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model(tmp_path / "in.gguf", 3)
    assert main(["quantize", str(source.path), str(tmp_path / "out.gguf"), "--type", "q5_k_m"]) == 0
    assert "bits per weight" in capsys.readouterr().out
    assert open_gguf(tmp_path / "out.gguf")["blk.2.ffn_down.weight"].dtype.name == "Q6_K"
