"""The conformance kit in pytest, one test for each case; `ggmlb_pytest` has its options and registers it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ggmlb.core.errors import BackendUnavailable, Error, RegistryError
from ggmlb.testing.names import device_names

if TYPE_CHECKING:
    from ggmlb.testing.results import CaseResult
    from ggmlb.testing.run import FamilyTask, Runner
    from ggmlb.testing.xfail import ExpectedFailures

MODES = "test,support,behaviour"
FACTS = ("mode", "device", "family", "case")
"""Properties of a test's report, prefixed with `ggmlb_`, that identify the case."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate a test for every case that the options select."""
    if "ggmlb_case" not in metafunc.fixturenames:
        return
    from ggmlb.testing.devices import UnknownDeviceError, device_named
    from ggmlb.testing.run import declined_as_a_whole

    config = metafunc.config
    names = device_names(config.getoption("--ggmlb-device") or "")
    params = []
    for name in names:
        try:
            tasks = _tasks(config, name)
        except UnknownDeviceError as error:  # mistyped: never skipped like an absent card
            raise pytest.UsageError(f"--ggmlb-device {name}: {error}") from None
        except (RegistryError, BackendUnavailable) as error:
            if config.getoption("--ggmlb-require"):
                raise pytest.UsageError(f"--ggmlb-device {name}: {error}") from None
            why = " ".join(str(error).split())
            params.append(pytest.param(None, id=f"{name}", marks=pytest.mark.skip(reason=why)))
            continue
        device = device_named(name)
        for task in tasks:
            if declined_as_a_whole(device, task):
                label = f"{name}-{task.mode}-{task.family} ({len(task.ids)} cases)"
                params.append(pytest.param((task, ""), id=label))
                continue
            params += [pytest.param((task, i), id=f"{name}-{task.mode}-{i}") for i in task.ids]
    if not names:
        skip = pytest.mark.skip(reason="no device was named: give --ggmlb-device; 'ggmlb devices' lists them")
        params = [pytest.param(None, id="no-device", marks=skip)]
    metafunc.parametrize("ggmlb_case", params)


@pytest.fixture(scope="session")
def ggmlb_runner() -> Iterator[Runner]:
    """Session fixture that runs cases, with one stream on each device."""
    from ggmlb.testing.run import Runner

    with Runner(keep_errors=True) as runner:
        yield runner


@pytest.fixture(scope="session")
def ggmlb_xfails(pytestconfig: pytest.Config) -> Callable[[str], ExpectedFailures]:
    """Session fixture: function that returns the known failures of a named device."""
    from ggmlb.testing.devices import device_named
    from ggmlb.testing.xfail import ExpectedFailures

    file = pytestconfig.getoption("--ggmlb-xfail")
    return cache(lambda name: ExpectedFailures.of(device_named(name), file and Path(file)))


