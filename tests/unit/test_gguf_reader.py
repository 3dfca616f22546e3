"""GGUF files as they are read: whole ones, and ones that are wrong in one place."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb import DType, ModelError, can_quantize, dequantize
from ggmlb.models.gguf import GgufFile, reader
from tests.support import gguf_files
from tests.support.gguf_files import Data, Typed, gguf_bytes, random_blocks, write_gguf, write_split

ARRAY, BOOL, STRING = gguf_files.ARRAY, gguf_files.BOOL, gguf_files.STRING

F32 = np.arange(64, dtype=np.float32)

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "u8": Typed(0, 200), "i8": Typed(1, -3), "u16": Typed(2, 60000), "i16": Typed(3, -9), "u32": 7, "i32": -7,
    "f32": 0.5, "bool": True, "u64": 1 << 40, "i64": -(1 << 40), "f64": Typed(12, 0.1),
    "text": "grüße", "empty": "", "texts": ["a", "", "ß"], "no texts": Typed(ARRAY, struct.pack("<IQ", 8, 0)),
    "numbers": np.arange(5, dtype=np.int16), "reals": [0.5, 1.5], "flags": [True, False],
}  # fmt: skip


def opened(tmp_path: Path, metadata: Any = (), tensors: Any = (), *args: Any, **wrong: Any) -> GgufFile:
    return GgufFile(write_gguf(tmp_path / "m.gguf", metadata, tensors, *args, **wrong))


# -- what is right -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_values_and_tensors_of_every_type(tmp_path: Path, version: int, alignment: int) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {"f32": F32.reshape(2, 2, 16), "i32": np.arange(3, dtype=np.int32)}
    tensors |= {
        str(d.name): random_blocks(rng, d, (256, 3)) for d in DType if d.is_quantized and can_quantize(d)
    }
    file = opened(tmp_path, METADATA, tensors, version, alignment)
    assert (file.version, file.alignment) == (version, alignment)
    meta = file.metadata
    assert {k: meta[k] for k in ("u8", "i8", "u16", "i16", "u32", "i32")} == {
        "u8": 200, "i8": -3, "u16": 60000, "i16": -9, "u32": 7, "i32": -7,
    }  # fmt: skip
    assert (meta["f32"], meta["bool"], meta["u64"], meta["i64"], meta["f64"]) == (
        0.5, True, 1 << 40, -(1 << 40), 0.1,
    )  # fmt: skip
    assert (meta["text"], meta["empty"], meta["texts"], meta["no texts"]) == ("grüße", "", ["a", "", "ß"], [])
    assert [meta.numbers(k).tolist() for k in ("numbers", "reals", "flags")] == [
        [0, 1, 2, 3, 4], [0.5, 1.5], [True, False],
    ]  # fmt: skip
    assert list(file) == list(tensors)
    assert file.array("f32").tolist() == F32.reshape(2, 2, 16).tolist()
    assert file.array("i32").dtype == np.int32
    for name, (blocks, dtype, ne) in list(tensors.items())[2:]:
        assert (file[name].dtype, file[name].ne, file[name].shape) == (dtype, ne, ne[::-1])
        assert file[name].offset % alignment == 0
        assert file.blocks(name).tolist() == blocks.tolist()
        assert file.array(name).tolist() == dequantize(blocks, dtype).tolist()
    assert file.nbytes == sum(t.nbytes for t in file.values())


def test_tensors_of_no_elements_and_of_no_extents(tmp_path: Path) -> None:
    one = Data(F32[:1].tobytes(), 0, ())
    tensors = {"a": F32, "none": np.empty((3, 0), np.float32), "one": one, "last": np.empty(0, np.float32)}
    file = opened(tmp_path, {}, tensors)
    assert [(t.ne, t.nbytes) for t in file.values()] == [((64,), 256), ((0, 3), 0), ((1,), 4), ((0,), 0)]
    assert [file.array(n).shape for n in file] == [(64,), (3, 0), (1,), (0,)]
    shared = Data(b"", 0, (0,), offset=0)
    assert opened(tmp_path, {}, {"a": F32, "none": shared}).array("a").tolist() == F32.tolist()


def test_nothing_is_copied_and_nothing_can_be_written(tmp_path: Path) -> None:
    file = opened(tmp_path, {"n": np.arange(9)}, {"a": F32})
    for array in (file.array("a"), file.blocks("a"), file.metadata.numbers("n")):
        assert np.shares_memory(array, file.parts[0].data)
        assert not array.flags.writeable


def test_a_split_model_is_one(tmp_path: Path) -> None:
    parts = [{"a": F32, "b": F32 + 1}, {}, {"c": F32 + 2}]
    first, *_ = write_split(tmp_path, "m", METADATA, parts)
    file = GgufFile(str(first))
    assert {n: t.part for n, t in file.items()} == {"a": 0, "b": 0, "c": 2}
    assert [float(file.array(n)[0]) for n in file] == [0, 1, 2]
    assert file.metadata["text"] == "grüße"
    assert len(file.parts) == 3


def test_a_representation_raises_nothing(tmp_path: Path) -> None:
    for value in ("\x1b[31mred", "x" * 1000, 3, Typed(STRING, struct.pack("<Q", 2) + b"\xff\xfe")):
        told = repr(opened(tmp_path, {"general.architecture": value}, {"a": F32}))
        assert told.isprintable()
        assert len(told) < 160


# -- metadata of a certain type ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("get", "why"),
    [
        (lambda m: m["txet"], "no metadata key 'txet'; did you mean 'text'?"),
        (lambda m: m.integer("f32"), "'f32': it is float32; it must be a whole number"),
        (lambda m: m.integer("bool"), "'bool': it is bool; it must be a whole number"),
        (lambda m: m.integer("i32"), "'i32': it is -7; it must be 0 to 2147483647"),
        (lambda m: m.integer("u64"), "it is 1099511627776; it must be 0 to"),
        (lambda m: m.real("text"), "'text': it is string; it must be a number"),
        (lambda m: m.real("f32", most=0.25), "it is 0.5; it must be -inf to 0.25"),
        (lambda m: m.flag("u32"), "'u32': it is uint32; it must be a bool"),
        (lambda m: m.text("texts"), r"'texts': it is string\[3\]; it must be a str"),
        (lambda m: m.texts("numbers"), r"'numbers': it is int16\[5\]; it must be an array of strings"),
        (lambda m: m.texts("text"), "it is string; it must be an array of strings"),
        (lambda m: m.numbers("texts"), r"it is string\[3\]; it must be an array of numbers"),
        (lambda m: m.numbers("u8"), "it is uint8; it must be an array of numbers"),
    ],
)
def test_values_of_another_type(tmp_path: Path, get: Callable[[Any], object], why: str) -> None:
    file = opened(tmp_path, METADATA, {})
    with pytest.raises(ModelError, match=why) as told:
        get(file.metadata)
    assert str(file.path) in str(told.value)


def test_defaults_are_for_keys_that_are_missing(tmp_path: Path) -> None:
    meta = opened(tmp_path, METADATA, {}).metadata
    assert (meta.integer("x", 3), meta.real("x", 0.5), meta.flag("x", False), meta.text("x", "")) == (
        3, 0.5, False, "",
    )  # fmt: skip
    assert meta.real("u32") == 7.0
    assert meta.get("x") is None
    for kind in (meta.integer, meta.real, meta.flag, meta.text, meta.texts, meta.numbers):
        with pytest.raises(ModelError, match="has no metadata key 'x'"):
            kind("x")


@pytest.mark.parametrize(
    "value",
    [
        Typed(STRING, struct.pack("<Q", 3) + b"ab\xff"),
        Typed(ARRAY, struct.pack("<IQQ", STRING, 2, 1) + b"a" + struct.pack("<Q", 1) + b"\xc3"),
    ],
)
def test_texts_that_are_not_utf8(tmp_path: Path, value: Typed) -> None:
    meta = opened(tmp_path, {"k": value}, {}).metadata
    with pytest.raises(ModelError, match=r"'k': at byte \d+: (the string|string 1) is not UTF-8"):
        meta["k"]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_reals_that_are_not_finite(tmp_path: Path, number: float) -> None:
    with pytest.raises(ModelError, match=r"it is (nan|inf); it must be"):
        opened(tmp_path, {"k": float(number)}, {}).metadata.real("k")


def test_a_name_that_no_tensor_has(tmp_path: Path) -> None:
    file = opened(tmp_path, {}, {"blk.0.attn_q.weight": F32})
    for ask in (file.__getitem__, file.blocks, file.array):
        with pytest.raises(ModelError, match=r"no tensor 'blk.0.attn_k.weight' among its 1; did you mean"):
            ask("blk.0.attn_k.weight")
    assert "x" not in file
    assert file.get("x") is None


# -- hostile files ---------------------------------------------------------------------------------

HUGE = [1 << 20, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def array_of(kind: int, count: int, raw: bytes = b"") -> Typed:
    return Typed(ARRAY, struct.pack("<IQ", kind, count) + raw)


def entry(ne: tuple[int, ...], dtype: int = 0, offset: int | None = None, nbytes: int = 256) -> Data:
    return Data(bytes(nbytes), dtype, ne, offset)


def one_tensor(*given: Any, **named: Any) -> bytes:
    return gguf_bytes({"k": 1}, {"w": entry(*given, **named)})


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot map|too short"),
    "a word": (b"GGUF", "is no GGUF file: it is too short"),
    "another format": (b"GGML" + bytes(100), "is no GGUF file: it does not begin with 'GGUF'"),
    "magic the other way round": (gguf_bytes({}, {}, magic=b"FUGG"), "does not begin with 'GGUF'"),
    "version 1": (gguf_bytes({}, {}, version=1), "GGUF of version 1: versions 2 and 3 are read"),
    "version 4": (gguf_bytes({}, {}, version=4), "GGUF of version 4: versions 2 and 3"),
    "big-endian": (gguf_bytes({}, {}, version=3 << 24), "it is big-endian; convert it again"),
    "a key without its value": (gguf_bytes({}, {}, n_values=1) + bytes(40), "metadata value 0, at byte"),
    "an empty key": (gguf_bytes({"": 1}, {}), "a name has 0 bytes; at least 1"),
    "a long key": (gguf_bytes({"k" * 65536: 1}, {}), "a name has 65,536 bytes; .*fewer than 65,536"),
    "a key that is not UTF-8": (gguf_bytes([(b"\xff\xfe", 1)], {}), "value 0, at byte .*not UTF-8"),
    "a key twice": (gguf_bytes([("a", 1), ("b", 2), ("a", 3)], {}), "key 'a', at byte .*duplicate key"),
    "no such kind": (gguf_bytes({"k": Typed(13, bytes(8))}, {}), "key 'k', at byte .*has the type 13; types"),
    "an array of no such kind": (gguf_bytes({"k": array_of(99, 1, bytes(8))}, {}), "has the type 99; types"),
    "an array of arrays": (
        gguf_bytes({"k": array_of(ARRAY, 1, bytes(12))}, {}),
        "'k', .*its elements are arrays",
    ),
    "a string beyond the end": (
        gguf_bytes({"k": Typed(STRING, struct.pack("<Q", 1 << 40))}, {}),
        "key 'k', at byte .*bytes are needed, but the file ends",
    ),
    "alignment 0": (
        gguf_bytes({"general.alignment": 0}, {}),
        "'general.alignment': it is 0; it must be 1 to",
    ),
    "alignment 24": (
        gguf_bytes({"general.alignment": 24}, {}),
        "alignment is 24, which is not a power of two",
    ),
    "alignment 2^40": (gguf_bytes({"general.alignment": 1 << 40}, {}), "'general.alignment': it is 1099"),
    "alignment as text": (gguf_bytes({"general.alignment": "32"}, {}), "it is string; it must be a whole"),
    "a name that is not UTF-8": (gguf_bytes({}, [(b"\xc0", F32)]), "tensor 0, at byte .*not UTF-8"),
    "a long name": (gguf_bytes({}, {"w" * 70000: F32}), "tensor 0, at byte .*a name has 70,000 bytes"),
    "a tensor twice": (gguf_bytes({}, [("w", F32), ("w", F32)]), "tensor 'w', at byte .*duplicate name"),
    "five dimensions": (one_tensor((2, 2, 2, 2, 2)), "tensor 'w', at byte .*5 dimensions; at most 4"),
    "2^32 dimensions": (
        gguf_bytes({}, {}, n_tensors=1)[:24] + struct.pack("<QIQQQ", 0, 0xFFFFFFFF, 1, 1, 1),
        "4294967295 dimensions",
    ),
    "no such type": (one_tensor((64,), 1000), "tensor 'w', .*type 1000 is unknown"),
    "a type that was dropped": (
        one_tensor((64,), 4),
        "type 4 is unknown, or was removed from ggml",
    ),
    "rows of half a block": (one_tensor((48, 2), int(DType.Q4_0)), "rows of 48 elements are not whole Q4_0"),
    "beyond the end": (one_tensor((100,)), r"tensor 'w', at byte \d+: it ends at byte \d+, beyond the file"),
    "offset beyond the end": (one_tensor((64,), 0, 1 << 40), "beyond the file's end"),
    "offset 2^64 - 32": (one_tensor((64,), 0, (1 << 64) - 32), "beyond the file's end"),
    "an odd offset": (one_tensor((4,), 0, 8), "offset 8 is no multiple of the alignment, 32"),
    "tensors over each other": (
        gguf_bytes({}, {"a": F32, "b": Data(F32.tobytes(), 0, (64,), 32)}),
        "tensor 'b', at byte .*overlaps the tensor before it",
    ),
    "tensors in one place": (
        gguf_bytes({}, {"a": Data(F32.tobytes(), 0, (64,), 0), "b": Data(F32.tobytes(), 0, (64,), 0)}),
        "tensor 'b', at byte .*overlaps",
    ),
    **{f"{n} values": (gguf_bytes({"k": 1}, {}, n_values=n), f"n_kv is {n:,}, more than") for n in HUGE},
    **{
        f"{n} tensors": (gguf_bytes({"k": 1}, {"w": F32}, n_tensors=n), f"n_tensors is {n:,}, more than")
        for n in HUGE
    },
    **{
        f"{n} numbers": (
            gguf_bytes({"k": array_of(gguf_files.UINT64, n)}, {}),
            "key 'k', at byte .*bytes are needed",
        )
        for n in HUGE
    },
    **{
        f"{n} strings": (gguf_bytes({"k": array_of(STRING, n)}, {}), f"number of strings is {n:,}, more")
        for n in HUGE
    },
    "strings beyond the end": (
        gguf_bytes({"k": array_of(STRING, 1, struct.pack("<Q", 1 << 40))}, {}),
        "key 'k', at byte .*string ends beyond the file, at byte 1,099,",
    ),
    **{f"{n} elements": (one_tensor((n, n)), "(more than|beyond the file's end)") for n in HUGE},
    **{f"{n} rows of nothing": (one_tensor((0, n, n)), "have more than") for n in HUGE[2:]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str) -> None:
    raw, why = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=why) as told:
        GgufFile(path)
    assert str(path) in str(told.value)
    assert len(str(told.value)) < 1000


def test_long_and_many_names_in_messages(tmp_path: Path) -> None:
    many: dict[str, Any] = {f"general.architectur{i:05}": 1 for i in range(9000)}
    odd = {"\x1b[2J": 1, "k" * 60000: 2}
    for metadata in (many, odd):
        file = opened(tmp_path, metadata, {f"\x1b{i}": F32 for i in range(3)})
        for ask in (file.metadata.text, file.array):
            for name in ("general.architecture", "k" * 60000):
                with pytest.raises(ModelError) as told:
                    ask(name)
                assert len(str(told.value)) < 1000
                assert "\x1b" not in str(told.value)
    with pytest.raises(ModelError, match=r"'k{100}'\.\.\., at byte .*duplicate key"):
        opened(tmp_path, [("k" * 60000, 1), ("k" * 60000, 1)], {})


def test_every_length_of_a_file_that_is_cut_short(tmp_path: Path) -> None:
    raw = gguf_bytes(METADATA, {"a": F32, "b": random_blocks(np.random.default_rng(0), "q4_0", (32, 2))})
    end = len(raw) - (-36 % 32)  # of the last tensor; padding follows
    path = tmp_path / "cut.gguf"
    for n in range(end):
        path.write_bytes(raw[:n])
        with pytest.raises(ModelError):
            GgufFile(path)
    path.write_bytes(raw[:end])
    assert GgufFile(path).array("b").shape == (2, 32)


def test_counts_are_limited_where_the_file_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be sparse: its length costs nothing, and what is read of it must not grow with it."""
    for name in ("MAX_VALUES", "MAX_TENSORS", "MAX_STRINGS", "MAX_STRINGS_NBYTES"):
        monkeypatch.setattr(reader, name, 100)
    for raw, why in (
        (gguf_bytes({}, {}, n_values=101), "n_kv is 101; at most 100 are read"),
        (gguf_bytes({}, {}, n_tensors=101), "n_tensors is 101; at most 100 are read"),
        (gguf_bytes({"k": array_of(STRING, 101)}, {}), "number of strings is 101; at most 100 are read"),
        (
            gguf_bytes({"k": [""] * 10, "l": array_of(STRING, 91)}, {}),
            "'l', .*number of strings is 91; at most 90 are read",
        ),
        (gguf_bytes({"k": ["a" * 93]}, {}), "the strings take more than 100 bytes"),
    ):
        path = tmp_path / "sparse.gguf"
        path.write_bytes(raw)
        os.truncate(path, 1 << 32)
        with pytest.raises(ModelError, match=why):
            GgufFile(path)


