"""Results as JSON, CSV and JUnit XML; `ggmlb.cli.tables` prints the table."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, BinaryIO, Final
from xml.sax.saxutils import quoteattr

from ggmlb.testing.about import About
from ggmlb.testing.github import markdown
from ggmlb.testing.results import CaseResult, Outcome, counts

COLUMNS: Final = ("mode", "device", "family", "id", "outcome", "reason", "nmse", "time_s")
"""Columns of CSV, followed by the mode's own figures."""


def as_json(results: Sequence[CaseResult], about: About | None = None) -> str:
    """Return results as JSON text: facts of the run (`about`), counts by outcome, and a record for each."""
    told = {outcome.value: n for outcome, n in counts(results).items()}
    records = [_finite(result.as_dict()) for result in results]
    run = (about or About.here()).as_dict()
    return json.dumps({"run": run, "counts": told, "results": records}, indent=1)


def as_csv(results: Sequence[CaseResult], about: About | None = None) -> str:
    """Return results as CSV: a header, then a line for each result; `about` is ignored."""
    named = (
        name for result in results for name, value in result.facts.items() if not isinstance(value, tuple)
    )
    facts = list(dict.fromkeys(named))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*COLUMNS, *facts], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(result.as_dict() for result in results)
    return out.getvalue()


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON lacks, by text."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}


# -- JUnit XML: the file is complete after each result ---

_NO_XML: Final = {
    **{code: "?" for code in range(32) if chr(code) not in "\t\n\r"},
    **dict.fromkeys((*range(0xD800, 0xE000), 0xFFFE, 0xFFFF), "?"),
}
_HEAD: Final = '<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="ggmlb">\n'
_TAIL: Final = "</testsuites>\n"


class JunitReport:
    """A JUnit report: a suite for each device and mode, a case for each result.

    By hand, because junitparser writes whole files, at the end of a run. Here each result is written at once,
    so that none is lost if the run ends early. Until `close`, the report ends with a suite `ggmlb.unfinished`
    that counts as an error. An expected failure counts as skipped, an unexpected pass as failed.

    Args:
        out: Seekable output, written from the current position on.
        about: Machine and devices, for the suites' properties.
        total: Cases of the run; 0 if unknown.
    """

    def __init__(self, out: BinaryIO, about: About, total: int = 0) -> None:
        self._out = out
        self._about = about
        self._total = total
        self._n = 0
        self._suites: list[_Suite] = []
        self._start = out.tell()
        self._write(self._start, _HEAD.encode() + self._end())
        self._end_of_suites = self._start + len(_HEAD.encode())

    def add(self, result: CaseResult) -> None:
        """Write a case's result into the report's suite of its device and mode."""
        self._n += 1
        suite = next((s for s in self._suites if (s.device, s.mode) == (result.device, result.mode)), None)
        if suite is None:
            suite = _Suite(result.device, result.mode, self._about, self._end_of_suites)
            self._suites.append(suite)
            suite.add(result)
            self._rewrite(suite)
        elif suite is self._suites[-1]:
            place = suite.start + suite.size - len(suite.tail)
            case = suite.add(result)
            self._end_of_suites = suite.start + suite.size
            self._write(place, case + suite.tail + self._end())
            self._write(suite.start, suite.head)
        else:
            suite.add(result)
            self._rewrite(suite)

    def close(self) -> None:
        """Mark the run as complete. The file stays open."""
        self._write(self._end_of_suites, _TAIL.encode())
        self._out.truncate(self._end_of_suites + len(_TAIL.encode()))
        self._out.seek(0, io.SEEK_END)

    def _rewrite(self, first: _Suite) -> None:
        """Write a suite and all after it."""
        place, text = first.start, b""
        for suite in self._suites[self._suites.index(first) :]:
            suite.start = place + len(text)
            text += suite.text
        self._end_of_suites = place + len(text)
        self._write(place, text + self._end())

    def _end(self) -> bytes:
        """The text after the suites during the run."""
        of = f" of {self._total}" if self._total else ""
        why = self._about.unfinished or f"the run was stopped: {self._n}{of} cases were done"
        return (
            '  <testsuite name="ggmlb.unfinished" tests="1" failures="0" skipped="0" errors="1" time="0">\n'
            '    <testcase classname="ggmlb" name="the run comes to its end" time="0">\n'
            f'      <error message={_quoted(why)} type="unfinished" />\n'
            f"    </testcase>\n  </testsuite>\n{_TAIL}"
        ).encode()

    def _write(self, place: int, text: bytes) -> None:
        self._out.seek(place)
        self._out.write(text)
        self._out.flush()
        self._out.seek(0, io.SEEK_END)  # for other writers, which must append