def run_case(
    runner: Runner,
    xfails: Callable[[str], ExpectedFailures],
    case: tuple[FamilyTask, str],
    item: pytest.Item,
) -> CaseResult:
    """Run one case; skip, xfail or fail the pytest test by its outcome.

    An error of the device is raised again, so that `--pdb` begins in its code; for wrong values, `--pdb`
    begins here, where `got` and `expected` are arrays.

    Args:
        runner: Runs the case.
        xfails: Known failures, by the device's name.
        case: The task and its case; all its cases, declined as a whole, if empty.
        item: The test. Its `user_properties` get the device and figures. (`record_property` warns with
            `--junitxml`, which a project may turn into an error.)
    """
    from dataclasses import replace

    from ggmlb.testing.failure import WrongValuesError, own_traceback
    from ggmlb.testing.results import Outcome

    task, name = case
    results = [
        xfails(task.device).judge(r) for r in runner.run(replace(task, ids=(name,) if name else task.ids))
    ]
    result = next((r for r in results if r.outcome is not Outcome.SKIPPED), results[0])
    if not name and result.outcome is Outcome.SKIPPED:
        result = replace(result, reason=f"declined as a whole: {result.reason}")
    facts = {
        **dict(zip(FACTS, (task.mode, task.device, task.family, result.id), strict=True)),
        **result.facts,
    }
    facts |= {"at": result.at} if result.at else {}
    item.user_properties += [(f"ggmlb_{fact}", value) for fact, value in facts.items()]
    if result.outcome is Outcome.SKIPPED:
        pytest.skip(result.reason)
    if result.outcome is Outcome.XFAILED:
        pytest.xfail(result.reason)
    if result.outcome.is_bad:
        detail, program = result.detail, result.program
        error = result.error
        if isinstance(error, WrongValuesError):
            got, expected = error.got, error.expected  # noqa: F841
        elif error is not None and result.outcome is Outcome.FAILED:
            __tracebackhide__ = True
            item.add_report_section("call", "ggmlb", f"{result.reason}\n\n{program}")
            raise error.with_traceback(own_traceback(error))
        pytest.fail("\n\n".join(filter(None, (result.reason, detail, program))), pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add versions and devices to the properties of the suite in the report of `--junitxml`."""
    from ggmlb.testing.about import About
    from ggmlb.testing.devices import device_named

    reports = [p for p in session.config.pluginmanager.get_plugins() if hasattr(p, "add_global_property")]
    if not reports:
        return
    devices = []
    for name in device_names(session.config.getoption("--ggmlb-device") or ""):
        with suppress(Error):  # it is missing: its test was skipped
            devices.append(device_named(name))
    about = About.here(devices)
    facts = {f"ggmlb_{name}": value for name, value in about.software.items()}
    facts |= {f"{d}_{name}": value for d, of in about.devices.items() for name, value in of.items()}
    for report in reports:
        for name, value in facts.items():
            report.add_global_property(name, value)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report the ops that a device claims but of which no case was computed; in GitHub Actions, annotate."""
    from ggmlb.testing.claims import warnings
    from ggmlb.testing.devices import device_named
    from ggmlb.testing.github import failure_annotations
    from ggmlb.testing.results import CaseResult, Outcome

    outcomes = {"passed": Outcome.PASSED, "failed": Outcome.FAILED, "xfailed": Outcome.XFAILED}
    results = []
    for kind in (*outcomes, "skipped"):
        for report in terminalreporter.getreports(kind):
            facts = dict(getattr(report, "user_properties", ()))  # a module's own report has none
            if "ggmlb_case" in facts:
                mode, device, family, case = (facts[f"ggmlb_{of}"] for of in FACTS)
                outcome, told = outcomes.get(kind, Outcome.SKIPPED), ("", "")
                if outcome is Outcome.FAILED:
                    told = (str(report.longreprtext).strip(), str(facts.get("ggmlb_at", "")))
                results.append(CaseResult(mode, device, family, case, outcome, told[0], at=told[1]))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in failure_annotations(results):
            terminalreporter.write_line(line)
    devices = [device_named(name) for name in dict.fromkeys(result.device for result in results)]
    for line in warnings(devices, results):
        terminalreporter.write_line(f"ggmlb: {line}", yellow=True)


def _tasks(config: pytest.Config, name: str) -> list[FamilyTask]:
    from ggmlb.core.errors import ArgumentError
    from ggmlb.testing.devices import device_named
    from ggmlb.testing.run import selections, tasks

    device = device_named(name)
    modes = device_names(config.getoption("--ggmlb-mode") or MODES)
    ops = device_names(config.getoption("--ggmlb-ops"))
    try:
        chosen = selections(modes, ops, "", config.getoption("--ggmlb-limit"))
    except ArgumentError as error:
        raise pytest.UsageError(f"--ggmlb-mode, --ggmlb-ops: {error}") from None
    return [task for selection in chosen for task in tasks(device, selection)]
