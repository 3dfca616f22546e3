"""Baselines of `ggmlb bench` and mode `perf`; summary and annotations for GitHub."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ggmlb.cli import main
from ggmlb.core.errors import ArgumentError
from ggmlb.testing import perf, speed
from ggmlb.testing.about import About
from ggmlb.testing.baseline import ROUNDS, Baseline, Measured, Timing, save, share
from ggmlb.testing.github import MOST, annotation, failure_annotations, markdown
from ggmlb.testing.results import CaseResult, Outcome

ABOUT = About("here", "2026-11-25", {"version": "1"}, {"X0": {"description": "a card", "driver": "1.0"}})


def measured(*samples: float, unit: str = "s", name: str = "op") -> Measured:
    return Measured("X0", name, unit, samples)


def baseline(*measurements: Measured) -> Baseline:
    return Baseline(ABOUT.as_dict(), measurements)


def test_a_timing_is_a_median_with_its_samples() -> None:
    timing = Timing([3.0, 1.0, 2.0])
    assert (timing, pickle.loads(pickle.dumps(timing)).samples) == (2.0, (3.0, 1.0, 2.0))


def test_noise_is_the_distance_of_the_quartiles() -> None:
    assert measured(1, 2, 3, 4, 100).noise == pytest.approx((52 - 1.5) / 3)
    assert measured(5, 5, 5).noise == measured(7).noise == 0


@pytest.mark.parametrize(
    ("before", "now", "unit", "verdict"),
    [
        ((10, 10, 10), (10.5, 10.5, 10.5), "s", "same"),
        ((10, 10, 10), (12, 12, 12), "us", "slower"),
        ((10, 10, 10), (12, 12, 12), "GB/s", "faster"),
        ((12, 12, 12), (10, 10, 10), "GFLOP/s", "slower"),
        ((8, 10, 12), (9, 12, 15), "s", "unclear"),
        ((12, 12, 12), (10, 10, 10), "s", "faster"),
    ],
)
def test_a_change_counts_beyond_what_is_allowed_and_the_noise(
    before: tuple[float, ...], now: tuple[float, ...], unit: str, verdict: str
) -> None:
    change = baseline(measured(*before, unit=unit)).change(measured(*now, unit=unit), 0.1)
    assert change is not None and change.verdict == verdict
    without = baseline(measured(*before, unit=unit)).change(measured(*now, unit=unit))
    assert without is not None and without.verdict in ("same", "faster"), (
        "nothing fails unless it is asked for"
    )


def test_what_is_not_in_the_baseline_has_no_change() -> None:
    assert baseline(measured(1)).change(measured(1, name="other")) is None
    assert baseline(measured(1)).change(measured(1, unit="us")) is None
    assert baseline(measured(1), measured(1, name="gone")).missing([measured(1)]) == ["X0 gone"]


def test_what_seems_slower_is_measured_again() -> None:
    rounds = [measured(20, 20, 20), measured(20, 20, 20)]
    now, change = baseline(measured(10, 10, 10)).measured_again(measured(20), 0.1, lambda: rounds.pop())
    assert len(now.samples) == 1 + 3 * (ROUNDS - 1) and not rounds
    assert change is not None and change.verdict == "slower"
    quiet = [measured(10, 10, 10, 10, 10)]
    now, change = baseline(measured(10, 10, 10)).measured_again(measured(20), 0.1, lambda: quiet.pop())
    assert change is not None and change.verdict == "same" and not quiet, "one outlier"
    now, change = baseline(measured(10)).measured_again(measured(10), 0.1, lambda: pytest.fail("not asked"))
    assert change is not None and change.verdict == "same"


def test_a_baseline_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    save(file, ABOUT, [measured(1, 2, 3)])
    found = Baseline.load(file)
    change = found.change(measured(4, 4, 4))
    assert change is not None and change.before == measured(1, 2, 3) and change.slowdown == 1
    assert json.loads(file.read_text())["measured"][0]["value"] == 2
    other = replace(ABOUT, hostname="there", devices={"X0": {"description": "a card", "driver": "2.0"}})
    assert found.differences(ABOUT) == []
    assert found.differences(other) == [
        "the baseline is of host here, this is there",
        "X0: driver is '2.0', in the baseline '1.0'",
    ]
    with pytest.raises(ArgumentError, match="cannot write"):
        save(tmp_path / "no/where.json", ABOUT, [])
    for text in ("", "[]", '{"run": {}, "measured": [{}]}', file.read_text().replace("1,", "-1,", 1)):
        file.write_text(text)
        with pytest.raises(ArgumentError, match="is no baseline"):
            Baseline.load(file)
    with pytest.raises(ArgumentError, match="cannot read the baseline"):
        Baseline.load(tmp_path / "none.json")


def test_shares() -> None:
    assert (share("10%"), share("0.25")) == (0.1, 0.25)
    for text in ("", "ten", "0", "-1%", "inf", "nan"):
        with pytest.raises(ArgumentError, match="give a share above 0, as 10% or"):
            share(text)


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times [s] instead of measurements: by default 1 ms; `factor` multiplies them."""
    state = {"factor": 1.0}
    fixed = Timing([1e-3] * 5)
    monkeypatch.setattr(perf, "time_node", lambda *of: Timing(t * state["factor"] for t in fixed.samples))
    monkeypatch.setattr(speed, "time_or_none", lambda *of: Timing(t * state["factor"] for t in fixed.samples))
    monkeypatch.setattr(speed, "_timed", lambda *of: Timing(t * state["factor"] for t in fixed.samples))
    return state


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Places of a baseline and of GitHub's summary."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    return tmp_path / "before.json", tmp_path / "summary.md"


