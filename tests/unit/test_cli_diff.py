"""`ggmlb diff`: the table, the first node that differs, the programs that it takes, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, init_by_name
from ggmlb.cli import main
from ggmlb.inspect.compare import differences

GOLDEN = Path(__file__).parents[1] / "golden" / "programs"

PROGRAM = """
import numpy as np
import ggmlb
from ggmlb import Context, DType, Graph, Op
from ggmlb.testing.fake import FakeBackend, FakeReg


class Wrong(FakeBackend):
    def _compute(self, plan):
        status = super()._compute(plan)
        for node in plan.nodes:
            if node.name == "bad":
                self.enqueue("spoils", lambda n=node: n.buffer._memset_tensor(n, 0, 0, 4))
        return status


def graph(wrong=False):
    c = Context()
    x = c.new_tensor(DType.F32, (8, 3), name="x")
    rows = c.new_tensor(DType.I32, (2,), name="rows")
    w = c.new_tensor(DType.Q8_0, (32, 8), name="w")
    a = c.set_name(c.get_rows(x, rows), "a")
    b = c.set_name(c.exp(a), "bad")
    d = c.set_name(c.scale(b, 2.0), "after")
    e = c.set_name(c.mul_mat(w, c.new_tensor(DType.F32, (32,), name="v")), "product")
    return Graph().build_forward_expand(d, e)


def wrong():
    reg = FakeReg(1)
    ggmlb.register(reg)
    reg.devices[0].init_backend = lambda params=None: Wrong(reg.devices[0])
    return graph()


def values():
    return graph(), {"x": np.ones((3, 8)), "rows": [0, 2]}


def misnamed():
    return graph(), {"y": np.ones((3, 8))}


def fails():
    return {}["a"]


def nothing():
    pass
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


@pytest.fixture
def told(capsys):
    def told(*args: str):
        status = main(["diff", *args])
        output = capsys.readouterr()
        return status, output.out, output.err

    return told


def test_a_program_of_the_users(told, program):
    for function in ("", ":graph", ":values"):
        status, out, _ = told("--devices", "CPU,CPU", program + function)
        assert status == 0
        assert "GET_ROWS f32[8, 2]" in out
        assert "0 of 4 nodes differ" in out


def test_the_first_node_that_differs(told, program):
    try:
        status, out, _ = told("--devices", "CPU,Fake0", f"{program}:wrong")
        assert status == 1
        (line,) = [line for line in out.splitlines() if "first difference" in line]
        assert " bad " in line and "EXP f32[8, 2]" in line
        assert [" after " in line for line in out.splitlines() if "differs" in line] == [True]
        assert "2 of 4 nodes differ" in out
        status, out, _ = told("--devices", "CPU,Fake0", program, "--nmse", "1e9", "--json")
        (data,) = json.loads(out)
        assert status == 0 and data["first_difference"] is None and data["limit"] == 1e9
    finally:
        import ggmlb

        ggmlb.unload(ggmlb.reg_by_name("Fake"))


def test_json_of_one_golden_program(told):
    status, out, _ = told("-d", "CPU,OpenCL0", str(GOLDEN / "programs.jsonl"), "-p", "^bert-f32$", "--json")
    assert status == 0
    (data,) = json.loads(out)
    assert data["program"] == "bert-f32"
    assert len(data["nodes"]) > 20
    assert {"index", "node", "op", "nmse", "max_error"} == set(data["nodes"][0])
    assert 0 < max(n["nmse"] for n in data["nodes"]) < 1e-9


def test_a_row_for_each_of_several_programs(told):
    _, out, _ = told("--devices", "CPU,LLVM", str(GOLDEN), "-p", "^(clamp-f32-0|arange-0)$")
    assert "LLVM declines ARANGE" in out
    assert "0 of 1 programs differ; 1 not computed" in out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--devices", "CPU", "{program}"], "give two devices"),
        (["--devices", "CPU,CPU", "{program}:what"], "has no function 'what'"),
        (["--devices", "CPU,CPU", "{program}:fails"], "failed: KeyError: 'a'"),
        (["--devices", "CPU,CPU", "{program}:nothing"], "returned NoneType; return a Graph"),
        (["--devices", "CPU,CPU", "{program}:misnamed"], "no leaf without a buffer is named ['y']"),
        (["--devices", "CPU,CPU", "{program}", "-n", "3"], "leave out --prompt and --max-tokens"),
        (["--devices", "CPU,CPU", "missing.gguf", "-p", "x"], "is a model, without golden programs"),
        (["--devices", "CPU,CPU", "missing.gguf"], "there is no file missing.gguf"),
        (["--devices", "CPU,CPU", "missing.py"], "there is no file missing.py"),
        (["--devices", "CPU,CPU", "no_such_module:f"], "ModuleNotFoundError"),
        (["--devices", "CPU,CPU", str(GOLDEN), "-p", "no such"], "has an id that matches 'no such'"),
        (["--devices", "CPU,CPU", str(GOLDEN), "-p", "("], "--pattern (: "),
        (["--devices", "CPU,CPU", "{folder}"], "no golden programs"),
    ],
)
def test_errors_in_one_line(told, program, args, why):
    given = {"program": program, "folder": str(Path(program).parent)}
    status, out, err = told(*(arg.format(**given) for arg in args))
    assert (status, out) == (1, "")
    assert why in err
    assert err.count("\n") == 1


def test_errors_are_measured_with_care():
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (6,), name="x")
    y = ctx.scale(x, 1.0)
    graph = Graph().build_forward_expand(y)
    with init_by_name("CPU") as cpu, alloc_ctx_tensors(ctx, cpu):
        for values in ([1, np.inf, -np.inf, np.nan, 0, 2], [0] * 6):
            x.set_array(values)
            (found,) = differences(cpu, cpu, graph)
            assert (found.nmse, found.max_error) == (0, 0)
