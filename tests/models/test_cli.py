"""`ggmlb embed` and `ggmlb demo`, as a user runs them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ggmlb.cli import main
from ggmlb.cli.options import layers_by_device
from ggmlb.cli.passages import PASSAGES, QUESTIONS
from ggmlb.core.errors import ArgumentError


def check(file: Path, reference: npt.NDArray[np.float32]) -> None:
    found = np.load(file)
    assert found.dtype == np.float32 and found.shape == reference.shape
    assert np.einsum("ij,ij->i", found, reference).min() >= 0.99999


def test_embeds_a_file(
    tmp_path: Path,
    sentences: list[str],
    reference: npt.NDArray[np.float32],
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.npy"
    source.write_text(json.dumps(sentences))
    args = ["embed", "--input", str(source), "--output", str(target), "--devices", "CPU", "--batch", "8"]
    assert main(args) == 0
    check(target, reference)
    out, told = capfd.readouterr()
    assert out == "" and re.fullmatch(r".*out\.npy: 20 x 384 float32, computed in [\d.]+ s on CPU\n", told)


def test_embeds_standard_input_on_two_devices(
    tmp_path: Path,
    sentences: list[str],
    reference: npt.NDArray[np.float32],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO(json.dumps(sentences, ensure_ascii=False).encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw))
    target = tmp_path / "out.npy"
    requests = ["--devices", "OpenCL0, CPU", "--layers-on", "OpenCL0=0-1,5", "--layers-on", "CPU=2-4"]
    assert main(["embed", "--input", "-", "--output", str(target), *requests]) == 0
    check(target, reference)


BAD_INPUT = [
    ('["a", 1]', "item 1 is a int; every item must be a string"),
    ('{"a": 1}', "holds a JSON dict; give a list of strings"),
    ('"text"', "holds a JSON str; give a list of strings"),
    ("[", "is not JSON"),
    ("\udcff", "is not JSON"),
    (None, "cannot read"),
]


@pytest.mark.parametrize(("content", "says"), BAD_INPUT, ids=[str(says) for _, says in BAD_INPUT])
def test_bad_input(tmp_path: Path, content: str | None, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.json"
    if content is not None:
        source.write_bytes(content.encode(errors="surrogateescape"))
    target = tmp_path / "out.npy"
    assert main(["embed", "--input", str(source), "--output", str(target), "--devices", "CPU"]) == 1
    out, err = capfd.readouterr()
    assert says in err and str(source) in err and err.count("\n") == 1 and not out
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--devices", "GPU7"], "GPU7"),
        (["--devices", "CPU", "--layers-on", "CPU"], "give NAME=RANGE"),
        (["--devices", "CPU", "--layers-on", "CPU=0-99"], "not within 0-5"),
        (["--devices", "CPU", "--model", "nowhere"], "there is no model folder nowhere"),
        (["--devices", "CPU", "--batch", "0"], "batch is 0"),
    ],
)
def test_bad_options(
    tmp_path: Path, options: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.npy"
    source.write_text('["a"]')
    assert main(["embed", "--input", str(source), "--output", str(target), *options]) == (
        4 if "GPU7" in options else 1
    )
    err = capfd.readouterr().err
    assert err.startswith("ggmlb: ") and says in err and "Traceback" not in err
    assert not target.exists()


def test_output_folder_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.json"
    source.write_text('["a"]')
    args = ["embed", "--input", str(source), "--output", str(tmp_path / "no" / "out.npy"), "--devices", "CPU"]
    assert main(args) == 1
    assert "there is no folder" in capfd.readouterr().err


def test_layers_options_of_one_device_add_up() -> None:
    assert layers_by_device(["A=0-1", "B=3", "A=5"]) == {"A": ["0-1", "5"], "B": ["3"]}
    assert layers_by_device(None) is None
    with pytest.raises(ArgumentError, match="--layers-on A=: give NAME=RANGE"):
        layers_by_device(["A="])


@pytest.mark.parametrize("options", [["--devices", "CPU"], []], ids=["cpu", "two devices"])
def test_demo_answers_its_questions(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "search", *options]) == 0
    out, err = capfd.readouterr()
    assert not err
    for question in QUESTIONS:
        assert question in out
    # What a person would expect to be found first.
    for words in ("steering by the Earth's magnetic field", "cannot raise dough", "absolute zero"):
        assert words in out
    devices = ["CPU"] if options else ["CPU", "OpenCL0"]
    for name in devices:
        assert name in out
    if not options:
        assert "hidden_3" in out and "layers 0-2" in out and "layers 3-5" in out


def on_terminal(args: list[str], typed: str) -> str:
    """Run the command line with a terminal as its streams; return all that it showed."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ggmlb", *args]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, typed.encode())
        shown = b""
        with contextlib.suppress(OSError):  # raised when the other side has closed the terminal
            while part := os.read(ours, 4096):
                shown += part
        assert process.wait() == 0, shown.decode()
    os.close(ours)
    return shown.decode()


def test_shows_progress_on_a_terminal(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.npy"
    source.write_text(json.dumps([f"text {'a ' * i}" for i in range(9)]))
    args = ["embed", "--input", str(source), "--output", str(target), "--devices", "CPU", "--batch", "2"]
    assert "9/9" in on_terminal(args, "")
    assert np.load(target).shape == (9, 384)


def test_demo_asks_on_a_terminal() -> None:
    shown = on_terminal(["demo", "search", "--devices", "CPU"], "Who keeps time for the workers?\n\n")
    assert "knocker-up" in shown and not any(question in shown for question in QUESTIONS)


def test_passages_are_many_and_different() -> None:
    assert len(set(PASSAGES)) == len(PASSAGES) >= 40
