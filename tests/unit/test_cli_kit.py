"""`ggmlb test` and `ggmlb bench`, run as a CI runner runs them; and completion by the shell."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ggmlb import devices
from ggmlb.cli import main
from ggmlb.testing import perf
from ggmlb.testing.results import CaseResult, Outcome
from tests.support.processes import ROOT, python
from tests.support.processes import ggmlb_command as run

NO_TEXT = str(ROOT / "docs/images/split.png")
BROKEN = """
import os
from ggmlb.backends.cpu.device import CpuDevice, CpuReg
from ggmlb.backends.cpu.backend import CpuBackend
from ggmlb.core.enums import Op

class Stream(CpuBackend):
    def _compute(self, plan):
        status = super()._compute(plan)
        for node in plan.nodes:
            if node.op is Op.SQR and node.nbytes:
                node.buffer.base[node.offset + node.nbytes] ^= 1
            if node.op is Op.LOG:
                os._exit(3)
            if node.op is Op.COS and not os.path.exists(os.environ["GGMLB_TEST_ONCE"]):
                open(os.environ["GGMLB_TEST_ONCE"], "w").close()
                os._exit(3)
        return status

class Device(CpuDevice):
    name = "Broken0"
    def init_backend(self, params=None):
        return Stream(self, 1)

class Reg(CpuReg):
    name = "Broken"
    def __init__(self):
        super().__init__()
        self._devices = [Device(self)]
    devices = property(lambda self: self._devices)
    def get_proc_address(self, name):
        return {"conformance_xfails": lambda device: {"^test sqr_inplace": "one byte too many"}}.get(name)

def backend_reg():
    return Reg()
