"""Attention is the same in generating, training and tracing: fused, by ops with gradients, and as weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError, Context, Graph, ModelError, open_gguf
from ggmlb.models import TextModel, register_architecture
from ggmlb.models.text.architectures import architectures
from ggmlb.models.text.blocks.attention import Attention, attend, attention_weights, hidden_tokens
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys
from tests.support.text_models import write_text_model

N_HEAD, N_HEAD_KV, N_KEY, N_VALUE, N = 4, 2, 16, 8, 12
PLAIN = Attention(N_HEAD, N_HEAD_KV, N_KEY, N_VALUE, scale=0.25)
SORTS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=4),
    "softcap": replace(PLAIN, softcap=2.0),
    "sinks": replace(PLAIN, has_sinks=True),
    "all": replace(PLAIN, window=4, softcap=2.0, has_sinks=True),
}
DEVICES = [name for name in ("CPU", "LLVM", "OpenCL0") if name in {d.name for d in ggmlb.devices()}]


def reference(a: Attention, arrays: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The weights of attention and its output, in float64."""
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(x, N_HEAD // N_HEAD_KV, axis=0) for x in (k, v))
    scores = q @ k.transpose(0, 2, 1) * a.scale
    if a.softcap:
        scores = a.softcap * np.tanh(scores / a.softcap)
    late = np.arange(N) - np.arange(N)[:, None]
    scores[:, (late > 0) | ((late <= -a.window) if a.window else False)] = -np.inf
    shares = np.exp(scores)
    total = shares.sum(-1, keepdims=True)
    if a.has_sinks:
        total += np.exp(arrays["sinks"].astype(np.float64))[:, None, None]
    weights = shares / total
    return weights, (weights @ v).transpose(1, 0, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sort", SORTS)
def test_attention_is_the_same_in_its_three_uses(sort: str, device: str) -> None:
    a, rng = SORTS[sort], np.random.default_rng(0)
    shapes = {"q": (N_HEAD, N, N_KEY), "k": (N_HEAD_KV, N, N_KEY), "v": (N_HEAD_KV, N, N_VALUE)}
    arrays = {name: 2 * rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    arrays["sinks"] = rng.standard_normal(N_HEAD).astype(np.float32)
    place = np.arange(N, dtype=np.int32)
    hidden = hidden_tokens(0 * place, place, (0 * place, place), a.window)
    ctx = Context()
    q, k, v, sinks = (ctx.set_input(ctx.from_array(arrays[name])) for name in ("q", "k", "v", "sinks"))
    mask = ctx.from_array(np.where(hidden, -np.inf, 0).astype(np.float16))
    told = a.sinks({"blk.7.attn_sinks.weight": sinks}, 7)
    fused = ctx.set_output(attend(ctx, a, q, k, v, mask, told))
    unfused = ctx.set_output(attend(ctx, a, q, k, v, mask, told, has_gradient=True))
    weights = ctx.set_output(attention_weights(ctx, a, q, k, mask, told))
    graph = Graph()
    for output in (fused, unfused, weights):
        graph.build_forward_expand(output)
    with ExitStack() as stack:
        backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in dict.fromkeys((device, "CPU"))]
        scheduler = stack.enter_context(ggmlb.Scheduler(backends))
        scheduler.alloc_graph(graph)
        scheduler.graph_compute(graph)
        found = [t.to_numpy() for t in (fused, unfused, weights)]
    expected, mixed = reference(a, arrays)
    np.testing.assert_allclose(found[2].reshape(expected.shape), expected, atol=1e-4)
    for output in found[:2]:
        np.testing.assert_allclose(output.reshape(mixed.shape), mixed, atol=2e-3)


def test_gradients_pass_through_sinks() -> None:
    """As differences of the loss do."""
    rng = np.random.default_rng(1)
    values = {"x": rng.standard_normal((2, 3, 5)), "sinks": rng.standard_normal(2)}
    x32, sinks32 = (values[name].astype(np.float32) for name in ("x", "sinks"))
    weight = rng.standard_normal((2, 3, 5)).astype(np.float32)

    def loss(x: np.ndarray) -> float:
        shares = np.exp(x)
        total = shares.sum(-1, keepdims=True) + np.exp(values["sinks"])[:, None, None]
        return float((shares / total * weight).sum())

    ctx = Context()
    x = ctx.set_param(ctx.from_array(x32))
    shares = ctx.soft_max_add_sinks(ctx.soft_max_ext(x, None, 1.0), ctx.from_array(sinks32))
    total = ctx.set_loss(ctx.sum(ctx.mul(shares, ctx.from_array(weight))))
    graph = Graph().build_forward_expand(total)
    graph.build_backward_expand(ctx)
    gradient = graph.grad(x)
    assert gradient is not None
    ctx.set_output(gradient)
    with ggmlb.init_by_name("CPU") as cpu, ggmlb.Scheduler([cpu]) as scheduler:
        scheduler.alloc_graph(graph)
        graph.reset()
        scheduler.graph_compute(graph)
        found = gradient.to_numpy().reshape(2, 3, 5)
    for at in np.ndindex(2, 3, 5):
        step = np.zeros((2, 3, 5))
        step[at] = 1e-5
        expected = (loss(values["x"] + step) - loss(values["x"] - step)) / 2e-5
        assert abs(found[at] - expected) < 1e-4


def test_an_architecture_has_one_reader() -> None:
    def read(keys: Keys) -> TextConfig:
        raise AssertionError

    assert {"llama", "gpt-oss", "mamba"} <= {*architectures()}
    with pytest.raises(ArgumentError, match="'llama' has a reader already; choose another name"):
        register_architecture("llama")(read)
    assert architectures().count("llama") == 1


def test_a_package_whose_architecture_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[ggmlb.architectures]\nbroken = no_such_module:read\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write_text_model(tmp_path / "m.gguf", "llama", changes={})
    changed = open_gguf(path).metadata | {"general.architecture": "broken"}
    ggmlb.save_gguf(tmp_path / "broken.gguf", changed, {})
    with pytest.raises(ModelError, match="'broken', no_such_module:read, cannot be loaded: ModuleNotFound"):
        TextModel(tmp_path / "broken.gguf", ["CPU"])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.head_count", [4, 4], r"head_count'.*it must be 3 integers"),
        ("attention.head_count_kv", [2, 2, 3], r"head_count_kv'.*it is 3; it must divide the 4 heads"),
        ("attention.head_count_kv", [2, 2, 8], r"head_count_kv'.*it is 8 for layer 2; it must be 1 to 4"),
        ("feed_forward_length", [512, 512, 256], r"'blk.2.ffn_gate.weight' has shape \[512, 256\]"),
    ],
)
def test_sizes_by_layer_that_do_not_fit(tmp_path: Path, key: str, value: list[int], says: str) -> None:
    path = write_text_model(tmp_path / "m.gguf", "llama", changes={key: np.array(value, np.int32)})
    with pytest.raises(ModelError, match=says):
        TextModel(path, ["CPU"])
