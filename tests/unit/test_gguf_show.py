"""`ggmlb show`, and what notebooks show of a GGUF file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb import open_gguf
from ggmlb.cli import main
from ggmlb.models.gguf import metadata
from tests.support.gguf_files import STRING, Typed, random_blocks, write_gguf, write_split
from tests.unit.test_html import shown

F32 = np.arange(64, dtype=np.float32).reshape(2, 32)

METADATA: dict[str, Any] = {
    "general.architecture": "llama", "bool": True, "u8": Typed(0, 200), "real": 0.1, "nan": float("nan"),
    "evil\x1b[31m": "red\x1b[31m\n\t<b>", "template": "x" * 5000,
    "tokens": [f"t{i}" for i in range(1000)], "scores": np.full(1000, 0.25, np.float32), "few": [1, 2],
    "bad": Typed(STRING, struct.pack("<Q", 2) + b"\xff\xfe"),
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    blocks = random_blocks(np.random.default_rng(0), "q4_0", (32, 4))
    return write_gguf(tmp_path / "m.gguf", METADATA, {"<w>": F32, "q\x1b[2J": blocks})


def show(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    status = main(["show", *args])
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    return status, told.out + told.err


def test_the_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = show(capsys, str(path))
    assert status == 0
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert "llama" in lines["general.architecture"]
    assert (
        "string[1000]" in lines["tokens"] and "['t0', 't1', 't2', 't3', 't4', 't5', ...]" in lines["tokens"]
    )
    assert "[0.25, 0.25, 0.25, 0.25, 0.25, 0.25, ...]" in lines["scores"]
    assert "[1, 2]" in lines["few"]
    assert r"red\x1b[31m\n\t<b>" in lines[r"evil\x1b[31m"]
    assert "x" * 100 + "..." in lines["template"] and "x" * 101 not in out
    assert "not UTF-8" in lines["bad"]
    assert "F32" in lines["<w>"] and "32, 2" in lines["<w>"] and "256 B" in lines["<w>"]
    assert r"q\x1b[2J" in lines
    assert "2, 192 parameters, 328 B, 13.67 bits per parameter" in out
    assert "F32 1 (256 B), Q4_0 1 (72 B)" in out


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = show(capsys, str(path), "--json")
    assert status == 0
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    values = found["metadata"]
    assert values["general.architecture"] == {"type": "string", "value": "llama"}
    assert values["tokens"] == {"type": "string[1000]", "value": [f"t{i}" for i in range(6)]}
    assert values["nan"] == {"type": "float32", "value": "nan"}
    assert values["template"]["value"] == "x" * 5000
    assert values["evil\x1b[31m"]["value"] == "red\x1b[31m\n\t<b>"
    assert values["bad"]["value"] is None and "not UTF-8" in values["bad"]["error"]
    file = open_gguf(path)
    assert [(t["name"], t["type"], t["ne"], t["offset"], t["nbytes"]) for t in found["tensors"]] == [
        (n, t.dtype.name, list(t.ne), t.offset, t.nbytes) for n, t in file.items()
    ]
    assert (found["version"], found["alignment"], found["nbytes"]) == (3, 32, 328)


def test_the_parts_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_split(tmp_path, "m", {}, [{"a": F32}, {"b": F32}])[0]
    assert "parts: 2" in show(capsys, str(first))[1]
    assert len(json.loads(show(capsys, str(first), "--json")[1])["parts"]) == 2


def test_a_model_without_tensors_or_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {})
    assert show(capsys, str(path))[0] == show(capsys, str(path), "--json")[0] == 0
    assert "tensors" in shown(open_gguf(path))


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(b"GGUF" + bytes(99))
    for name, why in (("none", "there is no file"), ("x", "GGUF of version 0")):
        status, out = show(capsys, str(tmp_path / name))
        assert status == 1
        assert out.count("\n") == 1 and why in out


def test_long_arrays_are_not_decoded(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    real = metadata.Metadata._strings
    monkeypatch.setattr(metadata.Metadata, "_strings", lambda *given: most.append(given[-1]) or real(*given))
    show(capsys, str(path))
    shown(open_gguf(path))
    assert max(most) == 6


def test_a_notebook_shows_the_same(path: Path) -> None:
    page = shown(open_gguf(path))
    for text in (
        "GgufFile m.gguf",
        "llama",
        "['t0', 't1'",
        "<w>",
        "<b>",
        "13.67 bits per parameter",
        "not UTF-8",
    ):
        assert text in page
    assert "\x1b" not in page
