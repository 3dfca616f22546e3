"""Writers of models, checkpoints and states replace a file only by a whole one, and nothing but a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ggmlb import ModelError, open_gguf, save_gguf
from ggmlb.models import TextModel
from ggmlb.models.gguf.quantizing import quantize_gguf
from ggmlb.optimize import checkpoint
from tests.support.text_models import write_text_model

W = np.ones((2, 32), np.float32)


def session_state(path: Path) -> None:
    with TextModel(write_text_model(path.parent / "model.gguf"), ["CPU"]) as model:
        session = model.session()
        session.generate([1, 5], max_tokens=1)
        session.save_state(path)


def quantised(path: Path) -> None:
    save_gguf(path.parent / "model.gguf", {}, {"w": W})
    quantize_gguf(open_gguf(path.parent / "model.gguf"), path, "q8_0")


WRITERS: dict[str, Callable[[Path], None]] = {
    "save_gguf": lambda path: save_gguf(path, {}, {"w": W}),
    "checkpoint.gguf": lambda path: checkpoint.write(path, {}, {"w": W}),
    "checkpoint.safetensors": lambda path: checkpoint.write(path, {}, {"w": W}),
    "quantize": quantised,
    "save_state": session_state,
}


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> tuple[Callable[[Path], None], str]:
    pytest.importorskip("safetensors", reason="needs safetensors: pip install 'ggmlb[models]'")
    return WRITERS[request.param], f"file{Path(request.param).suffix}"


def test_a_link_stays_and_its_target_is_replaced(
    writer: tuple[Callable[[Path], None], str], tmp_path: Path
) -> None:
    write, name = writer
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / name, tmp_path / "folder" / "target"
    target.write_bytes(b"earlier")
    before = target.stat().st_ino
    link.symlink_to("folder/target")
    write(link)
    assert link.is_symlink()
    assert target.stat().st_size > 50
    assert target.stat().st_ino != before  # a new file, so that readers of the earlier one are not disturbed
    assert os.listdir(tmp_path / "folder") == ["target"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_what_is_no_regular_file_is_refused(
    writer: tuple[Callable[[Path], None], str], tmp_path: Path
) -> None:
    write, name = writer
    os.mkfifo(tmp_path / name)
    os.symlink(tmp_path / name, tmp_path / f"link{name}")
    (tmp_path / f"folder{name}").mkdir()
    for path in (tmp_path / name, tmp_path / f"link{name}", tmp_path / f"folder{name}"):
        before = path.stat()
        with pytest.raises(ModelError, match=r"cannot write .*: it is no regular file"):
            write(path)
        assert path.stat() == before


def test_a_disk_that_becomes_full_leaves_the_earlier_file(
    writer: tuple[Callable[[Path], None], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, name = writer
    path = tmp_path / name
    path.write_bytes(b"earlier")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="No space left on device; free space"):
        write(path)
    assert path.read_bytes() == b"earlier"
    assert {*os.listdir(tmp_path)} <= {name, "model.gguf"}
