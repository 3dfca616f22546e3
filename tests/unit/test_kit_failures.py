"""Failing cases of the kit: traceback, wrong elements and program, in table, JSON, JUnit and pytest."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb.core.errors import ArgumentError
from ggmlb.interface import Device
from ggmlb.interface.registry import device_by_name, load, unload
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.compute import Bench, _expected
from ggmlb.testing.failure import leaf_data, program_of
from ggmlb.testing.programs import compare_bytes
from ggmlb.testing.run import Runner, Selection, tasks
from ggmlb.testing.wrong import of_floats, pattern
from tests.meta.broken import values
from tests.support.kit import CPU_REG
from tests.support.processes import ROOT, python
from tests.support.processes import ggmlb_command as run

FAULTY = """
import numpy as np
from ggmlb.backends.cpu.device import CpuDevice
from ggmlb.backends.cpu.backend import CpuBackend
from ggmlb.core.enums import Op
from ggmlb.core.errors import BackendError

def reshaped(node):
    return np.zeros(7).reshape(3, 3)

class Stream(CpuBackend):
    def _compute(self, plan):
        status = super()._compute(plan)
        for node in plan.nodes:
            if node.op in (Op.LOG, Op.ARGMAX):
                reshaped(node)
            if node.op is Op.SQR and node.nbytes:
                floats = node.buffer.base[node.offset : node.offset + node.nbytes].view(np.float32)
                floats.reshape(node.ne[::-1])[..., -3:] = 7
            if node.op is Op.MEAN:
                try:
                    reshaped(node)
                except ValueError as error:
                    raise BackendError("no mean") from error
        return status

class Device(CpuDevice):
    name = "Faulty0"
    def init_backend(self, params=None):
        return Stream(self, 1)
    def declines(self, op):
        if op.op is Op.COS:
            raise KeyError("no such op")
        return super().declines(op)
"""
FAULTY += CPU_REG


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faulty") / "faulty_backend.py"
    path.write_text(FAULTY)
    return path


@pytest.fixture
def faulty(file: Path):
    """Its LOG, ARGMAX, MEAN and `declines` of COS raise; its SQR is wrong at the end of rows."""
    reg = load(file)
    yield reg.devices[0]
    unload(reg)


def result_of(device: Device, op: str, mode: str = "test", keep_errors: bool = False):
    with Runner([device], keep_errors=keep_errors) as runner:
        (task,) = tasks(device, Selection(mode, (op,), limit=1))[:1]
        (result,) = runner.run(task)
    return result


# -- tracebacks ------------------------------------------------------------------------------------


def test_a_traceback_leads_into_the_code_of_the_device(faulty, file):
    line = FAULTY.splitlines().index("    return np.zeros(7).reshape(3, 3)") + 1
    result = result_of(faulty, "log")
    where = f"({file.parent.name}/{file.name}:{line}, in reshaped)"
    assert result.reason == f"it raised ValueError: cannot reshape array of size 7 into shape (3,3) {where}"
    files = [text for text in result.detail.splitlines() if text.startswith("  File ")]
    assert [text.split(", in ")[1] for text in files] == ["_compute", "reshaped"]
    assert f'"{file}", line {line}' in files[-1]
    assert result.error is None, "its traceback would hold memory"


def test_causes_are_told(faulty):
    result = result_of(faulty, "mean")
    assert "ValueError: cannot reshape" in result.detail
    assert "direct cause of the following exception" in result.detail
    assert "BackendError: no mean" in result.reason


def test_debug_shows_the_frames_of_ggmlb(faulty, monkeypatch):
    monkeypatch.setenv("GGMLB_DEBUG", "1")
    assert "in graph_compute" in result_of(faulty, "log").detail


@pytest.mark.parametrize("mode", ["test", "support"])
def test_declines_that_raises_fails_its_cases(mode, faulty):
    result = result_of(faulty, "cos", mode)
    assert "declines() must answer, but it raised KeyError: 'no such op' (" in result.reason
    assert "in declines" in result.detail


def test_errors_are_kept_on_demand(faulty):
    assert isinstance(result_of(faulty, "log", keep_errors=True).error, ValueError)


@pytest.mark.parametrize("mode", ["grad", "perf"])
def test_other_modes_have_tracebacks_too(mode, faulty, monkeypatch):
    monkeypatch.setattr("ggmlb.testing.perf.measure_rates", lambda device: None)
    result = result_of(faulty, "log" if mode == "grad" else "argmax", mode)
    assert "in reshaped" in result.detail


# -- values ----------------------------------------------------------------------------------------


def test_wrong_elements_are_told(faulty):
    result = result_of(faulty, "sqr")
    ne = cases_of("sqr")[0].program.leafs[0].ne
    first, number, largest = result.detail.splitlines()
    assert first.startswith(f"first wrong element: [{ne[0] - 3}, 0]: expected ")
    assert first.endswith("got 7")
    n = 3 * ne[1]
    assert number == (
        f"wrong elements: {n} of {ne[0] * ne[1]}, "
        f"the tail of each row: i0 = {ne[0] - 3} to {ne[0] - 1} (the last 3 of {ne[0]})"
    )
    assert largest.startswith("largest error: ")


def mask(*at: object) -> np.ndarray:
    """A mask of [40, 16, 3] elements, in NumPy's order."""
    wrong = np.zeros((1, 3, 16, 40), np.bool_)
    wrong[(0, *at)] = True
    return wrong


