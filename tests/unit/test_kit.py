"""The conformance kit itself: its table of cases, its verdicts, its reports and its pytest plugin."""

from __future__ import annotations

import csv
import io
import itertools
import json
import multiprocessing
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ggmlb import __version__
from ggmlb.backends.cpu.device import CpuDevice, CpuReg
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.errors import ArgumentError, BackendUnavailable, RegistryError
from ggmlb.core.sharding import SplitAxis
from ggmlb.interface.registry import device_by_name, load, unload
from ggmlb.testing.about import About, facts_of
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.claims import claims_not_run
from ggmlb.testing.devices import UnknownDeviceError, device_named, sharded_by_chance
from ggmlb.testing.forecast import about_minutes, forecast_s
from ggmlb.testing.formats import JunitReport, as_csv, as_json, as_junit
from ggmlb.testing.guarded import poison
from ggmlb.testing.names import device_names
from ggmlb.testing.page import page
from ggmlb.testing.results import NOTHING_RAN, OK, SOME_FAILED, CaseResult, Outcome, exit_status
from ggmlb.testing.run import ALL, Runner, Selection, known_ops, run_all, run_as_done, selections, tasks
from ggmlb.testing.xfail import ExpectedFailures
from tests.support.kit import CPU_REG
from tests.support.processes import python

# -- cases -----------------------------------------------------------------------------------------


def test_cases_are_the_same_in_every_process():
    program = "from ggmlb.testing.cases import *; print([c.id for f in FAMILIES for c in cases_of(f)])"
    runs = {python("-c", program).stdout for _ in range(2)}
    assert len(runs) == 1 and runs.pop()


def is_plain(case):
    """Whether all that a program computes with is contiguous, not empty, and somewhere longer than 1."""
    tensors = case.program.case().build().tensors.values()
    sized = all(t.n_elements > 0 for t in tensors) and any(t.ne[0] > 1 and t.n_rows > 1 for t in tensors)
    return sized and all(s.is_contiguous() for t in tensors for s in t.src if s is not None)


def short_types(case):
    """The types of its leafs that are neither float32 nor indices."""
    return {leaf.dtype for leaf in case.program.leafs} - {DType.F32, DType.I32, DType.I64}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_begins_with_its_plainest_case(family):
    first, *others = cases = cases_of(family)
    assert len({case.id for case in cases}) == len(cases) >= 5
    assert first.program.fn.endswith("_inplace") == family.endswith("_inplace")
    assert is_plain(first) or family in ("arange", "diag"), first.id  # whose tensors are one row
    assert not short_types(first) or all(short_types(case) for case in others), first.id


NO_CASE_YET = {"FLASH_ATTN_BACK"}  # computed by no backend, nor by ggml
"""Ops for which the kit has no family."""


def test_every_op_has_a_family():
    covered = {name.upper() for family in FAMILIES for case in cases_of(family) for name in case.ops}
    assert {op.value for op in set(Op) - NO_OPS} - covered == NO_CASE_YET


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
def test_poison_is_not_a_number_wherever_it_is_read(dtype):
    for start in (0, 2, 8, 30):
        bytes_ = poison(1024)[start : start + 512]
        assert np.isnan(bytes_.view(dtype)).all()
    words = poison(1024).view("<u2")
    assert (((words & 0x7F80) == 0x7F80) & ((words & 0x7F) != 0)).all()  # bfloat16


# -- selections and runs ---------------------------------------------------------------------------


def test_ops_are_chosen_by_function_op_or_family():
    for name in ("add", "ADD", "swiglu", "unary", "rope_multi", "cpy to blocks"):
        assert tasks(device_by_name("CPU"), Selection(ops=(name,))), name
    with pytest.raises(ArgumentError, match="did you mean 'mul_mat'"):
        Selection(ops=("mulmat",))
    with pytest.raises(ArgumentError, match="did you mean 'perf'"):
        Selection("pref")
    with pytest.raises(ArgumentError, match="not a regular expression"):
        Selection(pattern="(")


