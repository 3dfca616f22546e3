"""What commands show: tables in narrow terminals, progress, and what Ctrl-C leaves."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ggmlb.cli import frame, main
from ggmlb.cli.frame import Column, Row, print_table, progress_bar
from ggmlb.testing.speed import Figure

WORDS = st.lists(st.text("abcdefgh_.0123", min_size=1, max_size=14), max_size=3).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Column], list[Row], int]:
    n = draw(st.integers(1, 7))
    drops = draw(st.permutations(range(n)))
    columns = [
        Column(draw(WORDS) + f"head{i}", draw(st.booleans()), draw(st.booleans()), d)
        for i, d in enumerate(drops)
    ]
    rows = draw(st.lists(st.lists(WORDS, min_size=n, max_size=n), max_size=4))
    return columns, [Row(cells) for cells in rows], draw(st.integers(60, 120))


@given(tables())
def test_no_word_of_a_table_is_cut(table: tuple[list[Column], list[Row], int]) -> None:
    columns, rows, width = table
    out = io.StringIO()
    print_table(Console(file=out, width=width, highlight=False), "title", columns, rows)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(out.getvalue().split())
    left_out = text.partition("no room for ")[2]
    for i, column in enumerate(columns):
        if column.name in left_out:
            assert column.drop  # and all that are to be dropped before it are gone too
            assert all(c.name in left_out for c in columns if c.drop > column.drop)
            continue
        for cell in (column.name, *(row.cells[i] for row in rows)):
            words = cell.split() if column.wraps else [cell]
            assert all(any(word in line for line in lines) for word in words)


def test_names_with_markup_and_control_characters_are_shown_as_they_are() -> None:
    out = io.StringIO()
    print_table(Console(file=out, width=80), "[bold]t", [Column("[red]a")], [["[/]\x1b[2J"]])
    assert all(text in out.getvalue() for text in ("[bold]t", "[red]a", "[/]\\x1b[2J"))


def lines_of(monkeypatch: pytest.MonkeyPatch, n: int) -> str:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    with progress_bar("reading", n) as progress:
        for i in range(n):
            progress(i + 1, n)
    return out.getvalue()


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, 2000) == ""
    monkeypatch.setattr(frame, "LINE_S", 0.0)
    first, second = lines_of(monkeypatch, 2).splitlines()
    assert first.startswith("reading: 1 of 2, ") and second == "reading: 2 of 2, 0 s left"
    monkeypatch.setenv("GGMLB_PROGRESS", "0")
    assert lines_of(monkeypatch, 2) == ""


def test_quiet_shows_results_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GGMLB_PROGRESS", "")
    args = ["test", "-d", "CPU", "--mode", "all", "-o", "sqr"]
    main(args)
    assert "cases on CPU" in capsys.readouterr().err
    main([*args, "--quiet"])
    assert "cases on CPU" not in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def figure(device: Any, name: str) -> Figure:
        if device.name == "CPU" and name != "copy in its memory":
            raise KeyboardInterrupt
        return Figure(name, "GB/s", 12.5, (12.5,))

    monkeypatch.setattr("ggmlb.testing.speed.figure", figure)
    assert main(["bench", "-d", "LLVM,CPU"]) == 130
    out, err = capsys.readouterr()
    assert "12.5" in out and "LLVM: " in out and "CPU: " not in out
    assert "stopped by Ctrl-C: devices not measured to the end are left out" in err


def test_ctrl_c_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ggmlb.open_gguf", stopped)
    assert main(["quantize", "a.gguf", "b.gguf", "--type", "q4_0"]) == 130
    assert capsys.readouterr().err.endswith("the new file was not written, and the old one is as it was\n")
    assert main(["show", "a.gguf"]) == 130
    assert capsys.readouterr().err.endswith("stopped by Ctrl-C: nothing was written\n")
