"""Weights of GGUF files, in the memory of devices: blocks as they are, in place where that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ggmlb
from ggmlb import DType, ModelError, quantize
from ggmlb.models import filling as module
from ggmlb.models.gguf import GgufFile
from ggmlb.models.weights import Source, Weights
from tests.support.gguf_files import quantized, random_blocks, write_gguf, write_split

K, M = 256, 64

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"]

DEVICES = ["CPU", "LLVM", "OpenCL0", "OpenCL0+CPU"]


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cut(weight: ggmlb.Tensor) -> ggmlb.SplitState:
    """Half of the rows on each of two devices."""
    if weight.ne[1] == 1:
        return ggmlb.SplitState(ggmlb.SplitAxis.MIRRORED)
    return ggmlb.SplitState(ggmlb.SplitAxis(1), (ggmlb.split_evenly(weight.ne[1], 2, 1),))


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest) -> ggmlb.Backend:
    names = request.param.split("+")
    found = [ggmlb.device_by_name(name) for name in names]
    device = found[0]
    if len(found) > 1:
        device = ggmlb.meta_device(found, cut)
    with device.init_backend() as stream:
        yield stream


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_are_placed_as_they_are(tmp_path: Path, backend: ggmlb.Backend, dtype: str) -> None:
    stored = {name: random_blocks(np.random.default_rng(i), dtype, (K, M)) for i, name in enumerate("abc")}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {**stored, "norm": values(9, K)}))
    weights = Weights(file)
    sources = {
        "one": Source(("a",), (M, K), True),
        "stacked": Source(("a", "b", "c"), (M, K), True),
        "product": Source(("b",), (M, K), True, True),
        "norm": Source(("norm",), (K,), False),
        "norms": Source(("norm", "norm"), (K,), False),
    }
    placed = weights.place(sources, backend)
    blocks = [file.blocks(name).reshape(-1) for name in "abc"]
    assert {placed[n].dtype for n in ("one", "stacked", "product")} == {DType.parse(dtype)}
    assert placed["one"].get().tolist() == blocks[0].tolist()
    assert placed["stacked"].get().tolist() == np.concatenate(blocks).tolist()
    assert placed["norm"].to_numpy().tolist() == values(9, K).tolist()
    assert placed["norms"].to_numpy().tolist() == [*values(9, K).tolist()] * 2
    if placed["product"].buffer.name != "CPU_F32":
        assert placed["product"].get().tolist() == blocks[1].tolist()
    weights.free()


def test_host_memory_is_the_mapped_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = write_split(
        tmp_path,
        "m",
        {},
        [
            {"odd": values(0, 8), "a": random_blocks(rng, "Q4_K", (K, M))},
            {"b": random_blocks(rng, "Q8_0", (K, M))},
        ],
    )[0]
    file = GgufFile(first)
    assert file["a"].offset % 64 == 32 or file["b"].offset % 64 == 32
    with ggmlb.init_by_name("LLVM") as stream:
        weights = Weights(file)
        placed = weights.place({n: Source((n,), (M, K), True) for n in "ab"}, stream)
        for name, tensor in placed.items():
            buffer = tensor.buffer
            assert (buffer.name, buffer.alignment, buffer.is_read_only) == ("CPU_Mapped", 32, True)
            assert np.shares_memory(buffer.base, file.parts[file[name].part].data)
        weights.free()


def test_memory_for_weights_is_used_where_it_gains(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "strips": random_blocks(rng, "Q4_0", (K, M)),
        "no strips": random_blocks(rng, "Q4_0", (K, M - 1)),
    }
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, tensors))
    sources = {n: Source((n,), file[n].shape, True, True) for n in tensors}
    expected = {"LLVM": ["LLVM_Repacked", "CPU_Mapped"], "CPU": ["CPU_Mapped"] * 2}
    with suppress(ggmlb.BackendUnavailable):  # without a library of ggml's
        packs = any(buft.name == "ggml:CPU_REPACK" for buft in ggmlb.device_by_name("ggml:CPU").extra_bufts)
        expected["ggml:CPU"] = ["ggml:CPU_REPACK" if packs else "CPU_Mapped", "CPU_Mapped"]
    for device, names in expected.items():
        with ggmlb.init_by_name(device) as stream:
            weights = Weights(file)
            assert [t.buffer.name for t in weights.place(sources, stream).values()] == names
            weights.free()


def test_copies_are_made_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 1 << 12)
    stored = {n: random_blocks(np.random.default_rng(i), "Q4_K", (K, 1000)) for i, n in enumerate("ab")}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, stored))
    released = []
    monkeypatch.setattr(type(file.parts[0]), "release", lambda *given: released.append(given[1:]))
    sources = {"ab": Source(("a", "b"), (1000, K), True, True), "f": Source(("a",), (1000, K), False)}
    with ggmlb.init_by_name("LLVM") as stream:
        weights = Weights(file)
        placed = weights.place(sources, stream)
        assert placed["ab"].get().tolist() == [*file.blocks("a").flat, *file.blocks("b").flat]
        assert placed["f"].to_numpy().tolist() == file.array("a").tolist()
        weights.free()
    row = DType.Q4_K.row_size(K)
    assert max(nbytes for _, nbytes in released) == module.GROUP * row
    assert sum(nbytes for _, nbytes in released) == 3 * 1000 * row


def test_an_error_in_a_thread_is_raised_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE", 1 << 12)
    stored = {"a": random_blocks(np.random.default_rng(0), "Q4_K", (K, 1024))}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, stored))
    real = module.converted

    def failing(rows: np.ndarray, *types: DType) -> np.ndarray:
        if np.shares_memory(rows, file.blocks("a")[512]):
            raise MemoryError("no room")
        return real(rows, *types)

    monkeypatch.setattr(module, "converted", failing)
    with ggmlb.init_by_name("LLVM") as stream:
        weights = Weights(file)
        with pytest.raises(MemoryError, match="no room"):
            weights.place({"a": Source(("a",), (1024, K), True, True)}, stream)
        monkeypatch.setattr(module, "converted", real)
        placed = weights.place({"a": Source(("a",), (1024, K), True, True)}, stream)
        assert placed["a"].get().tolist() == file.blocks("a").reshape(-1).tolist()
        weights.free()


def test_a_system_that_allows_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 1 << 12)
    stored = {"a": random_blocks(np.random.default_rng(0), "Q4_K", (K, 1024))}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, stored))

    def no_thread(thread: module.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module.Thread, "start", no_thread)
    with ggmlb.init_by_name("LLVM") as stream:
        weights = Weights(file)
        placed = weights.place({"a": Source(("a",), (1024, K), True, True)}, stream)
        assert placed["a"].get().tolist() == file.blocks("a").reshape(-1).tolist()
        weights.free()


def test_types_are_converted_where_that_is_asked(tmp_path: Path) -> None:
    tensors = {"a": quantized(values(0, M, K), "q4_0"), "b": quantized(values(1, M, K), "q6_K")}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, tensors))
    with ggmlb.init_by_name("CPU") as stream:
        weights = Weights(file, DType.Q8_0)
        placed = weights.place({"ab": Source(("a", "b"), (M, K), True)}, stream)
        right = quantize(np.concatenate([file.array("a"), file.array("b")]), DType.Q8_0)
        assert placed["ab"].get().tolist() == right.reshape(-1).tolist()
        weights.free()
        with pytest.raises(ModelError, match=r"ab stacks a, b, which have different types, Q4_0, Q6_K"):
            Weights(file).place({"ab": Source(("a", "b"), (M, K), True)}, stream)


@pytest.mark.parametrize(
    ("tensors", "shape", "why"),
    [
        ({}, (2, 32), "no tensor 'a' among its 0"),
        ({"a": values(0, 2, 64)}, (2, 32), r"has shape \[2, 64\], but the metadata ask for \[2, 32\]"),
        ({"a": np.zeros((2, 32), np.int32)}, (2, 32), "has type I32; weights are floating point or quant"),
    ],
)
def test_files_that_lack_a_weight(
    tmp_path: Path, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], why: str
) -> None:
    weights = Weights(GgufFile(write_gguf(tmp_path / "a.gguf", {}, tensors)))
    with ggmlb.init_by_name("CPU") as stream, pytest.raises(ModelError, match=why):
        weights.place({"a": Source(("a",), shape, True)}, stream)


def test_ones_that_a_shape_begins_with_do_not_count(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"a": values(0, 1, 1, 32), "b": values(0, 32)}))
    assert [file.weight(n, shape).shape for n, shape in [("a", (32,)), ("b", (1, 32))]] == [(32,), (1, 32)]


def test_the_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    bad = quantized(values(0, M, K), "q8_0")
    bad[0][3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"good": values(1, M, K), "bad": bad}))
    with ggmlb.init_by_name("LLVM") as stream:
        weights = Weights(file)
        weights.place({n: Source((n,), (M, K), True) for n in ("good", "bad")}, stream)
        assert "NaN or infinity in 'bad'" in str(weights.error_in_values("a logit"))
        weights.free()