class _Suite:
    """The cases of a device and a mode.

    Attributes:
        start: Offset in the file [bytes].
    """

    tail = b"  </testsuite>\n"

    def __init__(self, device: str, mode: str, about: About, start: int) -> None:
        self.device = device
        self.mode = mode
        self.start = start
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")  # JUnit's form, which has no zone
        facts = {"name": f"ggmlb.{device}.{mode}", "timestamp": now, "hostname": about.hostname or "unknown"}
        self._facts = " ".join(f"{name}={_quoted(value)}" for name, value in facts.items())
        properties = (f"      <property{_pair(*of)} />\n" for of in about.of(device).items())
        self._body = [f"    <properties>\n{''.join(properties)}    </properties>\n".encode()]
        self._counts = dict.fromkeys(("tests", "failures", "skipped", "errors"), 0)
        self._time_s = 0.0
        self.size = len(self.text)

    @property
    def head(self) -> bytes:
        """The first line, of fixed length for any number of cases."""
        counts = " ".join(f'{name}="{n}"' for name, n in self._counts.items())
        counts += f' time="{self._time_s:.6f}"'
        return f"  <testsuite {self._facts} {counts:<100}>\n".encode()

    @property
    def text(self) -> bytes:
        """The suite as XML."""
        return b"".join((self.head, *self._body, self.tail))

    def add(self, result: CaseResult) -> bytes:
        """Add a result; return its case as XML."""
        self._counts["tests"] += 1
        self._counts["failures"] += result.outcome.is_bad
        self._counts["skipped"] += not result.outcome.is_bad and result.outcome is not Outcome.PASSED
        self._time_s += result.time_s or 0
        case = _case(result)
        self._body.append(case)
        self.size += len(case)
        return case


def as_junit(results: Sequence[CaseResult], about: About | None = None) -> str:
    """Return the results of a run as JUnit XML text."""
    out, about = io.BytesIO(), about or About.here()
    report = JunitReport(out, about)
    for result in results:
        report.add(result)
    if not about.unfinished:
        report.close()
    return out.getvalue().decode()


def _case(result: CaseResult) -> bytes:
    family = result.family.replace(" ", "_")
    case = ElementTree.Element("testcase", classname=f"ggmlb.{result.device}.{result.mode}.{family}")
    case.set("name", result.id)
    case.set("time", f"{result.time_s or 0:.6f}")
    reason = result.reason.translate(_NO_XML)
    if result.outcome.is_bad:
        told = "\n\n".join(filter(None, (reason, result.detail, result.program))).translate(_NO_XML)
        ElementTree.SubElement(case, "failure", message=reason, type=result.outcome.value).text = told
    elif result.outcome is not Outcome.PASSED:
        ElementTree.SubElement(case, "skipped", message=reason, type=result.outcome.value)
    ElementTree.indent(case, level=2)
    return f"    {ElementTree.tostring(case, encoding='unicode').translate(_NO_XML)}\n".encode()


def _quoted(value: str) -> str:
    return quoteattr(value.translate(_NO_XML))


def _pair(name: str, value: str) -> str:
    return f" name={_quoted(name)} value={_quoted(value)}"


FORMATS: Final[dict[str, Callable[[Sequence[CaseResult], About | None], str]]] = {
    "json": as_json,
    "csv": as_csv,
    "junit": as_junit,
    "markdown": markdown,
}