def test_a_long_string_is_not_decoded(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"k": Typed(STRING, struct.pack("<Q", 1 << 32))}, {})
    os.truncate(path, 1 << 34)
    with pytest.raises(ModelError, match=r"'k': at byte \d+: a string of 4,294,967,296 bytes; at most"):
        _ = GgufFile(path).metadata["k"]


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "none.gguf", tmp_path / "fifo", "/dev/zero", "~nobody-there/x"):
        with pytest.raises(ModelError, match=r"there is no file|cannot open"):
            GgufFile(path)


def test_a_file_that_is_cut_between_the_check_and_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, {"a": F32})
    real = mmap.mmap

    def cut(*args: Any, **kwargs: Any) -> mmap.mmap:
        os.truncate(path, 100)
        return real(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", cut)
    with pytest.raises(ModelError, match="was changed while it was in use"):
        GgufFile(path)


def test_a_file_that_is_changed_while_it_is_in_use(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, {"a": F32})
    file = GgufFile(path)
    file.check_unchanged()
    os.truncate(path, path.stat().st_size + 1)
    with pytest.raises(ModelError, match="was changed while it was in use"):
        file.check_unchanged()


# -- split files ---------------------------------------------------------------------------------


def split(tmp_path: Path, n: int = 3) -> list[Path]:
    return write_split(tmp_path, "m", {}, [{f"t{i}": F32} for i in range(n)])


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"part 2 of 3 is missing: there is no file .*00002-of-00003"):
        GgufFile(paths[0])


