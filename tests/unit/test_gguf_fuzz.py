"""Mutants of GGUF files: each opens and can be read from end to end, or is refused by a ModelError.

The work on each is bounded by the size of the file: lines of the reader that run, and bytes of memory.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ggmlb import ModelError
from ggmlb.models.gguf import GgufFile, metadata, reader, summary
from tests.support.gguf_files import Typed, gguf_bytes, random_blocks, write_split

N_QUICK, N_SLOW = 200, 5_000

LINES_PER_BYTE, MEMORY_PER_BYTE = 8, 128
"""Most that a file may cost; IQ1's 50 bytes become 1 KiB of float32, and a short string an object."""

WATCHED = {reader.__file__, metadata.__file__}

NUMBERS = [
    *range(16), 24, 31, 32, 33, 39, 40, 64, 255, 256, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 56, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 32, (1 << 64) - 1,
]  # fmt: skip


def seeds() -> list[bytes]:
    """Small files, each with another part of the format."""
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {
        "general.architecture": "llama", "general.alignment": 32, "split.count": 1,
        "u8": Typed(0, 1), "i64": Typed(11, -1), "bool": True, "real": 0.5,
        "tokens": ["<s>", "a", "", "ß", "▁the"], "scores": [0.5, -1.0, 2.0], "types": [1, 2, 3],
        "flags": [True, False],
    }  # fmt: skip
    tensors: dict[str, Any] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.int64),
        "q4_0": random_blocks(rng, "q4_0", (32, 2)),
        "q6_K": random_blocks(rng, "q6_K", (256, 1)),
        "mxfp4": random_blocks(rng, "mxfp4", (32, 1)),
    }
    return [
        gguf_bytes(values, tensors),
        gguf_bytes(values, tensors, version=2, alignment=8),
        gguf_bytes({}, dict.fromkeys("abcdefgh", np.zeros(8, np.float32)), alignment=1),
        gguf_bytes({f"k{i}": i for i in range(20)}, {}),
        gguf_bytes({"t": [str(i) for i in range(99)]}, {"x": np.zeros((2, 2, 2, 2), np.float16)}),
    ]


SEEDS = seeds()


def mutant(rng: random.Random) -> bytes:
    """Return a seed with one to four changes."""
    raw = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 2, 4))):
        change = rng.choice(CHANGES)
        change(rng, raw)
    return bytes(raw)


def _place(rng: random.Random, raw: bytearray) -> int:
    """Return a random place, most often in the header."""
    return rng.randrange(max(1, min(len(raw), rng.choice((32, 200, 600, 1 << 20)))))


def flip(rng: random.Random, raw: bytearray) -> None:
    if raw:
        raw[_place(rng, raw)] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, raw: bytearray) -> None:
    """Put a number in the place of another; the length stays."""
    at, size = _place(rng, raw), rng.choice((1, 4, 8))
    raw[at : at + size] = struct.pack("<Q", rng.choice(NUMBERS))[:size]


def bytes_of_chance(rng: random.Random, raw: bytearray) -> None:
    at = _place(rng, raw)
    raw[at : at + 8] = rng.randbytes(rng.randrange(9))


def cut(rng: random.Random, raw: bytearray) -> None:
    del raw[rng.randrange(len(raw) + 1) :]


def delete(rng: random.Random, raw: bytearray) -> None:
    at = _place(rng, raw)
    del raw[at : at + rng.choice((1, 4, 8, 30))]


def repeat(rng: random.Random, raw: bytearray) -> None:
    """Repeat a piece: keys and tensors that are there twice."""
    at, size = _place(rng, raw), rng.choice((1, 8, 17, 40, 200))
    raw[at:at] = raw[at : at + size]


def swap(rng: random.Random, raw: bytearray) -> None:
    a, b, size = _place(rng, raw), _place(rng, raw), rng.choice((1, 4, 8))
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]


def extend(rng: random.Random, raw: bytearray) -> None:
    raw += bytes(rng.choice((1, 32, 4096)))


CHANGES: list[Callable[[random.Random, bytearray], None]] = [
    flip, flip, overwrite, overwrite, overwrite, bytes_of_chance, cut, delete, repeat, swap, extend,
]  # fmt: skip


@contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """Fail if a block runs more lines of the reader, or takes more memory, than a file of a size may cost."""
    n_lines = 0

    def line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        assert n_lines <= 3000 + LINES_PER_BYTE * nbytes, f"{n_lines} lines for {nbytes} bytes"
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line if frame.f_code.co_filename in WATCHED else None

    before = sys.gettrace()
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
    taken = tracemalloc.get_traced_memory()[1] - held
    assert taken <= (1 << 18) + MEMORY_PER_BYTE * nbytes, f"{taken} bytes of memory for {nbytes} bytes"


def read_all(path: Path) -> bool:
    """Read everything that a file holds; return whether it was opened."""
    try:
        file = GgufFile(path)
    except ModelError as error:
        assert str(path) in str(error)
        return False
    repr(file)
    json.dumps(summary.as_dict(file), allow_nan=False)
    assert "\x1b" not in summary.as_html(file)
    for key in file.metadata:
        try:
            found = file.metadata[key]
        except ModelError as error:
            assert repr(key[:100]) in str(error)  # a text that is not UTF-8: the other values can be read
            continue
        assert isinstance(found, (bool, int, float, str, list, np.ndarray))
    for name, tensor in file.items():
        assert file.blocks(name).nbytes == tensor.nbytes
        assert file.array(name).shape == tensor.shape
    file.check_unchanged()
    return True


def fuzz(tmp_path: Path, seed: int, n: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "mutant.gguf"
    n_opened = 0
    tracemalloc.start()
    try:
        for i in range(n):
            raw = mutant(rng)
            path.write_bytes(raw)
            try:
                with bounded(len(raw)):
                    n_opened += read_all(path)
            except BaseException:
                print(f"mutant {i} of seed {seed}: {raw.hex()}")
                raise
    finally:
        tracemalloc.stop()
    assert 0.02 * n < n_opened < 0.9 * n  # some of either kind, or this is no test


@pytest.mark.parametrize("seed", range(10))
def test_mutants(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path, seed, N_QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_mutants(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path, seed, N_SLOW)


@pytest.mark.parametrize("seed", range(3))
def test_mutants_of_parts(tmp_path: Path, seed: int) -> None:
    """One of three parts is a mutant, or another part."""
    rng = random.Random(seed)
    parts = [{"a": np.zeros(8, np.float32)}, {"b": np.zeros(8, np.float32)}, {"c": np.zeros(8, np.float32)}]
    paths = write_split(tmp_path, "m", {"k": ["a", "b"]}, parts)
    whole = [path.read_bytes() for path in paths]
    for _ in range(100):
        i = rng.randrange(3)
        raw = bytearray(whole[rng.randrange(3) if rng.random() < 0.2 else i])
        rng.choice(CHANGES)(rng, raw)
        paths[i].write_bytes(raw)
        try:
            file = GgufFile(paths[0])
            assert [file.array(name).size for name in file]
        except ModelError:
            pass
        paths[i].write_bytes(whole[i])
    assert len(GgufFile(paths[0])) == 3
