"""What a check found: one record for each case, device and mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any


class Outcome(str, Enum):
    """How a case ended; all but `FAILED` and `XPASSED` are good."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"

    @property
    def is_bad(self) -> bool:
        """Whether a run with such a case fails."""
        return self in (Outcome.FAILED, Outcome.XPASSED)

    @property
    def ran(self) -> bool:
        """Whether the device did something."""
        return self is not Outcome.SKIPPED


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a case.

    Attributes:
        mode: `test`, `support`, `perf` or `behaviour`.
        device: The device's name.
        family: The op or group of ops, or the kind of behaviour.
        id: The case, unique within mode and device.
        outcome: How it ended.
        reason: Why, unless it passed.
        nmse: The largest error of an output, where one was measured.
        time_s: Time that the case took [s]; in mode `perf`, one computation of the op.
        facts: Figures of the mode, by name.
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

    def told(self, outcome: Outcome, reason: str) -> Result:
        """Return the same case with another outcome."""
        return replace(self, outcome=outcome, reason=reason)

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON; facts beside the others."""
        fields = asdict(self)
        facts = fields.pop("facts")
        return {**fields, "outcome": self.outcome.value, **facts}


def counts(results: Iterable[Result]) -> dict[Outcome, int]:
    """Return how many cases ended in each way."""
    found = Counter(result.outcome for result in results)
    return {outcome: found[outcome] for outcome in Outcome}


OK, SOME_FAILED, UNKNOWN_DEVICE, NOTHING_RAN = 0, 1, 4, 5
"""Exit statuses; 1 and 5 are pytest's, and so is 4, for what it cannot make sense of."""


def exit_status(results: Iterable[Result]) -> int:
    """Return 0 if nothing failed and something ran, 1 if something failed, 5 if nothing ran (as pytest)."""
    found = counts(results)
    if any(n for outcome, n in found.items() if outcome.is_bad):
        return SOME_FAILED
    return OK if any(n for outcome, n in found.items() if outcome.ran) else NOTHING_RAN
