"""Mode `behaviour`: checks of the interfaces' guarantees other than right values, one function each."""

from __future__ import annotations

from time import perf_counter

from ggmlb.core.errors import one_line
from ggmlb.interface import Device
from ggmlb.testing.behaviour import memory, order, plans, transfers, weights
from ggmlb.testing.behaviour.rig import CHECKS, Fault, NotApplicable, Rig
from ggmlb.testing.results import CaseResult, Outcome

__all__ = ["CHECKS", "behaves", "memory", "order", "plans", "transfers", "weights"]


def behaves(device: Device, group: str, name: str) -> CaseResult:
    """Run the behaviour check `name` of a `group` on a device; return its result."""
    start = perf_counter()
    outcome, reason = _outcome(device, group, name)
    return CaseResult("behaviour", device.name, group, name, outcome, reason, None, perf_counter() - start)


def _outcome(device: Device, group: str, name: str) -> tuple[Outcome, str]:
    try:
        rig = Rig(device)
    except Exception as error:
        return Outcome.FAILED, f"no stream can be opened: {one_line(error)}"
    outcome, reason = _checked(rig, group, name)
    try:
        rig.close()
    except Exception as error:
        if outcome is not Outcome.FAILED:
            return Outcome.FAILED, f"what the check used cannot be freed: {one_line(error)}"
    return outcome, reason


def _checked(rig: Rig, group: str, name: str) -> tuple[Outcome, str]:
    promise = " ".join((CHECKS[group][name].__doc__ or "").split())
    try:
        CHECKS[group][name](rig)
        return Outcome.PASSED, ""
    except NotApplicable as why:
        return Outcome.SKIPPED, str(why)
    except Fault as fault:
        return Outcome.FAILED, f"{fault}. Promised: {promise}"
    except Exception as error:  # a backend may raise anything; the next check runs all the same
        return Outcome.FAILED, f"it raised {one_line(error)}. Promised: {promise}"
