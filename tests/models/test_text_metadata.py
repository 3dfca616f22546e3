"""Each key `<architecture>.*` is read, refused or warned of by name, or known to be without effect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ggmlb import ModelError
from ggmlb.models import TextModel
from ggmlb.models.text.architectures import architectures
from ggmlb.models.text.keys import WITHOUT_EFFECT
from ggmlb.models.text.state_cache import n_slots
from tests.support.gguf_files import BOOL, UINT32, Typed, write_gguf
from tests.support.text_metadata import KEYS, Reader
from tests.support.text_models import KINDS, N_EMBD, N_VOCAB, sizes_of, vocabulary, write_text_model

REFUSED = {
    "attention.causal": Typed(BOOL, False), "attention.key_length_swa": 32, "attention.value_length_swa": 32,
    "embedding_length_out": 7, "expert_group_count": 2, "nextn_predict_layers": 1,
    "rope.dimension_count_swa": 16,
}  # fmt: skip
"""Keys that llama.cpp follows and that are not supported here, with values that change its results."""

SUPPORTED = {
    "attention.key_length_swa": ("gemma4",),
    "rope.dimension_count_swa": ("gemma4",),
    "expert_group_count": ("deepseek2", "glm4moe", "lfm2moe"),
    "nextn_predict_layers": ("deepseek2", "glm4moe", "qwen35", "qwen35moe", "qwen3next"),
}
"""Architectures that follow such a key."""

MAY_BE_NONE = WITHOUT_EFFECT | {
    "attention.scale", "attention.sliding_window", "attention.temperature_scale", "attn_logit_softcapping",
    "embedding_scale", "expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "final_logit_softcapping", "residual_scale", "rope.scaling.factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier", "ssm.dt_b_c_rms",
    "attention.q_lora_rank", "expert_gating_func", "expert_group_count", "expert_shared_count",
    "expert_weights_norm", "expert_weights_scale", "leading_dense_block_count",
    "attention.shared_kv_layers", "embedding_length_per_layer_input",
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


@pytest.mark.parametrize("arch", architectures())
def test_each_key_that_llama_cpp_knows(read: Reader, arch: str) -> None:
    """None is left out silently but those of `WITHOUT_EFFECT`."""
    values, plain = (3, 0.375, True, "odd", Typed(UINT32, 6)), read(arch)
    passed = {key for key in KEYS if all(read.outcome(arch, key, v, plain) == "passed over" for v in values)}
    assert passed <= WITHOUT_EFFECT <= set(KEYS)


@pytest.mark.parametrize("arch", architectures())
def test_a_key_of_nobody_is_warned_of(read: Reader, arch: str) -> None:
    with pytest.warns(RuntimeWarning, match=rf"{arch}\.wings0, .*{arch}\.wings7 and 1 others"):
        read(arch, {f"wings{i}": 2 for i in range(9)})


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("arch", architectures())
def test_what_is_not_supported_is_refused(read: Reader, arch: str, key: str) -> None:
    expected = "read" if arch in SUPPORTED.get(key, ()) else "refused"
    assert read.outcome(arch, key, REFUSED[key]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_nothing_are_refused(read: Reader, kind: str) -> None:
    """0 is refused, but where it says that there is no such part."""
    plain = read(kind)
    none = {
        key
        for key, value in sizes_of(kind, 7).items()
        if isinstance(value, (int, float)) and read.outcome(kind, key, type(value)(0), plain) != "refused"
    }
    own = {"logit_scale"} if kind in ("command-r", "cohere2", "granitehybrid") else set()
    assert none <= MAY_BE_NONE | own


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("attention.sliding_window_pattern", 3, "an array, a boolean for each layer"),
        (
            "attention.sliding_window_pattern",
            [True] * 4 + [False] * 3,
            "earlier layer has keys for layer 3",
        ),
        ("attention.head_count_kv", np.array([2, 2, 1, 2, 4, 1, 2], np.int32), "keys for layer 4"),
        ("attention.value_length_swa", 32, "must be 64, as that of keys"),
        ("rope.dimension_count_swa", 33, "it must be even"),
    ],
)
def test_contradictions_of_gemma4_are_refused(read: Reader, key: str, value: object, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        read("gemma4-inputs", {key: value})


@pytest.mark.parametrize("sections", [[2**31 - 1] * 4, [-1] * 4, [4, 4, 3, 4]])
def test_parts_of_positions_that_text_lacks_are_refused(read: Reader, sections: list[int]) -> None:
    with pytest.raises(ModelError, match=r"dimension_sections.*parts without a position"):
        read("qwen35", {"rope.dimension_sections": np.array(sections, np.int32)})
    read("qwen35", {"rope.dimension_sections": np.array([6, 5, 5, 0], np.int32)})


def test_all_parts_of_positions_are_read(read: Reader) -> None:
    """Also those beyond the number of layers."""
    with pytest.raises(ModelError, match=r"dimension_sections.*images"):
        read("glm4", {"rope.dimension_sections": np.array([0, 0, 0, 8], np.int32)})


def test_large_states_have_few_slots(read: Reader) -> None:
    """As many as fit 512 MiB, between the least number and the most; a layer has 2 KiB for each element."""
    found = [n_slots(read("mamba", {"ssm.state_size": n}).states) for n in (16, 1024, 4096, 1 << 15)]
    assert found == [16, 16, 9, 4]


def test_a_vocabulary_of_nothing_is_refused(read: Reader) -> None:
    with pytest.raises(ModelError, match=r"'token_embd\.weight' has ne"):
        read("llama", n_vocab=0)


PATTERNS = {
    "period": ({"attention.sliding_window_pattern": 3}, "LLfLLfL"),
    "all": ({"attention.sliding_window_pattern": 0}, "LLLLLLL"),
    "none": ({"attention.sliding_window_pattern": 1}, "fffffff"),
    "by layer": (
        {"attention.sliding_window_pattern": [True, False, True, True, False, False, True]},
        "LfLLffL",
    ),
    "few layers": ({"attention.sliding_window_pattern": np.array([0, 2], np.uint32)}, "fLfffff"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_windows(read: Reader, arch: str, pattern: str) -> None:
    changes, expected = PATTERNS[pattern]
    found = read(arch, {**changes, "rope.freq_base_swa": 500.0})
    layers = [a for a in found.attentions if a and a.rope]
    assert "".join("L" if a.window else "f" for a in layers) == expected
    assert found.windows == ((0, 8) if "L" in expected else (0,))
    assert all((a.rope.freq_base == 500) == bool(a.window) for a in layers if a.rope)


def test_gemma2_has_a_window_if_its_file_says_nothing(read: Reader) -> None:
    assert read("gemma2", {"attention.sliding_window": None}).windows == (0, 4096)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
@pytest.mark.parametrize("period", [0, 1])
def test_all_layers_alike(tmp_path: Path, kind: str, period: int) -> None:
    """A graph of such a model has one mask; what is generated is what `logits` gives."""
    path = write_text_model(tmp_path / "m.gguf", kind, changes={"attention.sliding_window_pattern": period})
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        prompt = list(range(260, 280))
        token = model.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True).tokens[0]
        assert token == model.logits(prompt)[-1].argmax()


def test_embeddings_are_pooled_as_the_file_says(tmp_path: Path) -> None:
    prompt = [1, 300, 270, 281]

    def embedded(**changes: int) -> np.ndarray:
        path = write_text_model(tmp_path / "model.gguf", "qwen3", changes=changes)
        with TextModel(path, ["CPU"], n_ctx=64) as model:
            return model.embed(prompt)

    hidden = embedded(pooling_type=0)
    assert hidden.shape == (len(prompt), N_EMBD)
    for changes, row in (
        ({}, hidden.mean(0)),
        ({"pooling_type": 1}, hidden.mean(0)),
        ({"pooling_type": 2}, hidden[0]),
        ({"pooling_type": 3}, hidden[-1]),
    ):
        np.testing.assert_allclose(embedded(**changes), row / np.linalg.norm(row), rtol=1e-4, atol=1e-6)
    with pytest.raises(ModelError, match=r"qwen3\.pooling_type.*rank"):
        embedded(pooling_type=4)


def test_a_small_file_gets_no_large_kv_cache_by_default(tmp_path: Path) -> None:
    """Of keys of 32,768 elements, 4,096 tokens take 268 MB a layer."""
    n, n_key, at = 32, 1 << 15, "blk.0."
    shapes = {
        "token_embd": (N_VOCAB, n), "output_norm": (n,), at + "attn_norm": (n,), at + "attn_q": (n_key, n),
        at + "attn_k": (n_key, n), at + "attn_v": (2, n), at + "attn_output": (n, 2), at + "ffn_norm": (n,),
        at + "ffn_gate": (32, n), at + "ffn_up": (32, n), at + "ffn_down": (n, 32),
    }  # fmt: skip
    sizes = sizes_of("llama", 1) | {
        "context_length": 8192, "embedding_length": n, "feed_forward_length": 32, "attention.head_count": 1,
        "attention.head_count_kv": 1, "attention.key_length": n_key, "attention.value_length": 2,
        "rope.dimension_count": 64,
    }  # fmt: skip
    keys = {f"llama.{key}": value for key, value in sizes.items()}
    weights = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", **keys, **vocabulary()}, weights)
    with pytest.raises(ModelError, match=r"KV cache of 4,096 tokens takes 268,451,840 bytes.*n_ctx, --ctx"):
        TextModel(path, ["CPU"])
    with TextModel(path, ["CPU"], n_ctx=8) as model:
        assert model.generate([5], max_tokens=1, ignore_eos=True).tokens


@pytest.mark.parametrize("kind", ["deepseek2", "glm4moe"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, kind: str) -> None:
    prompt, found = [1, 300, 270, 281], []
    for n_layer, changes in ((3, {}), (4, {"nextn_predict_layers": 1})):
        path = write_text_model(tmp_path / f"{n_layer}.gguf", kind, n_layer=n_layer, changes=changes)
        with TextModel(path, ["CPU"], n_ctx=64) as model:
            assert model.config.n_layer == 3
            found.append(model.logits(prompt))
    assert np.array_equal(*found)