ALL = slice(None)
PATTERNS = [
    (mask(), "all"),
    (mask(1, 2, 3), "only this one"),
    (mask(ALL, ALL, slice(37, None)), "the tail of each row: i0 = 37 to 39 (the last 3 of 40)"),
    (mask(ALL, ALL, slice(4, 8)), "in each row: i0 = 4 to 7"),
    (mask(ALL, ALL, slice(1, None, 2)), "in each row: i0 % 2 = 1"),
    (mask(ALL, slice(5, 7)), "whole rows: i1 = 5 to 6"),
    (mask(2), "whole matrices: i2 = 2 (the last 1 of 3)"),
    (mask(1, slice(8, 16), slice(16, 32)), "a tile: i0 = 16 to 31, i1 = 8 to 15 (the last 8 of 16), i2 = 1"),
    (mask(1, slice(3, 5), slice(1, 4)), "a block: i0 = 1 to 3, i1 = 3 to 4, i2 = 1"),
    (np.arange(1920).reshape(1, 3, 16, 40) >= 1900, "the tail: the last 20 elements in succession"),
    (
        abs(np.arange(1920).reshape(1, 3, 16, 40) - 100) < 30,
        "59 elements in succession, from number 71 on",
    ),
    (mask([0, 2], [1, 3], [5, 7]), "scattered: i0 5 to 7, i1 1 to 3, i2 0 to 2"),
]


@pytest.mark.parametrize(("wrong", "told"), PATTERNS, ids=[told for _, told in PATTERNS])
def test_a_pattern_has_a_name(wrong, told):
    assert pattern(wrong) == told or pattern(wrong).startswith(f"{told}:")


def test_an_element_is_wrong_if_the_mean_is():
    """However the error is spread, at least one element is named."""
    random = np.random.default_rng(1)
    expected = random.normal(size=(1, 1, 9, 33))
    for size in (1, 297):
        error = np.zeros(297)
        error[random.permutation(297)[:size]] = random.normal(size=size)
        error *= np.sqrt(2e-7 * np.mean(expected**2) / np.mean(error**2))
        assert of_floats(expected + error.reshape(expected.shape), expected, 1e-7).wrong.any()


def test_what_is_nan_or_infinite_is_wrong():
    expected = np.array([[[[1, np.inf, -np.inf, 3, 4]]]])
    got = np.array([[[[1, np.inf, np.inf, np.nan, 4]]]])
    found = of_floats(got, expected, 1e-7)
    assert found.wrong.reshape(-1).tolist() == [False, False, True, True, False]
    assert "expected -inf, got inf" in found.text
    assert "largest error" not in found.text


def test_memory_that_was_not_written_is_named():
    result = result_of(values.computing(values.LastElementMissing), "soft_max_ext")
    assert "NaNs have the bytes of memory that was not written" in result.detail


def test_wrong_blocks_are_told():
    case = cases_of("cpy to blocks")[0]
    data = np.arange(2 * 18, dtype=np.uint8)
    made = case.program.case("", [(2, (32, 2, 1, 1), data.tobytes())])
    wrong = data.copy()
    wrong[20] = 9
    verdict = compare_bytes(replace(made, nmse=0.0, rule=""), case.program.outputs[0], wrong)
    assert verdict.reason == "1 of 2 blocks differ; they must be equal"
    assert "first wrong block: [0, 1]: expected 12 13 14" in verdict.difference.text


# -- the case as a program -------------------------------------------------------------------------


