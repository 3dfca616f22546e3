"""ggml's Vulkan as a device, on whatever driver there is: `make test-vulkan` brings Mesa's, on the CPU.

It compiles shaders for up to a minute for an op, so cases are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import BackendError, BackendUnavailable, Context, DeviceType, Graph, RegistryError, Scheduler
from ggmlb.models import BertEmbedder, Placement, TextModel, default_text_model
from tests.support.ggml_faults import REPORTS, what_it_lacks
from tests.support.golden import claimed, wrong
from tests.support.kit import faults
from tests.support.text_models import write_text_model

NAME = "ggml:Vulkan0"
PROMPT = [1, 260, 267, 274, 281, 288]
"""Short: ggml asks for the products of many tokens, wherever their weights are (`offload_op`)."""

try:
    ggmlb.device_by_name(NAME)
except (BackendUnavailable, RegistryError):
    pytest.skip(f"there is no {NAME}: make test-vulkan brings it", allow_module_level=True)


@pytest.fixture(scope="module")
def device() -> Any:
    return ggmlb.device_by_name(NAME)


@pytest.fixture
def stream(device: Any) -> Iterator[Any]:
    with device.init_backend() as backend:
        yield backend


def test_it_is_a_gpu_with_memory_of_its_own(device: Any) -> None:
    assert device.type is DeviceType.GPU and not device.buffer_type.is_host
    assert device.caps.async_ and device.caps.events
    assert device.host_buffer_type.is_host and device.host_buffer_type.name != device.buffer_type.name


def test_it_is_the_best_device(device: Any) -> None:
    with ggmlb.init_best() as stream:
        assert stream.device is device


def test_it_asks_for_products_of_many_columns(device: Any) -> None:
    ctx = Context()
    w = ctx.new_tensor("f32", (64, 64))
    products = [ctx.mul_mat(w, ctx.new_tensor("f32", (64, n))) for n in (1, 512)]
    assert [device.offload_op(product) for product in products] == [False, True]


def test_it_has_no_threads_to_set(stream: Any) -> None:
    with pytest.raises(BackendError, match="no threads to set"):
        stream.set_n_threads(2)


def test_it_behaves(device: Any) -> None:
    assert faults(device, "behaviour", 0) == []


@pytest.mark.parametrize("name", [name for name in REPORTS if name.startswith("vulkan-")])
def test_faults_that_are_reported_are_there(device: Any, name: str, tmp_path: Path) -> None:
    assert not (why := what_it_lacks(name, device.library.found, tmp_path)), why


OPS = ("add", "mul", "scale", "rms_norm", "silu", "soft_max_ext", "cpy")


@pytest.mark.parametrize("mode", ["test", "support"])
def test_the_kit_passes(device: Any, mode: str) -> None:
    assert faults(device, mode, 2, ops=OPS) == []


@pytest.mark.parametrize("family", ["norm", "rope"])
def test_golden_programs(device: Any, stream: Any, family: str) -> None:
    cases = claimed(device, family)
    assert len(cases) >= 30
    assert not (why := wrong(cases, stream, n_runs=2)), why


def logits(path: Path, devices: list[str], **options: Any) -> tuple[np.ndarray, Any]:
    with TextModel(path, placement=Placement(devices, **options), n_ctx=64) as model:
        found = model.logits(PROMPT).astype(np.float64)
        assert model.scheduler is not None
        return found - found.max(axis=-1, keepdims=True), model.scheduler.placement


def ran_on(placement: Any, name: str) -> set[str]:
    return {p.op for p in placement if p.device == name}


def test_layers_on_vulkan_and_the_rest_on_llvm(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "llama.gguf", "llama", "f32")
    expected, _ = logits(path, ["CPU"])
    found, placement = logits(path, [NAME, "LLVM", "CPU"], layers={NAME: "0-1"})
    assert np.abs(found - expected).max() < 0.1  # it multiplies in half precision
    assert {"MUL_MAT", "RMS_NORM"} <= ran_on(placement, NAME)
    assert "RMS_NORM" in ran_on(placement, "LLVM")


def test_experts_on_the_cpu_and_attention_on_vulkan(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "moe.gguf", "qwen3moe", "f32")
    expected, _ = logits(path, ["CPU"])
    found, placement = logits(path, [NAME, "CPU"], overrides={"exps": "CPU"})
    assert np.abs(found - expected).max() < 0.1  # it multiplies in half precision
    assert "MUL_MAT" in ran_on(placement, NAME)
    assert "MUL_MAT_ID" in ran_on(placement, "CPU") - ran_on(placement, NAME)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_layers_of_smollm2_on_vulkan() -> None:
    """A real model: its products are in Q4_1 and Q8_0, rounded differently by each device."""
    path = default_text_model()
    expected, _ = logits(path, ["CPU"])
    found, placement = logits(path, [NAME, "LLVM", "CPU"], layers={NAME: "0-9"})
    assert ((found - expected) ** 2).sum() < 1e-3 * (expected**2).sum()
    assert np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))
    devices = [p.device for p in placement]
    assert devices.count(NAME) > 150 and devices.count("LLVM") > 300


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_layers_of_minilm_on_vulkan() -> None:
    texts = ["A man is playing a guitar."]
    with BertEmbedder(devices=["CPU"]) as embedder:
        expected = embedder.embed(texts)
    with BertEmbedder(devices=[NAME, "LLVM", "CPU"], layers_on={NAME: "0-2"}) as embedder:
        found = embedder.embed(texts)
        assert embedder.scheduler is not None
        placement = embedder.scheduler.placement
    assert np.abs(found - expected).max() < 1e-3  # of vectors of length 1
    assert "MUL_MAT" in ran_on(placement, NAME) & ran_on(placement, "LLVM")


def test_two_libraries_in_one_graph() -> None:
    """What one computes reaches the other through host memory."""
    other = next((d for d in ggmlb.devices() if d.name == "ggml2:CPU"), None)
    if other is None:
        pytest.skip("there is no second library: pip install 'ggmlb[ggml]'")
    with ggmlb.init_by_name(NAME) as first, other.init_backend() as second, ggmlb.init_by_name("CPU") as cpu:
        ctx = Context()
        w, v = (ctx.new_tensor("f32", (64, 64)) for _ in range(2))
        x = ctx.set_input(ctx.new_tensor("f32", (64, 4)))
        y = ctx.mul_mat(v, ctx.silu(ctx.mul_mat(w, x)))
        for weight, stream in ((w, first), (v, second)):
            buffer = stream.alloc_buffer(weight.nbytes)
            buffer.usage = "weights"
            ggmlb.tensor_alloc(buffer, weight, 0)
        rng = np.random.default_rng(0)
        values = [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(2)]
        w.set_array(values[0])
        v.set_array(values[1])
        data = rng.standard_normal((4, 64)).astype(np.float32)
        with Scheduler([first, second, cpu]) as scheduler:
            graph = Graph().build_forward_expand(y)
            scheduler.alloc_graph(graph)
            x.set_array(data)
            scheduler.graph_compute(graph)
            found = y.to_numpy().copy()
            assert {p.device for p in scheduler.placement} >= {NAME, "ggml2:CPU"}
        hidden = data @ values[0].T
        expected = (hidden / (1 + np.exp(-hidden))) @ values[1].T
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)
