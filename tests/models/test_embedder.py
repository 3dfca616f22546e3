"""The main job: embeddings equal to the reference, wherever the layers lie."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import ggmlb
from ggmlb.core.errors import ArgumentError, DTypeError, FreedError, RegistryError, ShapeError
from ggmlb.models import BertEmbedder

F32 = npt.NDArray[np.float32]
N_EMBD = 384


def cosines(a: F32, b: F32) -> F32:
    return np.einsum("ij,ij->i", a, b) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[BertEmbedder]:
    with BertEmbedder(devices=["CPU"]) as embedder:
        yield embedder


# -- proof: equal to the reference, and split as asked ---------------------------------------------

CPU, CL = "CPU", "OpenCL0"

WHERE: dict[str, tuple[list[str], Mapping[str, str] | None, list[tuple[str, list[str]]]]] = {
    # name: devices, layers_on, and for each split the device and what is copied to it
    "cpu only": ([CPU], None, [(CPU, [])]),
    "opencl only": ([CL], None, [(CL, ["ids", "mask", "pool"])]),  # inputs lie in host memory
    "layers 0-2 on opencl, 3-5 on cpu": (
        [CL, CPU],
        {CL: "0-2", CPU: "3-5"},
        [(CPU, []), (CL, ["hidden_0", "mask"]), (CPU, ["hidden_3"])],
    ),
    "layers 0-2 on cpu, 3-5 on opencl": (
        [CL, CPU],
        {CPU: "0-2", CL: "3-5"},
        # The pooling has no weights: it follows the last layer.
        [(CPU, []), (CL, ["hidden_3", "mask", "pool"])],
    ),
    "all weights on opencl": (
        [CL, CPU],
        {CL: "all,embeddings"},
        [(CL, ["ids", "mask", "pool"])],  # the inputs belong to the last device
    ),
    "all layers on opencl, embeddings on cpu": (
        [CL, CPU],
        None,
        [(CPU, []), (CL, ["hidden_0", "mask", "pool"])],
    ),
}


@pytest.mark.parametrize("where", WHERE)
def test_equals_the_reference(where: str, sentences: list[str], reference: F32) -> None:
    devices, layers_on, splits = WHERE[where]
    with BertEmbedder(devices=devices, layers_on=layers_on) as embedder:
        embeddings = embedder.embed(sentences)
        assert embeddings.dtype == np.float32 and embeddings.shape == (20, N_EMBD)
        assert cosines(embeddings, reference).min() >= 0.99999
        assert np.abs(np.linalg.norm(embeddings, axis=1) - 1).max() < 1e-5
        scheduler = embedder.scheduler
        assert scheduler is not None
        found = [(s.backend.name, [i.tensor.name for i in s.inputs]) for s in scheduler.splits]
        assert found == splits
        for split in scheduler.splits:
            for item in split.inputs:
                assert item.nbytes == item.tensor.nbytes
                assert item.backend is not split.backend or item.is_staged
        assert {p.device for p in scheduler.placement} <= set(devices)
        again = embedder.embed(sentences)  # with the plans of the first time
        assert np.array_equal(embeddings, again)


def test_every_layer_runs_where_its_weights_lie(sentences: list[str]) -> None:
    with BertEmbedder(devices=[CL, CPU], layers_on={CL: [1, 4]}) as embedder:
        embedder.embed(sentences[:2])
        assert embedder.scheduler is not None
        devices = [s.backend.name for s in embedder.scheduler.splits]
        assert devices == [CPU, CL, CPU, CL, CPU]
        copied = [[i.tensor.name for i in s.inputs] for s in embedder.scheduler.splits]
        # The mask is copied once, though two splits on the device read it.
        assert copied == [[], ["hidden_1", "mask"], ["hidden_2"], ["hidden_4"], ["hidden_5"]]


# -- weights ---------------------------------------------------------------------------------------


def test_weights_are_kept_elsewhere_by_pattern(sentences: list[str], reference: F32) -> None:
    patterns = {r"layer\.[03]\.ff_": CPU}
    with BertEmbedder(devices=[CL, CPU], layers_on={CL: "0-5"}, override_tensors=patterns) as embedder:
        assert cosines(embedder.embed(sentences), reference).min() >= 0.99999
        homes = {name: t.buffer.buft.device.name for name, t in embedder._weights.items() if t.buffer}
        assert {name for name, home in homes.items() if home == CPU and "ff_" in name} == {
            name for name in homes if name.startswith(("layer.0.ff_", "layer.3.ff_"))
        }
        assert embedder.scheduler is not None
        assert [s.backend.name for s in embedder.scheduler.splits] == [CPU, CL] * 3


def test_an_override_for_a_device_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="the devices are CPU"):
        BertEmbedder(devices=[CPU], override_tensors={"ff": CL})


def test_cpu_weights_are_used_inside_the_mapped_file(on_cpu: BertEmbedder) -> None:
    """Matrices lie in CPU_F32 memory; all else but stacked biases lies in the read-only map of the file."""
    weights = on_cpu._weights
    fast = {n for n, w in weights.items() if w.buffer is not None and w.buffer.name == "CPU_F32"}
    matrices = ("qkv", "attn_out", "ff_up", "ff_down")
    assert fast == {f"layer.{i}.{name}.weight" for i in range(6) for name in matrices}
    mapped = {n for n, w in weights.items() if w.buffer is not None and not w.buffer.base.flags.writeable}
    assert set(weights) - mapped - fast == {f"layer.{i}.qkv.bias" for i in range(6)}
    for weight in weights.values():
        assert weight.buffer is not None and weight.buffer.usage is ggmlb.BufferUsage.WEIGHTS


@pytest.mark.parametrize(("dtype", "least"), [("f16", 0.9999), ("q8_0", 0.999), ("bf16", 0.999)])
def test_other_weight_types(dtype: str, least: float, sentences: list[str], reference: F32) -> None:
    with BertEmbedder(devices=["CPU"], weight_type=dtype) as embedder:
        assert cosines(embedder.embed(sentences[:6]), reference[:6]).min() >= least
        assert embedder._weights["layer.0.ff_up.weight"].dtype.name == dtype.upper()
        assert embedder._weights["layer.0.ff_up.bias"].dtype == ggmlb.DType.F32


def test_type_whose_blocks_do_not_divide_a_row() -> None:
    with pytest.raises(ShapeError, match="row of 384 elements is not a whole number of Q4_K blocks"):
        BertEmbedder(devices=["CPU"], weight_type="q4_K")


def test_unknown_type() -> None:
    with pytest.raises(DTypeError, match="'f17'"):
        BertEmbedder(devices=["CPU"], weight_type="f17")


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 5, 20, 1000])
def test_batches_and_padding_change_nothing(
    batch: int, on_cpu: BertEmbedder, sentences: list[str], reference: F32
) -> None:
    shuffled = np.random.default_rng(batch).permutation(len(sentences))
    embeddings = on_cpu.embed([sentences[i] for i in shuffled], batch=batch)
    assert cosines(embeddings, reference[shuffled]).min() >= 0.99999


def test_reports_progress(on_cpu: BertEmbedder, sentences: list[str]) -> None:
    seen: list[tuple[int, int]] = []
    on_cpu.embed(sentences, batch=4, progress=lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [20] * len(seen)
    done = [d for d, _ in seen]
    assert done == sorted(done) and done[-1] == 20 and len(done) >= 5


def test_plans_of_earlier_batches_serve_again(on_cpu: BertEmbedder, sentences: list[str]) -> None:
    on_cpu.embed(sentences)
    before = list(on_cpu._runs.values())
    on_cpu.embed(sentences)
    assert set(map(id, on_cpu._runs.values())) == set(map(id, before))


def test_plans_are_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch, sentences: list[str], reference: F32
) -> None:
    monkeypatch.setattr("ggmlb.models.runs.MOST", 1)
    with BertEmbedder(devices=["CPU"]) as embedder:
        assert cosines(embedder.embed(sentences[:8], batch=2), reference[:8]).min() >= 0.99999
        assert len(embedder._runs) == 1


def test_cls_pooling_takes_the_first_token(folder_copy: Path, sentences: list[str]) -> None:
    pooling = folder_copy / "1_Pooling/config.json"
    modes = json.loads(pooling.read_text())
    modes |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    pooling.write_text(json.dumps(modes))
    with BertEmbedder(folder_copy, devices=["CPU"]) as embedder:
        embeddings = embedder.embed(sentences[:3])
        built = embedder._runs.last
        assert built is not None
        hidden = built.graph.node("hidden_6")
        assert np.abs(np.linalg.norm(embeddings, axis=1) - 1).max() < 1e-5
        pool = built.pool.to_numpy().reshape(built.pool.ne[2], -1)
        assert (pool[:, 0] == 1).all() and not pool[:, 1:].any() and hidden.ne[0] == N_EMBD


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ("one text", "texts is 'one text'; give a list"),
        (["a", 3], r"texts\[1\] is an int; give text"),
        ([None], r"texts\[0\] is None; give text"),
        (["a", "\ud800"], "text 1 is not valid Unicode"),
    ],
)
def test_wrong_texts(on_cpu: BertEmbedder, texts: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        on_cpu.embed(texts)


def test_no_texts_have_no_embeddings(on_cpu: BertEmbedder) -> None:
    assert on_cpu.embed([]).shape == (0, N_EMBD)


def test_wrong_batch(on_cpu: BertEmbedder) -> None:
    with pytest.raises(ArgumentError, match="batch is 0; give 1 or more"):
        on_cpu.embed(["a"], batch=0)


def test_unknown_device() -> None:
    with pytest.raises(RegistryError, match="OpenCL99"):
        BertEmbedder(devices=["OpenCL99", "CPU"])


@pytest.mark.parametrize(("devices", "says"), [([], "no devices"), (["CPU", "CPU"], "named twice")])
def test_wrong_devices(devices: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        BertEmbedder(devices=devices)


def test_closed() -> None:
    embedder = BertEmbedder(devices=["CPU"])
    embedder.close()
    embedder.close()
    with pytest.raises(FreedError, match="was closed"):
        embedder.embed(["a"])
    assert all(b.is_freed for b in embedder.backends)
