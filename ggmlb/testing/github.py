"""Results for GitHub Actions and others: a summary in Markdown, and annotations of failures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from ggmlb.core.errors import ArgumentError
from ggmlb.testing.about import About
from ggmlb.testing.results import CaseResult, Outcome, counts

MOST: Final = 10
"""Most annotations, and most failures in full: GitHub shows ten of a step."""

SUMMARY: Final = "GITHUB_STEP_SUMMARY"
"""Environment variable with the file that GitHub shows on a run's page."""


def markdown(results: Sequence[CaseResult], about: About | None = None) -> str:
    """Return results as Markdown: devices, counts by mode, slow ops, and failures in full."""
    about = about or About.here()
    lines = ["## ggmlb", ""]
    for name, facts in about.devices.items():
        told = ", ".join(facts[key] for key in ("description", "backend", "driver") if facts.get(key))
        lines.append(f"- **{_cell(name)}**: {_cell(told)}")
    versions = ", ".join(f"{name} {value}" for name, value in about.software.items())
    lines += [f"- {_cell(versions)}, {about.date}", ""]
    if about.unfinished:
        lines += [f"**{about.unfinished}**", ""]
    lines += [
        "| device | mode | passed | failed | skipped | known failures | time |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (device, mode), group in groupby(results, lambda r: (r.device, r.mode)):
        of = list(group)
        n = counts(of)
        bad = n[Outcome.FAILED] + n[Outcome.XPASSED]
        numbers = (n[Outcome.PASSED], bad, n[Outcome.SKIPPED], n[Outcome.XFAILED])
        took = sum(r.time_s or 0 for r in of)
        mark = "**" if bad else ""
        cells = [f"{mark}{x:,}{mark}" for x in numbers]
        lines.append(f"| {_cell(device)} | {mode} | {' | '.join(cells)} | {took:.1f} s |")
    changes = [r for r in results if "slowdown" in r.facts]
    if changes:
        lines += ["", "| op | time | baseline | change | noise |", "|---|--:|--:|--:|--:|"]
        for r in sorted(changes, key=lambda r: -float(r.facts["slowdown"])):
            f = r.facts
            lines.append(
                f"| {_cell(r.id)} | {_micro(r.time_s)} | {_micro(f['baseline_s'])} | {f['slowdown']:+.1%} | "
                f"{f['noise']:.1%} |"
            )
    bad_ones = [r for r in results if r.outcome.is_bad]
    if bad_ones:
        by_family = Counter(f"{r.mode} {r.family}" for r in bad_ones)
        lines += [
            "",
            "Failures: " + ", ".join(f"{_cell(name)} {n}" for name, n in by_family.most_common()),
            "",
        ]
    for r in bad_ones[:MOST]:
        body = "\n\n".join(filter(None, (r.reason, r.detail, r.program)))
        lines += [
            f"<details><summary>{_cell(f'{r.device} {r.mode} {r.id}')}</summary>",
            "",
            *_fenced(body),
            "",
            "</details>",
        ]
    if len(bad_ones) > MOST:
        lines.append(f"and {len(bad_ones) - MOST:,} more failures")
    return "\n".join(lines) + "\n"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, under a heading."""
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def failure_annotations(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield an annotation for each failure, at most `MOST`, at the line of the device's code."""
    bad = [r for r in results if r.outcome.is_bad]
    for r in bad[:MOST]:
        body = "\n".join(filter(None, (r.reason, r.detail)))
        yield annotation(f"{r.device} {r.mode}: {r.id}", body, r.at)
    if len(bad) > MOST:
        yield annotation("ggmlb", f"{len(bad) - MOST:,} more cases failed")


def annotation(title: str, text: str, at: str = "") -> str:
    """Return a workflow command that shows an error, at `FILE:LINE` if given."""
    file, _, line = at.rpartition(":")
    root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    if file and Path(file).is_relative_to(root):
        file = str(Path(file).relative_to(root))
    where = f"file={_property(file)},line={line}," if file else ""
    return f"::error {where}title={_property(title)}::{_data(text)}"


def append_summary(text: str) -> None:
    """Append Markdown to the page of GitHub's run.

    Raises:
        ArgumentError: There is no such page here, or it cannot be written.
    """
    path = os.environ.get(SUMMARY)
    if not path:
        raise ArgumentError(f"--github: the variable {SUMMARY} is not set, as it is in GitHub Actions")
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ArgumentError(f"--github: cannot write {path}: {error.strerror}") from error


def _micro(seconds: float | None) -> str:
    return f"{1e6 * (seconds or 0):,.1f} us"


def _fenced(text: str) -> list[str]:
    """Return lines in a fence that is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]


def _cell(text: str) -> str:
    """Escape a text for a cell of a table."""
    for old, new in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\n", " "), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(old, new)
    return text


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