def test_a_pattern_and_a_limit_narrow():
    (task,) = tasks(device_by_name("CPU"), Selection(ops=("mul_mat",), pattern=r"q4_0.*\)$", limit=1))
    assert len(task.ids) == 1
    assert "q4_0" in task.ids[0]
    assert tasks(device_by_name("CPU"), Selection(pattern="no such case")) == []


def test_perf_names_ops_as_test_does():
    from ggmlb.testing import perf

    assert known_ops("perf") <= known_ops("test")
    for case in perf.CASES:
        (same,) = {c.op for c in cases_of(case.family) if case.op in c.ops}
        assert same == case.build(Context(), 1).op_desc(), case.id
        assert case.id.startswith(f"{case.op}("), case.id
    cpu = device_by_name("CPU")
    for name in ("soft_max_ext", "soft_max", "conv_2d", "CONV_2D", "unary", "im2col of two dimensions"):
        assert all(tasks(cpu, Selection(mode, (name,))) for mode in ("test", "support", "perf")), name
    assert tasks(cpu, Selection("perf", ("sqrt",))) == []  # an op, of which there is no case to measure


def test_processes_give_what_one_gives():
    work = tasks(device_by_name("CPU"), Selection(ops=("add", "sum", "rope"), limit=2))
    alone, shared = ([(r.id, r.outcome) for r in run_all(work, jobs)] for jobs in (1, 2))
    assert alone == shared
    assert len(alone) == 12  # "add" in two kinds of memory, "add of blocks", "add_cast", "sum", "rope"


def test_processes_share_all_but_perf():
    cpu = device_by_name("CPU")
    work = [task for one in selections(ALL, ("scale",), "", 1) for task in tasks(cpu, one)]
    assert [task.mode for task in work] == ["test", "support", "grad", "perf"]
    found = list(run_as_done([work[3], *work[:3]], 2))
    assert [i for i, _ in found][-1] == 0, "perf comes last, beside nothing"
    assert {r.outcome for _, r in found} == {Outcome.PASSED}


def test_a_run_that_is_left_ends_its_processes():
    before = set(multiprocessing.active_children())
    for _ in (run := run_as_done(tasks(device_by_name("CPU"), Selection()), 2)):
        break
    run.close()
    assert set(multiprocessing.active_children()) <= before


def test_ops_are_chosen_in_the_modes_that_have_them():
    assert [(s.mode, s.ops) for s in selections(ALL, ("order", "abs"), "", 0)] == [
        ("behaviour", ("order",)), ("test", ("abs",)), ("support", ("abs",)), ("grad", ("abs",)),
        ("perf", ("abs",)),
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match=r"no op 'ordr' in mode behaviour or .*mean 'order'"):
        selections(ALL, ("ordr",), "", 0)


def test_a_forecast_is_told_for_people():
    assert forecast_s(tasks(device_by_name("CPU"), Selection(ops=("abs", "neg")))) > 0 == forecast_s([])
    told = [about_minutes(60 * m) for m in (0.2, 1, 12.3, 150)]
    assert told == ["less than a minute", "about 1 minute", "about 12 minutes", "about 2.5 hours"]


def test_perf_measures(monkeypatch):
    from ggmlb.testing import perf

    monkeypatch.setattr(perf, "BATCH_S", 0.0)
    cpu = device_by_name("CPU")
    (case,) = (c for c in perf.CASES if c.id == "mul_mat(f32,f32;n=8)")
    result = perf.measure(cpu, case, perf.PeakRates(1.0, {"f32": 1e-6}))
    assert result.outcome is Outcome.PASSED
    assert result.facts["gflop_s"] == pytest.approx(2 * 2048 * 4096 * 8 / result.time_s / 1e9)
    nbytes = 4 * (2048 * 4096 + 8 * (2048 + 4096))
    assert result.facts["gb_s"] == pytest.approx(nbytes / result.time_s / 1e9)
    assert result.facts["limit"] == "product"


