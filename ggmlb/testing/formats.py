"""Results as JSON, CSV and JUnit XML; `ggmlb.cli.tables` prints the table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from ggmlb.testing.about import About
from ggmlb.testing.junit import as_junit
from ggmlb.testing.results import Result, counts

COLUMNS: Final = ("mode", "device", "family", "id", "outcome", "reason", "nmse", "time_s")
"""Columns of CSV, followed by the mode's own figures."""


def as_json(results: Sequence[Result], about: About | None = None) -> str:
    """Return `{"run": {...}, "counts": {...}, "results": [{...}, ...]}`."""
    told = {outcome.value: n for outcome, n in counts(results).items()}
    records = [_finite(result.as_dict()) for result in results]
    run = (about or About.here()).as_dict()
    return json.dumps({"run": run, "counts": told, "results": records}, indent=1)


def as_csv(results: Sequence[Result], about: About | None = None) -> str:
    """Return a line of names, and a line for each result; `about` is omitted."""
    facts = list(dict.fromkeys(name for result in results for name in result.facts))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*COLUMNS, *facts], lineterminator="\n")
    writer.writeheader()
    writer.writerows(result.as_dict() for result in results)
    return out.getvalue()


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON lacks, by text."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}


FORMATS: Final[dict[str, Callable[[Sequence[Result], About | None], str]]] = {
    "json": as_json,
    "csv": as_csv,
    "junit": as_junit,
}