def test_perf_is_compared(
    quick: dict[str, float], files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before, summary = files
    args = ["test", "-d", "CPU", "--mode", "perf", "-o", "argmax,scale"]
    assert main([*args, "--save", str(before)]) == 0
    assert {len(m["samples"]) for m in json.loads(before.read_text())["measured"]} == {5 * ROUNDS}
    quick["factor"] = 1.5
    assert main([*args, "--compare", str(before)]) == 0
    assert main([*args, "--compare", str(before), "--fail-at", "60%"]) == 0
    capsys.readouterr()
    assert main([*args, "--compare", str(before), "--fail-at", "10%", "--github"]) == 1
    out = capsys.readouterr().out
    assert "+50.0%" in out and "slower" in out
    assert "FAILED argmax(f32)\n  50.0% slower than the baseline: 0.0015 s, before 0.001 s" in out
    assert "::error title=CPU perf%3A argmax(f32)::50.0%25 slower than the baseline" in out
    assert "| argmax(f32) | 1,500.0 us | 1,000.0 us | +50.0% | 0.0% |" in summary.read_text()
    assert main([*args[:-1], "argmax", "--compare", str(before)]) == 0
    assert "ggmlb: not measured: CPU scale(f32)" in capsys.readouterr().err


def test_bench_is_compared(
    quick: dict[str, float], files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before, summary = files
    assert main(["bench", "-d", "CPU", "--save", str(before)]) == 0
    assert main(["bench", "-d", "CPU", "--compare", str(before), "--fail-at", "10%"]) == 0
    assert "same" in capsys.readouterr().out
    quick["factor"] = 2.0
    assert main(["bench", "-d", "CPU", "--compare", str(before)]) == 0
    assert main(["bench", "-d", "CPU", "--compare", str(before), "--fail-at", "10%", "--github"]) == 1
    told = capsys.readouterr()
    assert re.search(r"copy in its memory +│ GB/s +│ .*│ \+100.0% │ +0.0% │ slower", told.out)
    assert "ggmlb: CPU: copy in its memory: 100.0% slower than the baseline" in told.err
    assert "::error title=ggmlb bench::CPU: copy in its memory: 100.0%25 slower" in told.out
    assert "| CPU | copy in its memory | GB/s |" in summary.read_text()
    capsys.readouterr()
    assert main(["bench", "-d", "CPU", "--compare", str(before), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {change["slowdown"] for change in changes} == {1.0}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["bench", "--fail-at", "10%"], "--fail-at needs a baseline"),
        (["test", "-d", "CPU", "--save", "x.json"], "give --mode perf or all"),
        (
            ["test", "-d", "CPU", "--mode", "perf", "--compare", "none.json"],
            "cannot read the baseline none.json",
        ),
    ],
)
def test_wrong_usage(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) in (1, 2)
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())


# -- GitHub ----------------------------------------------------------------------------------------


def failed(i: int, at: str = "") -> CaseResult:
    fields = ("test", "X0", "add", f"add(f32[{i}])", Outcome.FAILED, "it raised | <b>, 5 % of\nlines")
    return CaseResult(*fields, detail="```\nTraceback", program="import ggmlb", at=at)


def test_a_summary_has_devices_counts_and_failures() -> None:
    results = [replace(failed(0), outcome=Outcome.PASSED), *(failed(i) for i in range(1, MOST + 4))]
    text = markdown(results, ABOUT)
    assert "- **X0**: a card, 1.0" in text
    assert f"| X0 | test | **1** | **{MOST + 3}** | **0** | **0** |" in text
    assert text.count("<details>") == MOST and "and 3 more failures" in text
    assert "````text\nit raised | <b>, 5 % of\nlines\n\n```\nTraceback" in text, "a longer fence"
    assert "Failures: test add 13" in text


def test_annotations_name_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    inside, outside = f"{tmp_path / 'mine' / 'backend.py'}:12", "/elsewhere/a.py:3"
    lines = [*failure_annotations([failed(1, inside), failed(2, outside), failed(3)])]
    assert lines[0].startswith("::error file=mine/backend.py,line=12,title=X0 test%3A add(f32[1])::it raised")
    assert lines[1].startswith("::error file=/elsewhere/a.py,line=3,")
    assert lines[2].startswith("::error title=")
    assert all("\n" not in line and "5 %25 of%0Alines" in line for line in lines)
    many = [*failure_annotations([failed(i) for i in range(25)])]
    assert len(many) == MOST + 1 and many[-1] == annotation("ggmlb", "15 more cases failed")


def test_markdown_is_a_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-d", "CPU", "-o", "abs", "--limit", "1", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("## ggmlb\n\n- **CPU**: ")


def test_github_is_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr("ggmlb.cli.test._run", lambda *args: pytest.fail("the work was begun"))
    assert main(["test", "-d", "CPU", "-o", "abs", "--limit", "1", "--github"]) == 1
    assert "the variable GITHUB_STEP_SUMMARY is not set" in capsys.readouterr().err