def test_perf_measures_products_with_weights_in_memory_made_for_them(monkeypatch):
    from ggmlb.testing import perf

    placed = []

    def time_node(device, ctx, node):
        weight = node.src[0].buffer
        placed.append(weight and weight.buft.name)
        return real(device, ctx, node)

    real = perf.time_node
    monkeypatch.setattr(perf, "BATCH_S", 0.0)
    monkeypatch.setattr(perf, "time_node", time_node)
    cpu = device_by_name("CPU")
    work = tasks(cpu, Selection("perf", ("mul_mat",), r"q[48]_0,f32;n=8\)"))
    assert [task.memory for task in work] == ["", "CPU_F32"]
    with Runner([cpu]) as runner:
        runner._rates["CPU"] = perf.PeakRates(1.0, {"f32": 1.0, "q8_0": 2.0})
        results = [r for task in work for r in runner.run(task)]
    names = [f"mul_mat({t},f32;n=8){where}" for where in ("", " in CPU_F32") for t in ("q4_0", "q8_0")]
    assert [(r.id, r.outcome) for r in results] == [(name, Outcome.PASSED) for name in names]
    assert placed == [None, None, "CPU_F32", "CPU_F32"]
    assert results[3].facts["memory"] == "CPU_F32"
    assert results[3].facts["product_type"] == "q8_0"


def test_perf_of_a_device_without_copy_or_product_has_no_limit(capsys):
    from rich.console import Console

    from ggmlb.cli.tables import print_results
    from ggmlb.testing import perf

    (case,) = (c for c in perf.CASES if c.id == "argmax(f32)")
    result = perf.measure(device_by_name("CPU"), case, perf.PeakRates(0.0, {}))
    assert (result.outcome, result.facts["limit"]) == (Outcome.PASSED, None)
    print_results(Console(width=80, highlight=False), [result])
    told = capsys.readouterr().out
    assert "% of" not in told
    assert "Measured limits: none" in told


def test_perf_skips_what_a_memory_does_not_take():
    from ggmlb.testing import perf

    cpu = device_by_name("CPU")
    (case,) = (c for c in perf.CASES if c.id == "get_rows(f16)")
    result = perf.measure(cpu, case.within("CPU_F32"), perf.PeakRates(1.0, {}))
    assert result.outcome is Outcome.SKIPPED
    assert "CPU_F32" in result.reason


def test_meta_devices_have_names():
    assert device_names("CPU, Meta(CPU,CPU) ,OpenCL0+CPU,") == ["CPU", "Meta(CPU,CPU)", "OpenCL0+CPU"]
    for name in ("Meta(CPU,CPU)", "meta(cpu, cpu)", "CPU+CPU"):
        assert device_named(name).name == "Meta(CPU,CPU)"
    assert device_named("cpu") is device_by_name("CPU")
    for name in ("Meta(CPU,GPU9)", "CPU+GPU9", "Meta(Meta(CPU,CPU),CPU)"):
        with pytest.raises(UnknownDeviceError, match="there is no device"):
            device_named(name)
    with pytest.raises(ArgumentError, match="0 devices"):
        device_named("Meta()")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("CPUU", "CPU"), ("Meta(CPU,CUD0)", "CUDA0"), ("CUDAO", "CUDA0"), ("OpneCL0", "OpenCL0"), ("", "")],
)
def test_a_mistyped_name_is_no_absent_card(name, meant):
    with pytest.raises(UnknownDeviceError, match=f"did you mean '{meant}'" if meant else "no backend"):
        device_named(name)


@pytest.mark.parametrize("name", ["CPU7", "CUDA77", "opencl99", "Meta(CPU,CUDA77)"])
def test_a_card_of_a_known_backend_is_absent(name):
    with pytest.raises((RegistryError, BackendUnavailable)) as caught:
        device_named(name)
    assert not isinstance(caught.value, UnknownDeviceError)