def test_the_program_of_a_case_computes_the_case():
    with Bench(device_by_name("CPU")) as bench:
        for family in FAMILIES:
            case, names = cases_of(family)[0], dict[str, Any]()
            with contextlib.redirect_stdout(io.StringIO()), np.errstate(invalid="ignore"):
                exec(compile(program_of("CPU", case), case.id, "exec"), names)
            expected = _expected(bench.reference, bench._memory, case).outputs[0]
            got = names["computed"]("CPU")
            if not expected.dtype.is_quantized:
                same = expected.data.view(got.dtype).reshape(got.shape)
                np.testing.assert_array_equal(got, same, err_msg=case.id)


def test_the_program_of_a_failure_shows_the_failure(faulty, file, tmp_path):
    result = result_of(faulty, "sqr")
    (tmp_path / "program.py").write_text(result.program)
    done = python("program.py", cwd=tmp_path, GGMLB_BACKEND_PATH=str(file))
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.replace("]", "").split("\n")[-2].split()
    assert float(last) > 1, "the last element is wrong"
    again = result_of(faulty, "log", "grad").program
    (tmp_path / "program.py").write_text(again)
    done = python("program.py", cwd=tmp_path, GGMLB_BACKEND_PATH=str(file))
    assert done.stdout.startswith("failed it raised ValueError"), done.stderr


def test_data_of_an_unknown_case_is_an_error():
    with pytest.raises(ArgumentError, match="the kit has no case 'x' of family 'add'"):
        leaf_data("add", "x")


# -- where it is told ------------------------------------------------------------------------------


def test_the_command_tells(file, tmp_path):
    env = {"GGMLB_BACKEND_PATH": str(file)}
    args = ("test", "-d", "Faulty0", "-o", "log,abs", "--limit", "1")
    brief = run(*args, **env)
    assert brief.returncode == 1
    assert "in reshaped)" in brief.stdout and "Traceback" not in brief.stdout
    assert brief.stderr.startswith("ggmlb: the first failure; the run goes on\nFAILED log(")
    assert "Traceback" in brief.stderr and "def computed(device):" in brief.stderr
    verbose = run(*args, "-v", "--quiet", **env)
    assert "  Traceback (most recent call last)" in verbose.stdout and not verbose.stderr
    assert "in graph_compute" not in verbose.stdout
    assert "in graph_compute" in run(*args, "--debug", **env).stdout
    shared = run(*args, "-j", "2", "--json", **env)
    (failed,) = [r for r in json.loads(shared.stdout)["results"] if r["outcome"] == "failed"]
    assert "in reshaped" in failed["detail"] and "ctx.log(x0)" in failed["program"]
    report = tmp_path / "report.xml"
    run(*args, "--format", "junit", "--output", str(report), **env)
    (failure,) = ElementTree.parse(report).iter("failure")
    assert "in reshaped" in failure.text and "ctx.log(x0)" in failure.text
    assert "\n" not in failure.attrib["message"]


def plugin(file: Path, *args: str, cwd: Path, typed: str = "", **env: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:ggmlb",
        "-p",
        "ggmlb_pytest",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--pyargs", "ggmlb.testing", "--ggmlb-device", "Faulty0", "--ggmlb-mode", "test", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GGMLB_BACKEND_PATH": str(file), **env}
    return subprocess.run(command, input=typed, capture_output=True, text=True, cwd=cwd, env=env).stdout


def test_pytest_tells(file, tmp_path):
    out = plugin(file, "--ggmlb-ops", "log,sqr", "--ggmlb-limit", "1", cwd=tmp_path, GITHUB_ACTIONS="true")
    line = FAULTY.splitlines().index("    return np.zeros(7).reshape(3, 3)") + 1
    assert f"::error file={file},line={line},title=Faulty0 test%3A log(" in out
    assert "::error title=Faulty0 test%3A sqr(" in out
    assert ">       return np.zeros(7).reshape(3, 3)" in out
    assert "ctx.log(x0)" in out and "ctx.sqr(x0)" in out
    assert "the tail of each row" in out
    assert "in _call" not in out and "plugin.py" not in out, "frames of the kit are hidden"


def test_pytest_stops_at_the_first_and_debugs_there(file, tmp_path):
    out = plugin(file, "--ggmlb-ops", "log", "-x", "--pdb", cwd=tmp_path, typed="p node.op.name\nq\n")
    assert "-> return np.zeros(7).reshape(3, 3)\n(Pdb) 'LOG'" in out
    assert "stopping after 1 failures" in out
    one = ("--ggmlb-ops", "sqr", "--ggmlb-limit", "1", "--pdb")
    out = plugin(
        file, *one, cwd=tmp_path, typed="p got.shape == expected.shape, float(got[0, 0, 0, -1])\nq\n"
    )
    assert "(Pdb) (True, 7.0)" in out
