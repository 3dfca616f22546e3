"""Mode `behaviour`: checks of the interfaces' guarantees other than right values, one function each."""

from __future__ import annotations

from time import perf_counter

from ggmlb.interface import Device
from ggmlb.testing.behaviour import memory, order, plans, transfers, weights
from ggmlb.testing.behaviour.rig import CHECKS, Fault, NotApplicable, Rig
from ggmlb.testing.failure import traceback_of
from ggmlb.testing.results import CaseResult, Finding, Outcome

__all__ = ["CHECKS", "behaves", "memory", "order", "plans", "transfers", "weights"]


def behaves(device: Device, group: str, name: str) -> CaseResult:
    """Run the behaviour check `name` of a `group` on a device; return its result."""
    start = perf_counter()
    found = _found(device, group, name)
    return found.result("behaviour", device.name, group, name, perf_counter() - start)


def _found(device: Device, group: str, name: str) -> Finding:
    try:
        rig = Rig(device)
    except Exception as error:
        return Finding.failed(error, "no stream can be opened: ")
    found = _checked(rig, group, name)
    try:
        rig.close()
    except Exception as error:
        if found.outcome is not Outcome.FAILED:
            return Finding.failed(error, "what the check used cannot be freed: ")
    return found


def _checked(rig: Rig, group: str, name: str) -> Finding:
    promise = f". Promised: {' '.join((CHECKS[group][name].__doc__ or '').split())}"
    try:
        CHECKS[group][name](rig)
        return Finding(Outcome.PASSED)
    except NotApplicable as why:
        return Finding(Outcome.SKIPPED, str(why))
    except Fault as fault:
        return Finding(Outcome.FAILED, f"{fault}{promise}", None, traceback_of(fault), fault)
    except Exception as error:  # a backend may raise anything; the next check runs all the same
        return Finding.failed(error, after=promise)