def test_weights_are_dealt_out_in_many_ways():
    tensors = [Context().new_tensor("q4_0", (32 * n, 7, 3), f"w{n}") for n in range(1, 60)]
    states = [sharded_by_chance(t, 3) for t in tensors]
    assert states == [sharded_by_chance(t, 3) for t in tensors]
    assert {int(s.axis) for s in states} == {0, 1, 2, int(SplitAxis.MIRRORED)}
    assert any(0 in s.segments[0] for s in states if s.is_cut)


def test_weights_lie_in_every_kind_of_memory():
    cpu = device_by_name("CPU")
    work = tasks(cpu, Selection(ops=("mul_mat",)))
    assert [task.memory for task in work] == ["", "CPU_F32"]
    assert all(i.endswith(" in CPU_F32") for i in work[1].ids)
    with Runner() as runner:
        results = [r for r in runner.run(work[1]) if r.outcome is not Outcome.SKIPPED]
    assert len(results) > 10
    assert all(r.outcome is Outcome.PASSED for r in results)


# -- verdicts and reports --------------------------------------------------------------------------


def result(outcome, id="add(f32[1])", reason="", **facts):
    return CaseResult("test", "CPU", "add", id, outcome, reason, 1e-9, 0.5, facts)


def test_exit_status():
    passed, failed, skipped = (result(o) for o in (Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED))
    assert exit_status([passed, skipped]) == OK
    assert exit_status([passed, failed]) == SOME_FAILED
    assert exit_status([skipped]) == exit_status([]) == NOTHING_RAN
    assert exit_status([passed, result(Outcome.XPASSED)]) == SOME_FAILED
    assert exit_status([result(Outcome.XFAILED)]) == OK


def test_expected_failures(tmp_path):
    file = tmp_path / "xfail.txt"
    file.write_text("# known\n\n^test add\\(f32 # the adder is broken, issue 7\n")
    known = ExpectedFailures.of(device_by_name("CPU"), file)
    failed = known.judge(result(Outcome.FAILED, reason="nmse 1"))
    assert (failed.outcome, failed.reason) == (Outcome.XFAILED, "the adder is broken, issue 7 (nmse 1)")
    passed = known.judge(result(Outcome.PASSED))
    assert passed.outcome is Outcome.XPASSED
    assert "from the list" in passed.reason
    for other in (result(Outcome.SKIPPED), result(Outcome.FAILED, "sub(f32[1])")):
        assert known.judge(other) is other
    file.write_text("^test add\n")
    with pytest.raises(ArgumentError, match="line 1: write 'PATTERN # reason'"):
        ExpectedFailures.of(device_by_name("CPU"), file)


def test_a_backend_may_ship_its_list():
    class Shipping:
        reg = type("Reg", (), {"get_proc_address": lambda self, name: lambda device: {"add": name}})()

    judged = ExpectedFailures.of(Shipping()).judge(result(Outcome.FAILED, reason="why"))
    assert judged.reason == "conformance_xfails (why)"


RESULTS = [
    result(Outcome.PASSED, gb_s=2.5),
    result(Outcome.FAILED, "add(f32[2])", 'a "quoted", <odd> reason\x01'),
    result(Outcome.SKIPPED, "add(f32[3])", "not supported"),
]


