"""Lists of known failures, shipped by a backend or read from a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ggmlb.core.errors import ArgumentError
from ggmlb.interface import Device
from ggmlb.testing.results import CaseResult, Outcome

PROC = "conformance_xfails"
"""Optional function of `BackendReg.get_proc_address`: a device's known failures, `{pattern: reason}`."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A known failure: a pattern that finds the cases, and the reason why they fail.

    Attributes:
        pattern: Regular expression to find in `"<mode> <id>"`.
        reason: Why the case fails.
    """

    pattern: re.Pattern[str]
    reason: str


class ExpectedFailures:
    """A strict list of known failures: a listed case that passes is an error."""

    def __init__(self, entries: Iterable[tuple[str, str]] = ()) -> None:
        self._entries = [Expected(_compiled(pattern), reason) for pattern, reason in entries]

    @classmethod
    def of(cls, device: Device, file: Path | None = None) -> ExpectedFailures:
        """Return the known failures that a device's backend ships, together with those in a file.

        Raises:
            ArgumentError: The file cannot be read, or a pattern is not a regular expression.
        """
        ask = device.reg.get_proc_address(PROC)
        shipped: Mapping[str, str] = ask(device) if ask is not None else {}
        return cls([*shipped.items(), *(_read(file) if file is not None else ())])

    def judge(self, result: CaseResult) -> CaseResult:
        """Return the result with an expected failure as `XFAILED`, an unexpected pass as `XPASSED`."""
        name = f"{result.mode} {result.id}"
        entry = next((e for e in self._entries if e.pattern.search(name)), None)
        if entry is None or not result.outcome.ran:
            return result
        if result.outcome is Outcome.FAILED:
            return result.with_outcome(Outcome.XFAILED, f"{entry.reason} ({result.reason})")
        told = f"it passes, but is expected to fail ({entry.reason})"
        return result.with_outcome(Outcome.XPASSED, f"{told}; remove {entry.pattern.pattern!r} from the list")


def _read(file: Path) -> list[tuple[str, str]]:
    """Read a list: in each line a pattern, ` # ` and the reason, or a comment that begins with #."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ArgumentError(f"cannot read the list of expected failures {file}: {why}") from error
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pattern, mark, reason = line.rpartition(" # ")
        if not mark or not pattern.strip() or not reason.strip():
            raise ArgumentError(
                f"{file}, line {number}: write 'PATTERN # reason', with the reason why it fails"
            )
        entries.append((pattern.strip(), reason.strip()))
    return entries


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ArgumentError(
            f"the expected failure {pattern!r} is not a regular expression: {error}"
        ) from error
