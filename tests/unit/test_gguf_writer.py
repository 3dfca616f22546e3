"""GGUF files as `save_gguf` writes them, read back by our reader and by PyPI's gguf."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ggmlb
from ggmlb import DType, ModelError, open_gguf, quantize, save_gguf
from ggmlb.models.gguf import writer
from tests.support.gguf_files import Typed, gguf_bytes, quantized, random_blocks, write_gguf

F32 = np.arange(64, dtype=np.float32).reshape(2, 32)

METADATA: dict[str, Any] = {
    "general.architecture": "llama", "text": "grüße", "empty": "",
    "small": 7, "negative": -7, "large": 1 << 40, "very negative": -(1 << 40), "real": 0.5, "yes": True,
    "u8": np.uint8(200), "f64": np.float64(0.1), "no": np.bool_(False),
    "texts": ["a", "", "ß"], "ints": [1, -2], "unsigned": [0, 1 << 31], "long": [-1, 1 << 40],
    "flags": [True, False], "reals": [1, 0.5], "i16": np.arange(3, dtype=np.int16),
    "none": np.empty(0, np.float32),
    "big endian": np.arange(3, dtype=">u4"),
}  # fmt: skip

KINDS = {
    "general.architecture": "string", "text": "string", "empty": "string",
    "small": "uint32", "negative": "int32", "large": "uint64", "very negative": "int64", "real": "float32",
    "yes": "bool", "u8": "uint8", "f64": "float64", "no": "bool",
    "texts": "string[3]", "ints": "int32[2]", "unsigned": "uint32[2]", "long": "int64[2]", "flags": "bool[2]",
    "reals": "float32[2]", "i16": "int16[3]", "none": "float32[0]", "big endian": "uint32[3]",
}  # fmt: skip


def every_type() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        d.name: random_blocks(rng, d, (256, 3)) for d in DType if d.is_quantized and ggmlb.can_quantize(d)
    }
    plain = ["f4", "f2", "f8", "i1", "i2", "i4", "i8", DType.BF16.numpy]
    return tensors | {f"plain {i}": F32.astype(t) for i, t in enumerate(plain)}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = every_type()
    save_gguf(path, METADATA, tensors)
    file = open_gguf(path)
    assert {key: str(file.metadata.slot(key)) for key in file.metadata} == KINDS
    assert {key: plain(file.metadata[key]) for key in METADATA} == {k: plain(v) for k, v in METADATA.items()}
    assert list(file) == list(tensors)
    for name, data in tensors.items():
        blocks = data[0] if isinstance(data, tuple) else data.view(np.uint8)
        assert file.blocks(name).tobytes() == blocks.tobytes()
        assert file[name].offset % 32 == 0
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_gguf_of_pypi_reads_the_same(tmp_path: Path) -> None:
    """All but types that it lacks, and Q8_1, of whose blocks it has another size than ggml."""
    path = tmp_path / "m.gguf"
    tensors = {n: t for n, t in every_type().items() if n not in ("Q1_0", "Q2_0", "NVFP4", "Q8_1")}
    save_gguf(path, {k: v for k, v in METADATA.items() if k != "none"}, tensors)
    theirs, ours = gguf.GGUFReader(path), open_gguf(path)
    for key in ours.metadata:
        found = theirs.fields[key].contents()
        assert plain(found) == plain(ours.metadata[key]), key
    assert [t.name for t in theirs.tensors] == list(ours)
    for tensor in theirs.tensors:
        entry = ours[tensor.name]
        assert (tensor.tensor_type.value, tuple(tensor.shape.tolist())) == (int(entry.dtype), entry.ne)
        assert (tensor.data_offset, tensor.n_bytes) == (entry.offset, entry.nbytes)
        assert tensor.data.tobytes() == ours.blocks(tensor.name).tobytes()


def test_the_bytes_are_those_of_another_writer(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "n": 3, "t": ["a", "bc"], "s": [0.5, 1.5]}
    tensors = {"a": F32, "b": quantized(F32, "q4_0"), "c": F32[0].astype(np.float16)}
    save_gguf(tmp_path / "a.gguf", metadata, tensors)
    assert (tmp_path / "a.gguf").read_bytes() == gguf_bytes(metadata, tensors)


def test_metadata_of_a_file_keep_their_types(tmp_path: Path) -> None:
    values = {
        "u8": Typed(0, 3),
        "i64": Typed(11, 5),
        "t": ["a", "b"],
        "f64": Typed(12, 0.1),
        "b": True,
        "s": "x",
    }
    source = open_gguf(write_gguf(tmp_path / "a.gguf", values, {"w": F32}))
    save_gguf(tmp_path / "same.gguf", source.metadata, {"w": source.array("w")})
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    save_gguf(tmp_path / "b.gguf", source.metadata | {"u8": 9, "new": "y"}, {})
    changed = open_gguf(tmp_path / "b.gguf").metadata
    assert {k: str(changed.slot(k)) for k in changed} == {
        "u8": "uint32", "i64": "int64", "t": "string[2]", "f64": "float64", "b": "bool", "s": "string",
        "new": "string",
    }  # fmt: skip
    assert (changed["u8"], changed["i64"], changed["t"], changed["f64"]) == (9, 5, ["a", "b"], 0.1)


def test_tensors_of_devices_blocks_in_pieces_and_arrays_with_gaps(tmp_path: Path) -> None:
    blocks = quantize(F32, "q8_0")
    ctx = ggmlb.Context()
    on_device, part = ctx.new_tensor("q8_0", (32, 2)), None
    with ggmlb.init_by_name("OpenCL0") as stream, ggmlb.alloc_ctx_tensors(ctx, stream):
        on_device.set(blocks)
        whole = ctx.from_array(F32)
        part = ctx.view_2d(whole, 8, 2, whole.nb[1], 16)
        tensors = {
            "device": on_device,
            "view": part,
            "pieces": ((row for row in blocks), "q8_0", (32, 2)),
            "gaps": F32[:, ::2],
            "turned": np.arange(12, dtype=np.int32).reshape(2, 3, 2).transpose(2, 0, 1),
            "number": np.array(3, np.float32),
        }
        save_gguf(tmp_path / "m.gguf", {}, tensors)
    file = open_gguf(tmp_path / "m.gguf")
    assert file.blocks("device").tolist() == file.blocks("pieces").tolist() == blocks.tolist()
    assert file.array("view").tolist() == F32[:, 4:12].tolist()
    assert file.array("gaps").tolist() == F32[:, ::2].tolist()
    assert file.array("turned").tolist() == tensors["turned"].tolist()  # type: ignore[union-attr]
    assert file["number"].ne == (1,)


def test_large_tensors_are_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PIECE", 1 << 16)
    source = np.memmap(tmp_path / "source", np.float32, "w+", shape=(1 << 10, 1 << 11))
    source[:] = np.arange(1 << 11)
    ctx = ggmlb.Context()
    mapped = ctx.from_array(source)
    tensors = {
        "map": source,
        "turned": source.T,
        "tensor": mapped,
        "blocks": ((quantize(row, "q4_0") for row in source), "q4_0", (1 << 11, 1 << 10)),
    }
    tracemalloc.start()
    try:
        save_gguf(tmp_path / "m.gguf", {}, tensors)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    file = open_gguf(tmp_path / "m.gguf")
    assert np.array_equal(file.array("map"), source)
    assert np.array_equal(file.array("turned"), source.T)
    assert file.blocks("blocks").tolist() == quantize(source, "q4_0").tolist()


WRONG, TYPE, SHAPE = ggmlb.ArgumentError, ggmlb.DTypeError, ggmlb.ShapeError


def zeros(n: int) -> np.ndarray:
    return np.zeros(n, np.uint8)


@pytest.mark.parametrize(
    ("metadata", "tensors", "kind", "why"),
    [
        ({"": 1}, {}, WRONG, "a key has 0 bytes; give 1 to 65,535"),
        ({"k" * 65536: 1}, {}, WRONG, "a key has 65,536 bytes"),
        ({3: 1}, {}, WRONG, "a key is an int; give text"),
        ({"\ud800": 1}, {}, WRONG, "cannot be written in UTF-8"),
        ({"k": "\ud800"}, {}, WRONG, "the value of 'k' cannot be written in UTF-8"),
        ({"k": 1 << 64}, {}, WRONG, "numbers of at most 64 bits"),
        ({"k": 1e300}, {}, WRONG, "too large for float32; give numpy.float64"),
        ({"k": None}, {}, WRONG, "the value of 'k' is None; give a number"),
        ({"k": {}}, {}, WRONG, "the value of 'k' is a dict; give a number"),
        ({"k": b"a"}, {}, WRONG, "the value of 'k' is"),
        ({"k": []}, {}, WRONG, "an empty list of no type; give an empty NumPy array"),
        ({"k": [1, "a"]}, {}, WRONG, "a list of several types, string, uint32; give one"),
        ({"k": [1, True]}, {}, WRONG, "a list of several types, bool, uint32"),
        ({"k": [[1]]}, {}, WRONG, "the value of 'k' is a list"),
        ({"k": [-1, 1 << 63]}, {}, WRONG, "a list of several types, int32, uint64"),
        ({"k": np.zeros((2, 2))}, {}, WRONG, "an array of 2 dimensions; give one of 1"),
        ({"k": np.zeros(2, "f2")}, {}, WRONG, "type float16, which the format does not have"),
        ({"k": np.zeros(2, "U1")}, {}, WRONG, "type <U1, which the format does not have"),
        ({"general.alignment": 24}, {}, WRONG, "general.alignment is 24; give a power of two"),
        ({"general.alignment": "32"}, {}, WRONG, "general.alignment is '32'"),
        ({}, {"w" * 64: F32}, WRONG, "a tensor name has 64 bytes; give 0 to 63"),
        ({}, {"w": [1.0]}, WRONG, "tensor 'w' is a list; give an array, a tensor, or"),
        ({}, {"w": ggmlb.Context().new_tensor("f32", 3)}, ggmlb.NotAllocatedError, "in no buffer"),
        ({}, {"w": zeros(3)}, TYPE, "'w' is an array of uint8, a type that ggml does"),
        ({}, {"w": (zeros(18), "q9_9", (32,))}, TYPE, "no tensor type 'q9_9'"),
        ({}, {"w": (np.zeros(18, np.int8), "q4_0", (32,))}, TYPE, "blocks of 'w' are int8; give uint8"),
        ({}, {"w": ([np.zeros(18)], "q4_0", (32,))}, TYPE, "a piece of tensor 'w' is no array of uint8"),
        ({}, {"w": np.zeros((1,) * 5)}, SHAPE, "extents .*give one to 4"),
        ({}, {"w": (zeros(0), "f32", (-1,))}, SHAPE, "give one to 4, 0 or more each"),
        ({}, {"w": (zeros(9), "q4_0", (16,))}, SHAPE, "rows of 16 .* not whole Q4_0 blocks"),
        ({}, {"w": (zeros(17), "q4_0", (32,))}, SHAPE, r"'w' has 17 bytes; Q4_0 of extents \[32"),
        ({}, {"w": ([zeros(18)] * 2, "q4_0", (32,))}, SHAPE, "has more than 18 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, metadata: Any, tensors: Any, kind: type[Exception], why: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"earlier")
    with pytest.raises(kind, match=why):
        save_gguf(path, metadata, tensors)
    assert os.listdir(tmp_path) == ["m.gguf"]
    assert path.read_bytes() == b"earlier"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "m.gguf", tmp_path):
        with pytest.raises(ModelError, match=r"cannot write .*(choose another folder|give another path)"):
            save_gguf(path, {}, {})
    assert os.listdir(tmp_path) == []


def test_an_error_in_the_middle_leaves_the_earlier_file(tmp_path: Path) -> None:
    def pieces() -> Any:
        yield np.zeros(18, np.uint8)
        raise KeyboardInterrupt

    path = tmp_path / "m.gguf"
    path.write_bytes(b"earlier")
    with pytest.raises(KeyboardInterrupt):
        save_gguf(path, {}, {"w": (pieces(), "q4_0", (64,))})
    assert os.listdir(tmp_path) == ["m.gguf"]
    assert path.read_bytes() == b"earlier"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(width=32),
    TEXTS,
    st.lists(TEXTS, min_size=1, max_size=5),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=5),
    st.lists(st.floats(width=32), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.sampled_from(["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?"]).flatmap(
        lambda t: hnp.arrays(t, st.integers(0, 5))
    ),
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
ARRAYS = st.sampled_from(["f4", "f2", "f8", "i1", "i2", "i4", "i8"]).flatmap(lambda t: hnp.arrays(t, SHAPES))


@given(
    st.dictionaries(TEXTS.filter(bool), NUMBERS, max_size=6),
    st.dictionaries(TEXTS.filter(lambda name: len(name.encode()) < 64), ARRAYS, max_size=4),
    st.sampled_from([None, 1, 32, 256, np.uint32(64)]),
)
def test_anything_that_is_written_is_read(
    metadata: dict[str, Any], tensors: dict[str, np.ndarray], alignment: int | None
) -> None:
    metadata.pop("general.alignment", None)
    if alignment is not None:
        metadata["general.alignment"] = alignment
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        save_gguf(path, metadata, tensors)
        file = open_gguf(path)
        assert file.alignment == (alignment or 32)
        assert all(t.offset % file.alignment == 0 for t in file.values())
        assert list(file.metadata) == list(metadata)
        for key, value in metadata.items():
            np.testing.assert_equal(plain(file.metadata[key]), plain(value))
        assert list(file) == list(tensors)
        for name, array in tensors.items():
            assert file.array(name).tobytes() == array.tobytes()
            assert file.array(name).shape == (array.shape or (1,))
        again = Path(folder) / "again.gguf"
        save_gguf(again, file.metadata, {name: file.array(name) for name in file})
        assert again.read_bytes() == path.read_bytes()


def test_a_file_may_be_written_over_itself(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"a": 1}, {"w": F32})
    file = open_gguf(path)
    save_gguf(path, file.metadata | {"a": 2}, {n: file.array(n) for n in file})
    again = open_gguf(path)
    assert (again.metadata["a"], again.array("w").tolist()) == (2, F32.tolist())
    assert struct.unpack("<I", path.read_bytes()[4:8]) == (3,)