def test_json():
    told = json.loads(as_json(RESULTS))
    assert told["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "xfailed": 0, "xpassed": 0}
    assert told["results"][0]["gb_s"] == 2.5
    nan = json.loads(as_json([CaseResult("test", "CPU", "x", "y", Outcome.FAILED, "", float("nan"))]))
    assert nan["results"][0]["nmse"] == "nan"


def test_csv():
    rows = list(csv.DictReader(io.StringIO(as_csv(RESULTS))))
    assert [row["outcome"] for row in rows] == ["passed", "failed", "skipped"]
    assert [row["gb_s"] for row in rows] == ["2.5", "", ""]
    assert rows[1]["reason"].startswith('a "quoted"')


ABOUT = About(
    "thismachine",
    "2026-11-23T04:05:06+00:00",
    {"version": "1.2", "revision": "abc"},
    {"CPU": {"driver": "none", "type": "<&\x1b"}},
)


def test_junit():
    (suite,) = ElementTree.fromstring(as_junit(RESULTS, ABOUT))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.attrib.pop("timestamp"))
    assert suite.attrib.pop("hostname") == "thismachine"
    assert suite.attrib == {
        "name": "ggmlb.CPU.test", "tests": "3", "failures": "1", "skipped": "1", "errors": "0",
        "time": "1.500000",
    }  # fmt: skip
    properties, passed, failed, skipped = suite
    told = {p.attrib["name"]: p.attrib["value"] for p in properties}
    assert told == {"version": "1.2", "revision": "abc", "driver": "none", "type": "<&?"}
    assert list(passed) == []
    assert failed[0].tag == "failure"
    assert failed[0].attrib["message"] == 'a "quoted", <odd> reason?'
    assert skipped[0].tag == "skipped"


def test_a_page_holds_all_results_and_loads_nothing():
    odd = replace(RESULTS[1], reason="</script><script>alert(1)</script> & {{title}} \\u003c")
    text = page("A & B", as_json([*RESULTS, odd], ABOUT))
    assert "<h1>A &amp; B</h1>" in text
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    told = json.loads(data)
    assert told["run"]["hostname"] == "thismachine"
    assert [r["id"] for r in told["results"]] == [r.id for r in (*RESULTS, odd)]
    assert told["results"][-1]["reason"] == odd.reason
    assert text.count("</script>") == 2
    assert not re.search(r"https?:|src=|@import|url\(", text.replace(data, ""))


def test_a_report_tells_of_the_machine_and_the_device():
    about = About.here([device_by_name("CPU")])
    (suite,) = ElementTree.fromstring(as_junit(RESULTS, about))
    told = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
    names = ("version", "revision", "python", "platform", "device", "description", "backend", "driver")
    assert all(told[name] for name in names), told
    assert told["description"] == device_by_name("CPU").description
    assert suite.attrib["hostname"]
    told = json.loads(as_json(RESULTS, about))["run"]
    assert told["devices"]["CPU"]["description"] == device_by_name("CPU").description


def test_a_device_that_cannot_tell_its_driver_is_tested_all_the_same():
    class SilentReg:
        name = "Silent"

        def get_proc_address(self, name):
            return lambda of: 1 / 0

    class Silent:
        name, type, reg = "Silent0", device_by_name("CPU").type, SilentReg()
        description = property(lambda self: [][0])

    facts = facts_of(Silent())
    assert facts["description"] == "unknown: IndexError: list index out of range"
    assert facts["driver"] == facts["features"] == "unknown: ZeroDivisionError: division by zero"


def in_order_of_another(n):
    """Results of two devices and two modes, in the order in which several processes may give them."""
    made = [
        CaseResult(mode, device, "add", f"add({i})", Outcome(outcome), "why\n<not>", None, 1e3)
        for i, outcome in zip(range(n), itertools.cycle(("passed", "failed", "skipped", "xpassed")))
        for device in ("CPU", "Önd0")
        for mode in ("test", "support")
    ]
    return [made[i] for i in np.random.default_rng(n).permutation(len(made))]


