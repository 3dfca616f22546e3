"""Cases that are known to fail: lists that a backend ships, or that a file holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ggmlb.core.errors import ArgumentError
from ggmlb.interface import Device
from ggmlb.testing.results import Outcome, Result

PROC = "conformance_xfails"
"""What `BackendReg.get_proc_address` may give: a function of a device that returns `{pattern: reason}`."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A failure that is expected.

    Attributes:
        pattern: Regular expression that is looked for in `"<mode> <id>"`.
        reason: Why the case fails.
    """

    pattern: re.Pattern[str]
    reason: str


class ExpectedFailures:
    """A list of known failures; strict: a case of the list that passes is an error too."""

    def __init__(self, entries: Iterable[tuple[str, str]] = ()) -> None:
        self._entries = [Expected(_compiled(pattern), reason) for pattern, reason in entries]

    @classmethod
    def of(cls, device: Device, file: Path | None = None) -> ExpectedFailures:
        """Return the list of a device's backend, with that of a file.

        Raises:
            ArgumentError: The file cannot be read, or a pattern is no regular expression.
        """
        ask = device.reg.get_proc_address(PROC)
        shipped: Mapping[str, str] = ask(device) if ask is not None else {}
        return cls([*shipped.items(), *(_read(file) if file is not None else ())])

    def judge(self, result: Result) -> Result:
        """Return the result as it counts: an expected failure is `XFAILED`, a pass in its place `XPASSED`."""
        name = f"{result.mode} {result.id}"
        entry = next((e for e in self._entries if e.pattern.search(name)), None)
        if entry is None or not result.outcome.ran:
            return result
        if result.outcome is Outcome.FAILED:
            return result.told(Outcome.XFAILED, f"{entry.reason} ({result.reason})")
        told = f"it passes, but is expected to fail ({entry.reason})"
        return result.told(Outcome.XPASSED, f"{told}; take {entry.pattern.pattern!r} off the list")


def _read(file: Path) -> list[tuple[str, str]]:
    """Read a list: in each line a pattern, and its reason after ` # `; a line may begin with # as well."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArgumentError(f"cannot read the list of expected failures {file}: {error.strerror}") from error
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
        raise ArgumentError(f"{pattern!r} is no regular expression: {error}") from error
