"""`ggmlb quantize`: types by tensor, and blocks as those of ggml's reference quantisers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import DType, ModelError, open_gguf, quantize
from ggmlb.cli import main
from ggmlb.models.gguf import GgufFile
from ggmlb.models.gguf.quantizing import FILE_TYPES, Change, quantize_gguf
from tests.support.gguf_files import quantized, write_gguf, write_split

SHAPES = {
    "token_embd.weight": (96, 256), "output_norm.weight": (256,), "output.weight": (96, 256),
    "blk.0.attn_norm.weight": (256,), "blk.0.attn_q.weight": (256, 256), "blk.0.attn_q.bias": (256,),
    "blk.0.attn_v.weight": (64, 256), "blk.0.ffn_down.weight": (256, 512),
    "blk.0.ffn_gate_inp.weight": (4, 256),
    "blk.0.ffn_up_exps.weight": (4, 32, 256), "blk.0.narrow.weight": (8, 96), "blk.0.odd.weight": (8, 40),
    "position_embd.weight": (32, 256), "rope_freqs.weight": (32,), "one.weight": (1, 256),
}  # fmt: skip


def weights(dtype: Any = np.float32, names: Any = SHAPES) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(SHAPES[n]).astype(dtype if len(SHAPES[n]) > 1 else "f4") for n in names}


@pytest.fixture
def source(tmp_path: Path) -> GgufFile:
    values = {"general.architecture": "llama", "general.file_type": 0, "tokens": ["a", "b"], "x": 0.5}
    return open_gguf(write_gguf(tmp_path / "in.gguf", values, weights()))


def types(changes: list[Change]) -> dict[str, str]:
    return {change.tensor.name: change.dtype.name for change in changes}


KEPT = {
    "output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight",
    "position_embd.weight", "rope_freqs.weight", "one.weight",
}  # fmt: skip


def test_types_by_tensor(source: GgufFile, tmp_path: Path) -> None:
    found = types(quantize_gguf(source, tmp_path / "out.gguf", "q4_K"))
    assert found == dict.fromkeys(KEPT, "F32") | {
        "token_embd.weight": "Q4_K", "output.weight": "Q6_K", "blk.0.attn_q.weight": "Q4_K",
        "blk.0.attn_v.weight": "Q4_K", "blk.0.ffn_down.weight": "Q4_K", "blk.0.ffn_up_exps.weight": "Q4_K",
        "blk.0.narrow.weight": "Q5_0", "blk.0.odd.weight": "F16",
    }  # fmt: skip
    out = open_gguf(tmp_path / "out.gguf")
    assert {name: tensor.dtype.name for name, tensor in out.items()} == found
    assert [tensor.ne for tensor in out.values()] == [tensor.ne for tensor in source.values()]
    assert dict(out.metadata) == dict(source.metadata) | {
        "general.file_type": 14, "general.quantization_version": 2,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", FILE_TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("stored", ["f4", "f2", "bf16"])
def test_blocks_are_those_of_the_codecs(tmp_path: Path, dtype: DType, stored: str) -> None:
    names = ["output_norm.weight", "output.weight", "blk.0.ffn_up_exps.weight"]
    kind = DType.BF16.numpy if stored == "bf16" else stored
    given = weights(kind, names)
    source = open_gguf(write_gguf(tmp_path / "in.gguf", {}, given))
    changes = quantize_gguf(source, tmp_path / "out.gguf", dtype, pure=True, n_threads=3)
    out = open_gguf(tmp_path / "out.gguf")
    for name in names[1:]:
        assert out[name].dtype is dtype
        assert out.blocks(name).tobytes() == quantize(given[name], dtype).tobytes()
    assert out["output_norm.weight"].dtype is DType.F32
    assert [change.nbytes for change in changes] == [tensor.nbytes for tensor in out.values()]
    assert out.metadata["general.file_type"] == FILE_TYPES[dtype]


def test_rules_decide_before_all_else(source: GgufFile, tmp_path: Path) -> None:
    rules = {"attn_v": "q8_0", r"attn_[qv]\.weight": "q5_1", "output_norm": "f16", "^output": "q4_0"}
    found = types(quantize_gguf(source, tmp_path / "out.gguf", "q4_K", rules=rules))
    assert found["blk.0.attn_v.weight"] == "Q8_0"
    assert found["blk.0.attn_q.weight"] == "Q5_1"
    assert found["output_norm.weight"] == "F16"
    assert found["output.weight"] == "Q4_0"


def test_the_output_matrix_may_be_the_token_embeddings(tmp_path: Path) -> None:
    names = ["token_embd.weight", "blk.0.attn_q.weight"]
    source = open_gguf(write_gguf(tmp_path / "in.gguf", {}, weights(names=names)))
    assert types(quantize_gguf(source, tmp_path / "a.gguf", "q4_K")) == dict(
        zip(names, ["Q6_K", "Q4_K"], strict=True)
    )
    assert set(types(quantize_gguf(source, tmp_path / "b.gguf", "q4_K", pure=True)).values()) == {"Q4_K"}
    assert set(types(quantize_gguf(source, tmp_path / "c.gguf", "q8_0")).values()) == {"Q8_0"}


def test_quantised_models_are_refused_unless_that_is_asked_for(tmp_path: Path) -> None:
    given = {"a.weight": quantized(weights()["output.weight"], "q8_0")}
    source = open_gguf(write_gguf(tmp_path / "in.gguf", {}, given))
    out = tmp_path / "out.gguf"
    with pytest.raises(
        ModelError, match=r"'a.weight' is Q8_0 already; Q4_0 made from it is less accurate.*requantize"
    ):
        quantize_gguf(source, out, "q4_0")
    assert not out.exists()
    quantize_gguf(source, out, "q8_0")  # nothing is converted
    assert open_gguf(out).blocks("a.weight").tolist() == source.blocks("a.weight").tolist()
    quantize_gguf(source, out, "q4_0", requantize=True)
    assert open_gguf(out).blocks("a.weight").tolist() == quantize(source.array("a.weight"), "q4_0").tolist()


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    given = weights()
    names = list(given)
    parts = [{n: given[n] for n in names[:5]}, {n: given[n] for n in names[5:]}]
    source = open_gguf(write_split(tmp_path, "m", {"k": 1}, parts)[0])
    quantize_gguf(source, tmp_path / "out.gguf", "q8_0")
    out = open_gguf(tmp_path / "out.gguf")
    assert list(out) == names
    assert sorted(out.metadata) == ["general.file_type", "general.quantization_version", "k"]


def test_progress_counts_every_byte(source: GgufFile, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    quantize_gguf(source, tmp_path / "out.gguf", "q4_0", progress=lambda *done: told.append(done))
    assert told == sorted(told)
    assert told[-1] == (source.nbytes, source.nbytes)


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"dtype": "q9"}, ggmlb.DTypeError, "no tensor type 'q9'"),
        ({"dtype": "iq2_xs"}, ggmlb.DTypeError, "IQ2_XS is no type to store weights in; use f32, f16, q4_0"),
        ({"dtype": "i32"}, ggmlb.DTypeError, "I32 is no type to store weights in"),
        ({"dtype": "q8_1"}, ggmlb.DTypeError, "Q8_1 is no type to store weights in"),
        ({"rules": {"(": "q4_0"}}, ggmlb.ArgumentError, r"the rule '\(' is no regular expression"),
        ({"rules": {"nobody": "q4_0"}}, ggmlb.ArgumentError, "the rule 'nobody' matches no tensor"),
        ({"rules": {"ffn": "q9"}}, ggmlb.DTypeError, "no tensor type 'q9'"),
        ({"n_threads": 0}, ggmlb.ArgumentError, "n_threads is 0; give 1 or more"),
    ],
)
def test_wrong_arguments(
    source: GgufFile, tmp_path: Path, change: Any, kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=why):
        quantize_gguf(source, tmp_path / "out.gguf", **({"dtype": "q4_0"} | change))
    assert not (tmp_path / "out.gguf").exists()


def test_a_model_is_not_written_over_itself(source: GgufFile) -> None:
    with pytest.raises(ggmlb.ArgumentError, match="is the model that is read; give another name"):
        quantize_gguf(source, source.path, "q4_0")


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(
    source: GgufFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str) -> tuple[int, str, str]:
        status = main(["quantize", str(source.path), str(tmp_path / "out.gguf"), *args])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def test_the_command_writes_a_file_and_says_what_is_otherwise(run: Any, tmp_path: Path) -> None:
    status, out, err = run("--type", "q4_K", "--rule", "ffn_down=q6_K", "--rule", "attn_v=q8_0")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "blk.0.narrow.weight: rows of 96 elements are not whole Q4_K blocks of 256; stored as Q5_0"
    )
    assert "bits per weight" in lines[-1]
    file = open_gguf(tmp_path / "out.gguf")
    assert [file[f"blk.0.{n}.weight"].dtype.name for n in ("ffn_down", "attn_v")] == ["Q6_K", "Q8_0"]


@pytest.mark.parametrize(
    ("args", "status", "why"),
    [
        ((), 2, "--type"),
        (("--type", "q9"), 1, "no tensor type 'q9'"),
        (("--type", "q4_0", "--rule", "ffn"), 1, "--rule ffn: give REGEX=TYPE, as ffn_down=q6_K"),
        (
            ("--type", "q4_0", "--rule", "nobody=q4_0"),
            1,
            "'nobody' matches no tensor; see the names with ggmlb show",
        ),
        (("--type", "q4_0", "--threads", "0"), 2, "--threads"),
    ],
)
def test_wrong_usage_of_the_command(run: Any, args: tuple[str, ...], status: int, why: str) -> None:
    found, out, err = run(*args)
    assert (found, out) == (status, "")
    assert why in err


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_values_that_blocks_do_not_have_are_refused_by_the_tensors_name(
    value: float, dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tensors = weights(dtype, ["blk.0.attn_q.weight", "blk.0.attn_v.weight"])
    tensors["blk.0.attn_v.weight"][60, 7] = value
    path = write_gguf(tmp_path / "in.gguf", {"general.architecture": "llama"}, tensors)
    assert main(["quantize", str(path), str(tmp_path / "out.gguf"), "--type", "q8_0"]) == 1
    assert "tensor 'blk.0.attn_v.weight' has 1 NaN or infinite values" in capfd.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
    kept = ["--rule", f"attn_v={'f32' if dtype == '<f4' else 'f16'}"]
    assert main(["quantize", str(path), str(tmp_path / "out.gguf"), "--type", "q8_0", *kept]) == 0
    found = open_gguf(tmp_path / "out.gguf").array("blk.0.attn_v.weight")
    np.testing.assert_array_equal(found, tensors["blk.0.attn_v.weight"])