@pytest.mark.parametrize("before", ["", "what a shell wrote\n"])
def test_a_junit_report_is_whole_after_each_result(tmp_path, before):
    file = tmp_path / "report.xml"
    results = in_order_of_another(12)
    with file.open("wb") as out:
        out.write(before.encode())
        report = JunitReport(out, ABOUT, len(results))
        for n, result in enumerate(results, 1):
            report.add(result)
            *suites, last = ElementTree.fromstring(file.read_bytes().removeprefix(before.encode()))
            assert sum(len(suite.findall("testcase")) for suite in suites) == n
            assert last.attrib["errors"] == "1"
            assert f"{n} of {len(results)} cases were done" in last[0][0].attrib["message"]
        report.close()
    told = ElementTree.fromstring(file.read_bytes().removeprefix(before.encode()))
    assert {suite.attrib["name"] for suite in told} == {
        f"ggmlb.{device}.{mode}" for device in ("CPU", "Önd0") for mode in ("test", "support")
    }
    for suite in told:
        cases = suite.findall("testcase")
        assert (int(suite.attrib["tests"]), len(cases)) == (12, 12)
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) == 6
        assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped")) == 3
    together = ElementTree.fromstring(as_junit(results, ABOUT).encode())
    for suite, same in zip(told, together, strict=True):
        assert suite.attrib.items() - same.attrib.items() <= {("timestamp", suite.attrib["timestamp"])}
    stopped = ElementTree.fromstring(as_junit(results, replace(ABOUT, unfinished="3 of 9")).encode())
    assert stopped[-1][0][0].attrib["message"] == "3 of 9"


# -- what a device claims --------------------------------------------------------------------------

NARROW = """
from ggmlb.backends.cpu.device import CpuDevice
from ggmlb.core.enums import Op

class Device(CpuDevice):
    name = "Narrow0"
    def declines(self, op):
        if op.op is Op.MUL and op.ne[0] != 256:
            return "rows are not of 256"
        return super().declines(op)
"""
NARROW += CPU_REG


@pytest.fixture
def narrow(tmp_path, monkeypatch):
    """The device `Narrow0`, which claims MUL in a form that no case has."""
    file = tmp_path / "narrow_backend.py"
    file.write_text(NARROW)
    monkeypatch.setenv("GGMLB_BACKEND_PATH", str(file))
    reg = load(file)
    yield reg.devices[0]
    unload(reg)


def test_an_op_that_is_claimed_and_not_computed_is_told(narrow):
    for mode in ("test", "support"):
        with Runner([narrow]) as runner:
            work = tasks(narrow, Selection(mode, ("add", "mul"), limit=2))
            results = [result for task in work for result in runner.run(task)]
        assert claims_not_run(narrow, results) == ["MUL"]
        assert claims_not_run(narrow, [r for r in results if r.family != "mul"]) == []


def test_an_op_that_is_claimed_and_has_no_case_is_told_after_a_run_of_all():
    class Boasting(CpuDevice):
        def declines(self, op):
            return None if op.op is Op.FLASH_ATTN_BACK else "not of mine"

    boasting = Boasting(CpuReg())
    assert claims_not_run(boasting, []) == []
    assert claims_not_run(boasting, [], whole=True) == ["FLASH_ATTN_BACK"]


def test_a_refusal_is_no_pass(narrow):
    with Runner([narrow]) as runner:
        (task,) = tasks(narrow, Selection("support", ("mul",), limit=2))
        results = list(runner.run(task))
    assert [(r.outcome, r.reason) for r in results] == 2 * [(Outcome.SKIPPED, "refused: rows are not of 256")]
    assert exit_status(results) == NOTHING_RAN


# -- the pytest plugin -----------------------------------------------------------------------------


