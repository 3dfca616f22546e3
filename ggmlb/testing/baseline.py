"""Baselines: measurements kept in a file, with which later ones are compared.

A measurement is the median of samples, taken in rounds at different times; its noise is the distance
between their quartiles, as a share of the median. A later one is slower if it lost more than is allowed, and
more than the noise of both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from ggmlb.core.errors import ArgumentError
from ggmlb.testing.about import About

TIMES: Final = ("s", "us")
"""Units of which less is better; of the others, rates, more is."""

SAME_FACTS: Final = ("description", "driver", "backend", "features")
"""Facts of a device that should not differ from the baseline's."""


ROUNDS: Final = 3
"""Number of times that a measurement is taken for a baseline, and at most before it counts as slower."""


class Timing(float):
    """A median time [s], with the samples that it is the median of."""

    samples: tuple[float, ...]

    def __new__(cls, samples: Iterable[float]) -> Timing:
        """Make it of samples [s]."""
        samples = tuple(samples)
        timing = super().__new__(cls, median(samples))
        timing.samples = samples
        return timing

    def __reduce__(self) -> tuple[Any, ...]:
        return Timing, (self.samples,)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of a device.

    Attributes:
        device: The device's name.
        name: What was measured: a case of mode `perf`, or a figure of `ggmlb bench`.
        unit: `s`, `us`, `GB/s` or `GFLOP/s`.
        samples: The values, of one or more rounds.
    """

    device: str
    name: str
    unit: str
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def noise(self) -> float:
        """Distance between the quartiles, as a share of the median."""
        if len(self.samples) < 3:
            return 0.0
        low, _, high = quantiles(self.samples)
        return (high - low) / self.value

    def together(self, other: Measured) -> Measured:
        """Return the measurement with the samples of another round."""
        return replace(self, samples=self.samples + other.samples)


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A measurement beside that of the baseline.

    Attributes:
        slowdown: The additional time, as a share of the baseline's; negative if it is faster.
        noise: Of both measurements together.
        verdict: `slower`, `faster`, `same`, or `unclear` if it lost more than is allowed, but not more
            than the noise.
    """

    before: Measured
    now: Measured
    slowdown: float
    noise: float
    verdict: str

    @property
    def text(self) -> str:
        """The change in one line."""
        word = "slower" if self.slowdown > 0 else "faster"
        return (
            f"{abs(self.slowdown):.1%} {word} than the baseline: {self.now.value:.4g} {self.now.unit}, "
            f"before {self.before.value:.4g} {self.before.unit} (noise {self.noise:.1%})"
        )


class Baseline:
    """Measurements of an earlier run.

    Args:
        run: Facts of the run, as `About.as_dict` has them.
        measured: The measurements.
    """

    def __init__(self, run: dict[str, Any], measured: Sequence[Measured]) -> None:
        self.run = run
        self._by_name = {(m.device, m.name): m for m in measured}

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Read a baseline.

        Raises:
            ArgumentError: The file cannot be read, or is no baseline.
        """
        try:
            data = json.loads(path.read_text("utf-8"))
            measured = [
                Measured(m["device"], m["name"], m["unit"], tuple(map(float, m["samples"])))
                for m in data["measured"]
            ]
            if not all(m.samples and min(m.samples) > 0 for m in measured):
                raise ValueError("a sample is not above 0")
            return cls(dict(data["run"]), measured)
        except OSError as error:
            raise ArgumentError(
                f"cannot read the baseline {path}: {error.strerror}; --save writes one"
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"{path} is no baseline ({error}); --save writes one") from None

    def change(self, now: Measured, fail_at: float = math.inf) -> SpeedChange | None:
        """Compare a measurement with that of the baseline; `None` if the baseline has none.

        Args:
            now: The measurement.
            fail_at: Allowed slowdown, as a share.
        """
        before = self._by_name.get((now.device, now.name))
        if before is None or before.unit != now.unit:
            return None
        ratio = now.value / before.value if now.unit in TIMES else before.value / now.value
        slowdown, noise = ratio - 1, before.noise + now.noise
        if slowdown > fail_at:
            verdict = "slower" if slowdown > noise else "unclear"
        else:
            verdict = "faster" if 1 / ratio - 1 > max(noise, min(fail_at, 0.05)) else "same"
        return SpeedChange(before, now, slowdown, noise, verdict)

    def differences(self, about: About) -> list[str]:
        """Return how machine and devices differ from the baseline's, as lines of text."""
        found = []
        if self.run.get("hostname") != about.hostname:
            found.append(f"the baseline is of host {self.run.get('hostname')}, this is {about.hostname}")
        for name, facts in about.devices.items():
            before = self.run.get("devices", {}).get(name, {})
            for fact in SAME_FACTS:
                if before and before.get(fact) != facts.get(fact):
                    found.append(
                        f"{name}: {fact} is {facts.get(fact)!r}, in the baseline {before.get(fact)!r}"
                    )
        return found

    def measured_again(
        self, now: Measured, allowed: float, again: Callable[[], Measured | None]
    ) -> tuple[Measured, SpeedChange | None]:
        """Compare a measurement; while it seems slower, take it `again`, at most `ROUNDS` times in all.

        Returns:
            The measurement with the samples of all rounds, and its change.
        """
        for _ in range(ROUNDS - 1):
            change = self.change(now, allowed)
            if change is None or change.verdict not in ("slower", "unclear"):
                return now, change
            other = again()
            now = now if other is None else now.together(other)
        return now, self.change(now, allowed)

    def missing(self, measured: Iterable[Measured]) -> list[str]:
        """Return names of the baseline's measurements of the same devices that are not repeated."""
        found = [(m.device, m.name) for m in measured]
        devices = {device for device, _ in found}
        return [f"{d} {name}" for d, name in self._by_name if d in devices and (d, name) not in found]


def save(path: Path, about: About, measured: Sequence[Measured]) -> None:
    """Write a baseline.

    Raises:
        ArgumentError: The file cannot be written.
    """
    records = [{**asdict(m), "value": m.value, "noise": m.noise} for m in measured]
    data = {"run": about.as_dict(), "measured": records}
    try:
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}; give another --save") from error


def share(text: str) -> float:
    """Parse `"10%"` or `"0.1"` into a share.

    Raises:
        ArgumentError: It is no positive number.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise ArgumentError(f"--fail-at {text}: give a share above 0, as 10% or 0.1")
    return value