def test_parts_that_are_swapped(tmp_path: Path) -> None:
    paths = split(tmp_path)
    aside = paths[1].rename(tmp_path / "aside")
    paths[2].rename(paths[1])
    aside.rename(paths[2])
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf: split.no is 2, but its name says 1"):
        GgufFile(paths[0])
    paths[0].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match=r"00001-of-00003.gguf: split.no is 2, but its name says 0"):
        GgufFile(paths[0])


def test_a_part_of_another_model(tmp_path: Path) -> None:
    paths = split(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    paths[2].write_bytes(split(other, 4)[2].read_bytes())
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf: split.count is 4, but its name says 3"):
        GgufFile(paths[0])


def test_another_part_than_the_first(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf is not the first part of its model; open"):
        GgufFile(split(tmp_path)[1])


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00002.gguf", "m-1-of-3.gguf"])
def test_a_part_under_another_name(tmp_path: Path, name: str) -> None:
    path = split(tmp_path)[0].rename(tmp_path / name)
    with pytest.raises(ModelError, match=r"split.count is 3, so its name must end in -00001-of-00003.gguf"):
        GgufFile(path)


def test_tensors_that_two_parts_have_or_none(tmp_path: Path) -> None:
    first = write_split(tmp_path, "m", {}, [{"a": F32}, {"b": F32}, {"a": F32}])[0]
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf: tensor 'a' is in an earlier part too"):
        GgufFile(first)
    write_split(tmp_path, "m", {"split.tensors.count": 9}, [{"a": F32}, {}, {}])
    total = {"split.no": 0, "split.count": 3, "split.tensors.count": 4}
    write_gguf(first, total, {"a": F32})
    with pytest.raises(ModelError, match=r"split.tensors.count is 4, but the 3 parts hold 1 tensors"):
        GgufFile(first)


@pytest.mark.parametrize("count", [-1, 1025, 1 << 40, "3", Typed(BOOL, 1), Typed(gguf_files.INT64, -2)])
def test_a_count_of_parts_that_is_wrong(tmp_path: Path, count: Any) -> None:
    with pytest.raises(ModelError, match=r"'split.count': it is"):
        opened(tmp_path, {"split.count": count}, {"a": F32})


def test_one_part_may_say_that_it_is_split(tmp_path: Path) -> None:
    assert len(opened(tmp_path, {"split.count": 1, "split.no": Typed(gguf_files.UINT32, 0)}, {"a": F32})) == 1
