"""Results as text for programs: JSON, CSV and JUnit XML. The table for people is the command's own."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final

from ggmlb.testing.results import Outcome, Result, counts

COLUMNS: Final = ("mode", "device", "family", "id", "outcome", "reason", "nmse", "time_s")
"""Of CSV; a mode's own figures follow."""

_NO_XML = {code: "?" for code in range(32) if chr(code) not in "\t\n\r"}


def as_json(results: Sequence[Result]) -> str:
    """Return `{"counts": {...}, "results": [{...}, ...]}`."""
    told = {outcome.value: n for outcome, n in counts(results).items()}
    records = [_finite(result.as_dict()) for result in results]
    return json.dumps({"counts": told, "results": records}, indent=1)


def as_csv(results: Sequence[Result]) -> str:
    """Return a line of names, and a line for each result."""
    facts = list(dict.fromkeys(name for result in results for name in result.facts))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*COLUMNS, *facts], lineterminator="\n")
    writer.writeheader()
    writer.writerows(result.as_dict() for result in results)
    return out.getvalue()


def as_junit(results: Sequence[Result]) -> str:
    """Return JUnit XML, as CI systems read it: a suite for each device and mode.

    An expected failure counts as skipped, and an expected failure that passes as failed.
    """
    root = ElementTree.Element("testsuites", name="ggmlb")
    for (device, mode), group in groupby(results, lambda r: (r.device, r.mode)):
        suite = ElementTree.SubElement(root, "testsuite", name=f"ggmlb.{device}.{mode}")
        cases = list(group)
        n = counts(cases)
        suite.set("tests", str(len(cases)))
        suite.set("failures", str(n[Outcome.FAILED] + n[Outcome.XPASSED]))
        suite.set("skipped", str(n[Outcome.SKIPPED] + n[Outcome.XFAILED]))
        suite.set("errors", "0")
        suite.set("time", f"{sum(case.time_s or 0 for case in cases):.6f}")
        for case in cases:
            _add_case(suite, case)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ElementTree.Element, result: Result) -> None:
    classname = f"ggmlb.{result.device}.{result.mode}.{result.family.replace(' ', '_')}"
    case = ElementTree.SubElement(suite, "testcase", classname=classname, name=result.id)
    case.set("time", f"{result.time_s or 0:.6f}")
    reason = result.reason.translate(_NO_XML)
    if result.outcome.is_bad:
        ElementTree.SubElement(case, "failure", message=reason, type=result.outcome.value).text = reason
    elif result.outcome is not Outcome.PASSED:
        ElementTree.SubElement(case, "skipped", message=reason, type=result.outcome.value)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace what JSON does not have: NaN and infinities become text."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}


FORMATS: Final[dict[str, Callable[[Sequence[Result]], str]]] = {
    "json": as_json,
    "csv": as_csv,
    "junit": as_junit,
}
