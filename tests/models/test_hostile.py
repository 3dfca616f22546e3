"""Model folders that are wrong in any way give a ModelError, or embeddings of length 1; nothing else."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import textwrap
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ggmlb.core.errors import ModelError
from ggmlb.models import BertConfig, BertEmbedder, ModelFolder
from ggmlb.models import tensor_file as tensor_file_module
from ggmlb.models.tensor_file import TensorFile

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "text", "of", "words"]

CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "vocab_size": len(WORDS),
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            name: {"id": name, "ids": [WORDS.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")
        },
    },
    "decoder": None,
    "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {word: i for i, word in enumerate(WORDS)},
    },
}

TEXTS = ["a text of words", "", "unknown", "words " * 100]


def weights() -> dict[str, np.ndarray]:
    """The weights of a model of the sizes in `CONFIG`."""
    rng = np.random.default_rng(0)
    n, n_ff = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    made: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        made[name] = rng.standard_normal(shape, np.float32)

    def norm(name: str) -> None:
        add(name + ".weight", n)
        add(name + ".bias", n)

    def linear(name: str, n_out: int, n_in: int) -> None:
        add(name + ".weight", n_out, n_in)
        add(name + ".bias", n_out)

    for name, rows in (("word", len(WORDS)), ("position", 16), ("token_type", 2)):
        add(f"embeddings.{name}_embeddings.weight", rows, n)
    norm("embeddings.LayerNorm")
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        for part in ("query", "key", "value"):
            linear(f"{at}attention.self.{part}", n, n)
        linear(at + "attention.output.dense", n, n)
        norm(at + "attention.output.LayerNorm")
        linear(at + "intermediate.dense", n_ff, n)
        linear(at + "output.dense", n, n_ff)
        norm(at + "output.LayerNorm")
    return made


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a model that works, small enough to be tried hundreds of times."""
    folder = tmp_path / "small"
    folder.mkdir()
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer.json", TOKENIZER)
    save_file(weights(), folder / "model.safetensors")
    return folder


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def embed(folder: Path, **options: Any) -> np.ndarray:
    """The embeddings of `TEXTS`, which must be of length 1."""
    with BertEmbedder(folder, devices=["CPU"], **options) as embedder:
        found = embedder.embed(TEXTS)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-4)
    return found


def refused(folder: Path, says: str, **options: Any) -> None:
    with pytest.raises(ModelError, match=says):
        embed(folder, **options)


def test_the_small_model_works(small: Path) -> None:
    assert embed(small).shape == (len(TEXTS), 32)


# -- config.json -----------------------------------------------------------------------------------

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 5, 10**9, 2**31, 2**32 - 1, 2**63, 10**30, 10**400, 0.5, -0.0,
    1e300, math.nan, math.inf, -math.inf, "", "bert", "32", "\ud800", [], [32], {}, {"a": [{}]},
]  # fmt: skip


@pytest.mark.parametrize("key", [*CONFIG, "position_embedding_type"])
def test_no_value_in_a_configuration_gives_anything_else(small: Path, key: str) -> None:
    n_refused = 0
    for value in ODD:
        write_json(small / "config.json", CONFIG | {key: value})
        try:
            embed(small)
        except ModelError as error:
            n_refused += 1
            assert len(str(error)) < 2000
    assert n_refused >= 20


@pytest.mark.parametrize("n_layers", [3, 10**9, 10**30])
def test_layers_are_counted_in_the_file_before_anything_is_made_of_them(small: Path, n_layers: int) -> None:
    write_json(small / "config.json", CONFIG | {"num_hidden_layers": n_layers})
    refused(small, r"has no tensor 'encoder\.layer\.2\.")


@pytest.mark.parametrize("name", ["config.json", "sentence_bert_config.json", "1_Pooling/config.json"])
@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * 100_000, "is not JSON: .*recursion"),
        (b'{"a":' * 100_000, "is not JSON: .*recursion"),
        (b"\xff\xfe", "is not JSON: 'utf-8' codec"),
        (b"\xef\xbb\xbf{}", "is not JSON: .*BOM"),
        (b"", "is not JSON"),
        (b"[1]", "holds a JSON list"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON: Exceeds the limit"),
        (b" " * (1 << 24) + b"{}", "more than 16,777,216 bytes"),
    ],
    ids=["lists", "objects", "no utf-8", "mark", "empty", "a list", "digits", "large"],
)
def test_json_that_is_none(small: Path, name: str, raw: bytes, says: str) -> None:
    (small / name).parent.mkdir(exist_ok=True)
    (small / name).write_bytes(raw)
    refused(small, says)


NAMES = ["config.json", "sentence_bert_config.json", "tokenizer.json", "model.safetensors"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that fails to be read")
def test_a_file_that_cannot_be_read(small: Path, name: str) -> None:
    (small / name).unlink(missing_ok=True)
    (small / name).symlink_to("/proc/self/mem")  # a regular file, to which the system answers EIO
    refused(small, f"{name}")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="root gives up its rights in this test")
