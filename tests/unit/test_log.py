"""Log records: silent by default, and with a level what happened and how long it took."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import ggmlb
from ggmlb.system import log, progress
from ggmlb.system.env import extended
from ggmlb.testing.fake import FakeReg

F32 = ggmlb.DType.F32


def run(code: str, level: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", code]
    return subprocess.run(
        program, capture_output=True, text=True, check=True, env=extended({"GGMLB_LOG": level})
    )


COMPUTES = """
import sys, ggmlb
ctx = ggmlb.Context()
node = ctx.scale(ctx.new_tensor(ggmlb.DType.F32, (4,)), 2.0)
with ggmlb.init_by_name("CPU") as cpu, ggmlb.Scheduler([cpu]) as scheduler:
    scheduler.graph_compute(ggmlb.Graph().build_forward_expand(node))
"""


def test_nothing_is_shown_nor_logging_imported_by_default() -> None:
    done = run(COMPUTES + "assert 'logging' not in sys.modules")
    assert (done.stdout, done.stderr) == ("", "")


def test_nothing_is_shown_where_a_program_imports_logging() -> None:
    assert run("import logging\n" + COMPUTES).stderr == ""


def test_a_level_shows_records_on_stderr() -> None:
    told = run(COMPUTES, "debug").stderr
    for text in (
        "ggmlb.devices: CPU opened in ",
        "ggmlb.scheduler: 1 nodes split in ",
        "ggmlb.plans: CPU: plan of 1 nodes in ",
    ):
        assert text in told
    assert "plan of" not in run(COMPUTES, "info").stderr


def test_an_unknown_level_is_told() -> None:
    assert "GGMLB_LOG is 'loud', which is no level; give debug" in run("import ggmlb", "loud").stderr


def test_a_plan_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ctx = ggmlb.Context()
    graph = ggmlb.Graph().build_forward_expand(ctx.scale(ctx.new_tensor(F32, (4,)), 2.0))
    caplog.set_level(logging.DEBUG, "ggmlb")
    with ggmlb.init_by_name("CPU") as cpu, ggmlb.Scheduler([cpu]) as scheduler:
        for _ in range(3):
            scheduler.graph_compute(graph)
    names = [record.name for record in caplog.records]
    assert names.count("ggmlb.plans") == names.count("ggmlb.scheduler") == 1


def test_a_fallback_is_told_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    def declines(op: ggmlb.Tensor) -> str | None:
        return "no kernel for SQRT" if op.op is ggmlb.Op.SQRT else None

    ctx = ggmlb.Context()
    x = ctx.new_tensor(F32, (4,))
    graph = ggmlb.Graph().build_forward_expand(ctx.sqrt(ctx.scale(ctx.sqrt(x), 2.0)))
    fake = FakeReg(1, declines=declines).devices[0]
    backends = [fake.init_backend(), ggmlb.init_by_name("CPU")]
    caplog.set_level(logging.INFO, "ggmlb.scheduler")
    with ggmlb.Scheduler(backends) as scheduler:
        scheduler.split_graph(graph)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"{fake.name} declines sqrt_0, sqrt_2: no kernel for SQRT; on CPU instead"]


def test_a_failure_is_told_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ggmlb")
    with pytest.raises(ZeroDivisionError), log.timed("devices", log.INFO, "%s opened", "X\x1b0"):
        raise ZeroDivisionError("zero")
    assert [r.getMessage() for r in caplog.records] == ["X\\x1b0 opened failed: ZeroDivisionError: zero"]


def test_kernels_are_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ggmlb"):
        with progress.task("X0: compiling kernels") as task:
            task.step("one")
            task.step("two")
        with progress.task("X0: compiling kernels"):
            pass  # nothing was missing
    (record,) = caplog.records
    assert record.name == "ggmlb.kernels"
    assert record.getMessage().startswith("X0: compiling kernels: 2 in ")
