"""CaseResult, the record of one case on one device in one mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, NamedTuple

from ggmlb.testing.failure import location, raised, traceback_of


class Outcome(str, Enum):
    """Outcome of a case; `FAILED` and `XPASSED` fail the run."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"

    @property
    def is_bad(self) -> bool:
        """Whether the outcome fails the run."""
        return self in (Outcome.FAILED, Outcome.XPASSED)

    @property
    def ran(self) -> bool:
        """Whether the device computed something."""
        return self is not Outcome.SKIPPED


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The outcome of one case on one device in one mode, with error, time and reason.

    Attributes:
        mode: `test`, `support`, `grad`, `perf` or `behaviour`.
        device: The device's name.
        family: The op or group of ops, or the group of behaviour checks.
        id: The case, unique within mode and device.
        outcome: The outcome.
        reason: The reason, unless it passed.
        nmse: The largest error of an output, if measured.
        time_s: Time of the case [s]; in mode `perf`, of one computation of the op.
        facts: Other figures of the mode, by name.
        detail: Of a failure: the traceback into the device's code, or the wrong elements; several lines.
        program: Of a failure: the case as a Python program to paste.
        at: Of a failure: `FILE:LINE` of the device's code that raised, if it raised.
        error: Of a failure: the exception, if the runner keeps them. It holds the device's memory.
    """

    mode: str
    device: str
    family: str
    id: str
    outcome: Outcome
    reason: str = ""
    nmse: float | None = None
    time_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    program: str = ""
    at: str = ""
    error: BaseException | None = field(default=None, repr=False, compare=False)

    def with_outcome(self, outcome: Outcome, reason: str) -> CaseResult:
        """Return a copy with another outcome and reason."""
        return replace(self, outcome=outcome, reason=reason)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and facts of this result as a dictionary, for JSON."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("facts", "error")}
        if not self.outcome.is_bad:
            del told["detail"], told["program"], told["at"]
        return {**told, "outcome": self.outcome.value, **self.facts}


class Finding(NamedTuple):
    """What the kit found about a case; `CaseResult` has the meaning of each field."""

    outcome: Outcome
    reason: str = ""
    nmse: float | None = None
    detail: str = ""
    error: BaseException | None = None

    @classmethod
    def failed(cls, error: BaseException, before: str = "", after: str = "") -> Finding:
        """Return the failure of a case that raised an error; the reason has texts before and after it."""
        reason = f"{before}it raised {raised(error)}{after}"
        return cls(Outcome.FAILED, reason, None, traceback_of(error), error)

    def result(
        self,
        mode: str,
        device: str,
        family: str,
        id: str,
        time_s: float | None = None,
        facts: dict[str, Any] | None = None,
    ) -> CaseResult:
        """Return the result of a case."""
        outcome, reason, nmse, detail, error = self
        of = (mode, device, family, id, outcome, reason, nmse, time_s)
        where = location(error) if error is not None else None
        at = f"{where[0]}:{where[1]}" if where else ""
        return CaseResult(*of, facts or {}, detail, at=at, error=error)


def counts(results: Iterable[CaseResult]) -> dict[Outcome, int]:
    """Count the results by outcome."""
    found = Counter(result.outcome for result in results)
    return {outcome: found[outcome] for outcome in Outcome}


OK, SOME_FAILED, UNKNOWN_DEVICE, NOTHING_RAN = 0, 1, 4, 5
"""Exit statuses; 1, 4 (usage error) and 5 have pytest's meaning."""


def exit_status(results: Iterable[CaseResult]) -> int:
    """Return 0 if nothing failed and something ran, 1 if something failed, 5 if nothing ran (as pytest)."""
    found = counts(results)
    if any(n for outcome, n in found.items() if outcome.is_bad):
        return SOME_FAILED
    return OK if any(n for outcome, n in found.items() if outcome.ran) else NOTHING_RAN