def test_files_that_only_another_user_may_read(small: Path) -> None:
    write_json(small / "sentence_bert_config.json", {})
    folders = []
    for name in (".", *NAMES):
        folders.append(small.parent / f"no {name}")
        shutil.copytree(small, folders[-1])
        (folders[-1] / name).chmod(0)
    for parent in small.parents[:4]:
        parent.chmod(parent.stat().st_mode | 0o055)
    code = """
        import os, sys
        import numpy, safetensors, tokenizers
        from ggmlb import ModelError, device_by_name
        from ggmlb.models import BertEmbedder
        device_by_name("CPU")
        os.setgid(65534)
        os.setuid(65534)
        for folder in sys.argv[1:]:
            try:
                BertEmbedder(folder, devices=["CPU"])
            except ModelError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, folders)],
        capture_output=True,
        text=True,
        check=True,
    )
    for folder in folders:
        folder.chmod(0o700)
    told = done.stdout.splitlines()
    assert len(told) == len(folders)
    for line, name in zip(told, ("model folder", *NAMES), strict=True):
        assert "ermission denied" in line
        assert name in line


@pytest.mark.parametrize("path", ["~nobody-of-that-name/model", "x" * 5000, "a\0b"])
def test_a_folder_of_an_impossible_name(path: Any) -> None:
    with pytest.raises(ModelError, match="model folder"):
        ModelFolder(path)


# -- tokenizer.json --------------------------------------------------------------------------------


def changed(**parts: Any) -> dict[str, Any]:
    return TOKENIZER | parts


def post(**parts: Any) -> dict[str, Any]:
    return changed(post_processor=TOKENIZER["post_processor"] | parts)


def model(**parts: Any) -> dict[str, Any]:
    return changed(model=TOKENIZER["model"] | parts)


def special(ids: list[int]) -> dict[str, Any]:
    known = TOKENIZER["post_processor"]["special_tokens"]
    return post(special_tokens=known | {"[SEP]": {"id": "[SEP]", "ids": ids, "tokens": ["[SEP]"] * len(ids)}})


def in_turn(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def replaced(kind: str, pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


VOCAB = TOKENIZER["model"]["vocab"]

TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "no [SEP]": (
        post(special_tokens={"[CLS]": TOKENIZER["post_processor"]["special_tokens"]["[CLS]"]}),
        "fails on a",
    ),
    "no special tokens": (changed(post_processor=None), "makes 0 tokens of a text; the model takes 1 to 16"),
    "no sequence": (post(single=[]), "makes 0 tokens"),
    "a large id of [SEP]": (special([2**32 - 1]), "gives the token 4294967295; config.json says .* has 8"),
    "an id of [SEP] that is one too large": (special([8]), "gives the token 8; config.json says .* has 8"),
    "many [SEP]": (special([3] * 17), "tokens of a text; the model takes 1 to 16"),
    "a large id in the vocabulary": (
        model(vocab=VOCAB | {"x": 2**32 - 1}),
        "numbers tokens up to 4294967295",
    ),
    "no [UNK]": (
        model(vocab={w: i for w, i in VOCAB.items() if w != "[UNK]"}),
        r"fails on a text: .*Missing \[UNK\]",
    ),
    "nothing in the vocabulary": (model(vocab={}), r"fails on a text: .*Missing \[UNK\]"),
    **{
        f"texts that grow: {name}": (
            changed(normalizer=rules),
            "turns one character into up to .*; at most 1,024",
        )
        for name, rules in {
            "five rules": in_turn(*5 * [replaced("String", "a", 100 * "a")]),
            "no pattern": in_turn(*11 * [replaced("String", "", "a")]),
            "between characters": in_turn(*11 * [replaced("Regex", "x?", "a")]),
            "sequences": in_turn(*3 * [in_turn(*5 * [replaced("String", "b", "bbb")])]),
            "a prefix": in_turn({"type": "Prepend", "prepend": 1500 * "p"}),
            "a table": {
                "type": "Precompiled",
                "precompiled_charsmap": b64encode(struct.pack("<II", 4, 0) + 2000 * b"x" + b"\0").decode(),
            },
        }.items()
    },
    "long words": (
        model(max_input_chars_per_word=10**9),
        "max_input_chars_per_word is 1000000000; at most 256",
    ),
}


def test_a_normalizer_that_keeps_texts_short(small: Path) -> None:
    rules = in_turn(
        {"type": "Lowercase"}, replaced("Regex", " {2,}", " "), replaced("String", "``", '"'),
        {"type": "Prepend", "prepend": "a"}, *20 * [replaced("String", "b", "a")],
    )  # fmt: skip
    write_json(small / "tokenizer.json", changed(normalizer=rules))
    with BertEmbedder(small, ["CPU"]) as embedder:
        assert embedder.embed(["abba"]).shape == (1, 32)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_is_wrong(small: Path, name: str) -> None:
    content, says = TOKENIZERS[name]
    write_json(small / "tokenizer.json", content)
    refused(small, rf"tokenizer\.json:? .*{says}")


@pytest.mark.parametrize("key", ["max_position_embeddings", "max_seq_length"])
def test_texts_that_have_room_for_no_token(small: Path, key: str) -> None:
    """The tokenizers library cuts nothing where the special tokens alone are too many."""
    name = "config.json" if key == "max_position_embeddings" else "sentence_bert_config.json"
    write_json(small / name, (CONFIG if name == "config.json" else {}) | {key: 1})
    refused(small, f"{key} is 1; it must be a whole number above 2")


# -- weights ---------------------------------------------------------------------------------------


def with_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> None:
    save_file(dict(change(weights())), folder / "model.safetensors")


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4", "i8", "?"])
def test_weights_of_whole_numbers(small: Path, dtype: str) -> None:
    """A matrix, a vector: whichever is not floating point."""
    for name in ("encoder.layer.1.output.dense.weight", "encoder.layer.0.output.dense.bias"):
        with_weights(small, lambda w, name=name: w | {name: w[name].astype(dtype)})  # type: ignore[misc]
        refused(small, f"'{name}' has type (.*weights must be floating point|.*ggml does not have)")


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_weights_of_other_precision(small: Path, dtype: str) -> None:
    expected = embed(small)
    with_weights(small, lambda w: {name: value.astype(dtype) for name, value in w.items()})
    for options in ({}, {"weight_type": "f32"}):
        assert np.allclose(embed(small, **options), expected, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["encoder.layer.0.attention.self.key.bias", "encoder.layer.1.output.LayerNorm.weight"]
)
def test_weights_that_are_not_finite(small: Path, name: str, value: float) -> None:
    def damage(w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        w[name][3] = value
        return w

    with_weights(small, damage)
    refused(small, f"the embedding of text 0 is not finite: .*NaN or infinity in '{name}'")


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_weights_that_overflow_the_type_they_are_stored_in(small: Path) -> None:
    with_weights(small, lambda w: {n: v * (1e6 if "dense" in n else 1) for n, v in w.items()})
    refused(small, "text 0 is not finite.* are stored in F16: try weight_type='f32'", weight_type="f16")
    embed(small, weight_type="f32")


def test_an_embedding_of_no_length(small: Path) -> None:
    with_weights(small, lambda w: {n: np.zeros_like(v) for n, v in w.items()})
    refused(small, "the embedding of text 0 is not finite, or of length 0")


# -- a file that changes ---------------------------------------------------------------------------


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(0, 0))  # whatever the clock's resolution


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = [overwrite, cut, grow]


def replace(path: Path) -> None:
    save_file(weights(), path.with_name("new"))
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [*CHANGES, replace])
def test_a_file_that_is_changed_while_it_is_opened(
    small: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = tensor_file_module._check_header

    def slow(path: Path, fd: int) -> None:
        check(path, fd)
        change(path)

    monkeypatch.setattr(tensor_file_module, "_check_header", slow)
    with pytest.raises(ModelError, match=r"model\.safetensors was changed while it was in use"):
        TensorFile(small / "model.safetensors")


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_while_its_weights_are_used(
    small: Path, change: Callable[[Path], None]
) -> None:
    with BertEmbedder(small, devices=["CPU"]) as embedder:
        embedder.embed(TEXTS)
        change(small / "model.safetensors")
        with pytest.raises(ModelError, match=r"was changed while it was in use; .* open the model anew"):
            embedder.embed(TEXTS)


def test_a_file_that_is_replaced_by_another_of_its_name_is_still_used(small: Path) -> None:
    with BertEmbedder(small, devices=["CPU"]) as embedder:
        expected = embedder.embed(TEXTS)
        save_file({"another": np.ones(1)}, small / "new")
        (small / "new").replace(small / "model.safetensors")
        assert np.array_equal(embedder.embed(TEXTS), expected)


def test_a_folder_is_read_without_its_weights(small: Path) -> None:
    write_json(small / "config.json", CONFIG | {"num_hidden_layers": 10**9})
    assert BertConfig.from_folder(ModelFolder(small)).n_layer == 10**9


# -- damage of any kind ----------------------------------------------------------------------------

PIECES = [b"9" * 12, b"-", b"null", b"[", b"{", b'"', b"1e999", b"\xff", b"true"]


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes overwritten, left out, put in, or copied from elsewhere in the file, most near its head."""
    found = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, other = (rng.randrange(max(1, min(len(found), rng.choice((3000, 1 << 30))))) for _ in range(2))
        kind = rng.randrange(4)
        if kind == 0:
            found[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del found[at : at + rng.randrange(1, 30)]
        elif kind == 2:
            found[at:at] = rng.choice(PIECES)
        else:
            found[at : at + 8] = found[other : other + 8]
    return bytes(found)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_no_damage_gives_anything_else(small: Path, name: str) -> None:
    write_json(small / "sentence_bert_config.json", {"max_seq_length": 16})
    whole, rng = (small / name).read_bytes(), random.Random(0)
    n_refused = 0
    for _ in range(100):
        (small / name).write_bytes(damaged(whole, rng))
        try:
            embed(small)
        except ModelError:
            n_refused += 1
    assert n_refused >= 50
