"""Cases shared among processes, what happens to each, and lines that tell how far it is."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

OK, FAILED, UNSUPPORTED, UNJUDGED = "OK", "failed", "not supported", "not supported by ggml's reference"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to a case: one of the four statuses above, and what was printed about it."""

    case: str
    status: str
    detail: str = ""


U = TypeVar("U", contravariant=True)


class Worker(Protocol[U]):
    """Runs cases in a process of its own, which is started anew when a case ends it."""

    def run(self, unit: U, /) -> Iterator[Outcome]:
        """Run one case or several, and give the outcomes as they come."""

    def close(self) -> None:
        """End the process."""


def run(
    start: Callable[[], Worker[U]],
    units: Iterable[U],
    n_workers: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run cases in several processes.

    Args:
        start: Makes a worker.
        units: What a worker is given at a time.
        n_workers: Processes.
        tell: Called with each outcome as it comes, by one thread at a time.
    """
    waiting: SimpleQueue[U] = SimpleQueue()
    for unit in units:
        waiting.put(unit)
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def work(_: int) -> None:
        with closing(start()) as worker:
            while True:
                try:
                    unit = waiting.get_nowait()
                except Empty:
                    return
                for outcome in worker.run(unit):
                    with lock:
                        outcomes.append(outcome)
                        tell(outcome)

    with ThreadPoolExecutor(n_workers) as pool:
        list(pool.map(work, range(n_workers)))
    return outcomes


class Progress:
    """Prints a line now and then: how many cases are done, and how they went. A file gets every outcome."""

    def __init__(self, device: str, total: int, report: Path, every_s: float = 15) -> None:
        self._device, self._total, self._every_s = device, total, every_s
        report.parent.mkdir(parents=True, exist_ok=True)
        self._report = report
        report.write_text("", encoding="utf-8")
        self._began = self._told = time.monotonic()
        self.counts: Counter[str] = Counter()

    def __call__(self, outcome: Outcome) -> None:
        """Count an outcome; a failure is printed at once."""
        self.counts[outcome.status] += 1
        at_s = round(time.monotonic() - self._began, 3)
        with self._report.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(outcome), "at_s": at_s}) + "\n")
        if outcome.status == FAILED:
            print(f"{self._device}: FAILED {outcome.case}: {outcome.detail[-1500:]}", flush=True)
        if (now := time.monotonic()) - self._told > self._every_s:
            self._told = now
            print(f"{self} [{now - self._began:.0f} s]", flush=True)

    def __str__(self) -> str:
        c, done = self.counts, self.counts.total()
        said = ", ".join(f"{c[status]:,} {status}" for status in (OK, FAILED, UNSUPPORTED, UNJUDGED))
        return f"{self._device}: {done:,} of {self._total:,} cases: {said}"
