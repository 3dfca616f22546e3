"""CaseResult, the record of one case on one device in one mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any


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

    def with_outcome(self, outcome: Outcome, reason: str) -> CaseResult:
        """Return a copy with another outcome and reason."""
        return replace(self, outcome=outcome, reason=reason)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and facts of this result as a dictionary, for JSON."""
        fields = asdict(self)
        facts = fields.pop("facts")
        return {**fields, "outcome": self.outcome.value, **facts}


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