def plugin(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Registered by hand, so that the tests need no installation; where there is one, only once.
    command = ["-m", "pytest", "-p", "no:ggmlb", "-p", "ggmlb_pytest", "-p", "no:cacheprovider"]
    command += ["-p", "no:hypothesispytest"]  # which takes longer to load than the kit
    return python(*command, "--pyargs", "ggmlb.testing", *args, cwd=cwd)


def test_the_plugin_makes_a_test_of_each_case(tmp_path):
    done = plugin(
        "-v", "--ggmlb-device", "CPU", "--ggmlb-ops", "mul_mat,plans", "--ggmlb-limit", "2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert "test_case[CPU-test-mul_mat(" in done.stdout
    assert (
        "test_case[CPU-behaviour-two_plans_do_not_mix]" in done.stdout
        or "CPU-behaviour-a_plan" in done.stdout
    )
    assert "10 passed" in done.stdout


def test_the_plugin_warns_of_nothing_and_tells_claims(narrow, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    args = ("--ggmlb-device", "Narrow0", "--ggmlb-ops", "add,mul", "--ggmlb-mode", "test")
    done = plugin(*args, "--ggmlb-limit", "1", "--junitxml", "report.xml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "Narrow0 claims MUL, of which no case was computed" in done.stdout
    report = ElementTree.parse(tmp_path / "report.xml")
    found = report.iter("property")
    assert {p.get("value") for p in found if p.get("name") == "ggmlb_device"} == {"Narrow0"}
    suite = {p.get("name"): p.get("value") for p in report.findall("testsuite/properties/property")}
    assert suite["ggmlb_version"] == __version__ and suite["Narrow0_backend"].startswith("Narrow")


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_the_plugin_leaves_other_tests_of_a_project_alone(workers, narrow, tmp_path):
    """Modules that are skipped or broken as a whole, and tests with properties of their own."""
    if workers:
        pytest.importorskip("xdist", reason="needs pytest-xdist: pip install 'ggmlb[test]'")
    (tmp_path / "test_skipped.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    (tmp_path / "test_own.py").write_text(
        "def test_it(request): request.node.user_properties += [('a', 1)]\n"
    )
    args = ("--ggmlb-device", "Narrow0", "--ggmlb-ops", "add,mul", "--ggmlb-mode", "test", *workers)
    done = plugin(*args, "--ggmlb-limit=1", "--continue-on-collection-errors", str(tmp_path), cwd=tmp_path)
    assert not done.stderr
    assert "Narrow0 claims MUL, of which no case was computed" in done.stdout
    assert re.search(r"\d passed, \d skipped, 1 error in", done.stdout.splitlines()[-1])


def test_the_plugin_imports_nothing_for_the_tests_of_others(tmp_path):
    (tmp_path / "test_own.py").write_text("""
def test_it():
    import sys
    assert "ggmlb_pytest" in sys.modules
    assert not [name for name in sys.modules if name.partition(".")[0] in ("ggmlb", "numpy")]
""")
    command = ("-m", "pytest", "-p", "no:ggmlb", "-p", "ggmlb_pytest", "-p", "no:hypothesispytest")
    done = python(*command, "test_own.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_plugin_skips_with_a_reason(tmp_path):
    done = plugin("-rs", cwd=tmp_path)
    assert done.returncode == 0
    assert "no device was named: give --ggmlb-device" in done.stdout
    done = plugin("-rs", "--ggmlb-device", "CPU9", cwd=tmp_path)
    assert "there is no device 'CPU9'" in done.stdout
    assert "1 skipped" in done.stdout
    assert plugin("--ggmlb-device", "CPU9", "--ggmlb-require", cwd=tmp_path).returncode != 0


def test_the_plugin_refuses_a_mistyped_device(tmp_path):
    done = plugin("--ggmlb-device", "CPU,OpneCL0", cwd=tmp_path)
    assert done.returncode == 2, "pytest's status for errors before any test"
    assert "did you mean 'OpenCL0'?" in done.stdout


def test_the_plugin_knows_expected_failures(tmp_path):
    (tmp_path / "xfail.txt").write_text("^test sum_rows # never mind\n")
    args = ("--ggmlb-device", "CPU", "--ggmlb-ops", "sum_rows", "--ggmlb-mode", "test", "--ggmlb-limit", "1")
    done = plugin(*args, "--ggmlb-xfail", "xfail.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert "it passes, but is expected to fail (never mind)" in done.stdout