"""


DECLINES = """\
    def declines(self, op):
        return "not of mine" if op.op_desc() == "ABS" else super().declines(op)
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `Broken0` is a device: its SQR writes too far, its LOG ends the process."""
    path = tmp_path_factory.mktemp("backend") / "broken_backend.py"
    path.write_text(BROKEN)
    return {"GGMLB_BACKEND_PATH": str(path)}


def test_it_passes_and_says_so() -> None:
    done = run("test", "-d", "CPU", "-o", "add,rope", "--limit", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CPU test: 12 passed, 0 failed" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_fault_is_status_1_and_named(broken: dict[str, str]) -> None:
    done = run("test", "-d", "Broken0", "-o", "sqr", **broken)
    assert done.returncode == 1
    assert "FAILED sqr(" in done.stdout
    assert "guard bytes were overwritten, the first 0 bytes after the end of SQR" in done.stdout
    assert "xfailed" in done.stdout
    assert "FAILED sqr_inplace" not in done.stdout


def test_a_crash_ends_its_family_only(broken: dict[str, str]) -> None:
    done = run("test", "-d", "Broken0", "-o", "abs,log", "--limit", "2", "-j", "2", "--json", **broken)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert [(r["family"], r["outcome"]) for r in told["results"]] == [
        ("log", "failed"), ("log", "failed"), ("abs", "passed"), ("abs", "passed"),
    ]  # fmt: skip
    assert "a crash in the backend?" in told["results"][0]["reason"]


@pytest.mark.parametrize("name", ["CPU", "LLVM", "OpenCL0"])
def test_processes_end_in_silence(name: str) -> None:
    if name not in {device.name for device in devices()}:
        pytest.skip(f"there is no {name}")
    done = run("test", "-d", name, "-o", "add,mul", "--limit", "1", "-j", "2")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_crash_that_does_not_come_again_is_a_failure_too(broken: dict[str, str], tmp_path: Path) -> None:
    once = {**broken, "GGMLB_TEST_ONCE": str(tmp_path / "once")}
    done = run("test", "-d", "Broken0", "-o", "cos,abs", "--limit", "1", "-j", "2", "--json", **once)
    assert done.returncode == 1
    *ran, last = json.loads(done.stdout)["results"]
    assert [(r["family"], r["outcome"]) for r in ran] == [("cos", "passed"), ("abs", "passed")]
    assert (last["id"], last["outcome"]) == ("worker processes", "failed")
    assert "while 2 ran" in last["reason"]


@pytest.mark.parametrize(
    ("args", "status", "told"),
    [
        (["-d", "CPU9"], 5, "ggmlb: there is no device 'CPU9'"),
        (["-d", "GPU9"], 4, "ggmlb: there is no device 'GPU9', and no backend of that name"),
        (["-d", "CPU,OpneCL0"], 4, "did you mean 'OpenCL0'?"),
        (
            ["-d", "CPU", "-p", "no such case"],
            5,
            "nothing ran: no case is of these ops",
        ),
        (["-d", "CPU", "-o", "mulmat"], 2, "did you mean 'mul_mat'?"),
        (["-d", ","], 2, "--devices , names no device"),
        (["-d", "Meta()"], 2, "meta_device: 0 devices"),
        (["-d", "Meta(CPU,GPU9)"], 4, "ggmlb: there is no device 'GPU9'"),
        (["-d", "CPU", "--mode", "fast"], 2, "'fast' is not one of"),
        (["-d", "CPU", "--xfail", "/nowhere/list"], 1, "ggmlb: cannot read the list of expected failures"),
        (["-d", "CPU", "--xfail", NO_TEXT], 1, f"expected failures {NO_TEXT}: it is not UTF-8"),
    ],
)
def test_other_ends(args: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *args]) == status
    err = capsys.readouterr().err
    assert told in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_reports_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    args = ("-d", "CPU", "--mode", "behaviour", "-o", "plans")
    assert main(["test", *args, "--format", "junit", "--output", str(report)]) == 0
    assert "passed   plans/two_plans_do_not_mix" in capsys.readouterr().out
    (suite,) = ElementTree.parse(report).getroot()
    assert suite.attrib["name"] == "ggmlb.CPU.behaviour"
    assert int(suite.attrib["tests"]) >= 9


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize("redirected", [False, True], ids=["output", "stdout"])
@pytest.mark.parametrize(
    ("sent", "jobs", "status"),
    [(signal.SIGINT, 1, 130), (signal.SIGTERM, 1, 143), (signal.SIGKILL, 1, -9), (signal.SIGINT, 2, 130)],
)
def test_a_run_that_is_stopped_has_reported(
    sent: signal.Signals, jobs: int, status: int, redirected: bool, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "ggmlb", "test", "-d", "CPU", "-j", str(jobs), "--format", "junit"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with report.open("w") as out, (tmp_path / "err").open("w+") as err:
        command += [] if redirected else ["--output", str(report)]
        process = subprocess.Popen(
            command, env=env, stdout=out if redirected else subprocess.DEVNULL, stderr=err
        )
        while process.poll() is None and 'classname="ggmlb.CPU' not in report.read_text():
            time.sleep(0.1)
        process.send_signal(sent)
        assert process.wait() == status
        err.seek(0)
        told = err.read()
    *suites, unfinished = ElementTree.parse(report).getroot()
    n = sum(len(suite.findall("testcase")) for suite in suites)
    assert n >= 1
    (message,) = [error.attrib["message"] for error in unfinished.iter("error")]
    assert re.fullmatch(rf"the run was stopped: {n} of \d+ cases were done", message)
    assert told == ("" if sent == signal.SIGKILL else f"ggmlb: {message}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("format", ["junit", "json", "csv"])
def test_a_disk_that_is_full_is_told(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-d", "CPU", "-o", "abs", "--limit", "1", "--format", format, "--output", "/dev/full")
    assert main(["test", *args]) == 1
    assert "ggmlb: cannot write the report: No space left on device" in capsys.readouterr().err


def test_one_command_runs_all_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(perf, "BATCH_S", 0.0)
    report = tmp_path / "report.xml"
    args = ("-d", "CPU", "--mode", "all", "-o", "scale,plans", "--limit", "2")
    assert main(["test", *args, "--format", "junit", "--output", str(report)]) == 0
    suites = {
        suite.attrib["name"]: int(suite.attrib["tests"]) for suite in ElementTree.parse(report).getroot()
    }
    each = {"behaviour": 2, "test": 2, "support": 2, "grad": 2, "perf": 1}
    assert suites == {f"ggmlb.CPU.{mode}": n for mode, n in each.items()}
    told = capsys.readouterr().err
    counted = ", ".join(f"{n} of mode {mode}" for mode, n in each.items())
    assert f"ggmlb: 9 cases on CPU ({counted}): " in told
    assert told.startswith("ggmlb: listing the cases of ") and "minute" in told
    assert main(["test", *args, "--list"]) == 0
    assert "support scale(" in capsys.readouterr().out


def test_a_mode_in_which_nothing_ran_is_no_success(tmp_path: Path) -> None:
    lazy = tmp_path / "lazy_backend.py"
    lazy.write_text(BROKEN.replace("Broken", "Lazy").replace("    def init_b", DECLINES + "    def init_b"))
    done = run("test", "-d", "Lazy0", "--mode", "all", "-o", "abs,plans", GGMLB_BACKEND_PATH=str(lazy))
    assert done.returncode == 5, done.stderr
    assert "ggmlb: nothing ran in mode support: none of its" in done.stderr


def test_a_report_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ggmlb.cli.test._run", lambda *args: pytest.fail("the work was begun"))
    assert main(["test", "-d", "CPU", "--format", "json", "--output", str(tmp_path / "no/where.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_perf_as_csv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(perf, "BATCH_S", 0.0)
    assert main(["test", "-d", "CPU", "--mode", "perf", "-o", "argmax", "--format", "csv"]) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert row["id"] == "argmax(f32)"
    assert float(row["time_s"]) > 0
    assert float(row["gb_s"]) > 0
    assert row["limit"] == "copy"


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_of_perf_is_cut(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from ggmlb.cli.tables import print_results

    facts = {
        "size": "f32[4096,4096], f32[4096,512]",
        "gb_s": 1234.4,
        "gflop_s": 123456.7,
        "limit": "product",
        "percent_of_limit": 101.2,
        "copy_gb_s": 2345.6,
        "product_gflop_s": 234567.8,
        "product_type": "f16",
    }
    passed, took_s = Outcome.PASSED, 123.4e-6
    results = [
        CaseResult("perf", "Some0", of.op, of.id, passed, "", None, took_s, {**facts, "memory": of.memory})
        for case in perf.CASES
        for of in (case, case.within("Some0_Repacked"))
    ]
    why = "not supported: no kernel for SUM"
    results.append(CaseResult("perf", "Some0", "sum", "sum(f32)", Outcome.SKIPPED, why))
    print_results(Console(width=width, highlight=False), results)
    told = capsys.readouterr().out.splitlines()
    rows = [line for line in told if "% of product" in line]
    assert len(rows) == 2 * len(perf.CASES)
    assert all("123.4 us" in row and "1,234" in row and "123,457" in row for row in rows)
    assert not any("…" in line for line in told)
    assert "copy 2,346 GB/s, product 234,568 GFLOP/s (f16 weights)" in "\n".join(told)
    assert max(map(len, told)) <= width
    assert f"1 skipped: {why}" in "\n".join(told)


def test_ids_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-d", "CPU", "-o", "mul_mat", "-p", "iq1_m", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    n = len(lines) // 2
    assert n >= 2 and [line.endswith(" in CPU_F32") for line in lines] == [False] * n + [True] * n
    assert all(line.startswith("mul_mat(iq1_m[") for line in lines)


def test_pages_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(perf, "BATCH_S", 0.0)
    tested, measured = tmp_path / "test.html", tmp_path / "bench.html"
    assert main(["test", "-d", "LLVM", "-o", "sqr", "--html", str(tested)]) == 0
    assert "LLVM test: " in capsys.readouterr().out  # beside the table
    assert '"family": "sqr"' in tested.read_text() and "ggmlb test: LLVM" in tested.read_text()
    assert main(["bench", "-d", "CPU", "--html", str(measured)]) == 0
    assert '"name": "copy in its memory"' in measured.read_text()
    missing = tmp_path / "none" / "report.html"
    assert main(["bench", "-d", "CPU", "--html", str(missing)]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_bench_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(perf, "BATCH_S", 0.0)
    assert main(["bench", "-d", "CPU", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"]["devices"]["CPU"]["type"] == "CPU"
    (device,) = told["devices"]
    figures = {f["name"]: f for f in device["figures"]}
    assert device["name"] == "CPU"
    assert figures["copy in its memory"]["unit"] == "GB/s"
    assert figures["product, q4_0 weights, 512 columns"]["value"] > 0
    assert figures["host to device, pinned"]["value"] is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ggmlb te", ["test"]),
        ("ggmlb test -d CPU,OpenCL", ["CPU,OpenCL0"]),
        ("ggmlb test -o add,mul_mat", ["add,mul_mat", "add,mul_mat_id"]),
    ],
)
def test_the_shell_completes(line: str, told: list[str]) -> None:
    words = line.split()
    done = run(_GGMLB_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    assert set(told) <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize(
    "command",
    ["devices", "ops", "test", "bench", "compare", "embed", "generate", "chat", "perplexity", "demo", "env"],
)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "Examples:" in told
    assert f"ggmlb {command} " in told


def test_a_fault_of_ours_is_one_line() -> None:
    program = (
        "import sys, ggmlb.cli.app as app, ggmlb\n"
        "ggmlb.devices = lambda: [][0]\n"
        "sys.exit(app.run(sys.argv[1:]))\n"
    )
    for args, lines in ((["devices"], 1), (["devices", "--debug"], 5)):
        done = python("-c", program, *args)
        assert done.returncode == 1
        assert "IndexError: list index out of range" in done.stderr
        assert (len(done.stderr.splitlines()) == 1) == (lines == 1)
