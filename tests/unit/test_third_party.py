"""A backend of another package: written by `ggmlb new-backend`, installed by pip, used in a graph."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ggmlb.cli import main
from ggmlb.models.devices import device_names
from tests.support.processes import python
from tests.support.text_models import write_text_model

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
import numpy as np
import ggmlb

with ggmlb.init_by_name("abacus0") as abacus, ggmlb.init_by_name("CPU") as cpu:
    ctx = ggmlb.Context()
    x = ctx.set_input(ctx.new_tensor(ggmlb.DType.F32, (4, 3)))
    row = ctx.set_input(ctx.new_tensor(ggmlb.DType.F32, (4,)))
    y = ctx.set_output(ctx.sqr(ctx.add(ctx.mul(x, x), row)))      # all of it on the abacus
    z = ctx.set_output(ctx.silu(y))                               # and this on the CPU
    graph = ggmlb.Graph().build_forward_expand(z)
    with ggmlb.Scheduler([abacus, cpu]) as sched:
        sched.alloc_graph(graph)
        a = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
        b = np.array([1, 2, 3, 4], np.float32) / 10
        x.set_array(a)
        row.set_array(b)
        sched.graph_compute(graph)
        squares = (a * a + b) ** 2
        np.testing.assert_allclose(y.to_numpy(), squares, rtol=1e-6)
        np.testing.assert_allclose(z.to_numpy(), squares / (1 + np.exp(-squares)), rtol=1e-5)
        where = {str(node.op): sched.get_tensor_backend(node).name for node in graph.nodes}
print(json.dumps({
    "where": where,
    "found_in": sys.modules["ggmlb_abacus"].__file__,
    "imported": [m for m in ("pyopencl", "cupy") if m in sys.modules],
    "listed": [d.name for d in ggmlb.devices()],
}))
ggmlb.unload(ggmlb.reg_by_name("Abacus"))
try:
    ggmlb.device_by_name("Abacus0")
except ggmlb.RegistryError:
    pass
else:
    raise SystemExit("unloaded, and still found")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of a new backend."""
    folder = tmp_path_factory.mktemp("new") / "abacus"
    done = python("-m", "ggmlb", "new-backend", "Abacus", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def site(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the package into."""
    target = tmp_path_factory.mktemp("site")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    done = python(*pip, *offline, str(package))
    assert done.returncode == 0, done.stderr
    return target


def run(site: Path, *args: str) -> str:
    done = python(*args, PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_computes_beside_the_cpu(site: Path) -> None:
    told = json.loads(run(site, "-c", PROGRAM))
    assert told["where"] == {"MUL": "Abacus", "ADD": "Abacus", "SQR": "Abacus", "UNARY": "CPU"}
    assert Path(told["found_in"]).is_relative_to(site)
    assert told["imported"] == []
    assert "Abacus0" in told["listed"]
    assert "CPU" in told["listed"]


def test_it_passes_the_conformance_kit(site: Path) -> None:
    told = run(site, "-m", "ggmlb", "test", "-d", "Abacus0", "--mode", "all")
    for mode in ("behaviour", "test", "support", "perf"):
        assert re.search(rf"^Abacus0 {mode}: [1-9]\d* passed, 0 failed", told, re.MULTILINE), told


def test_the_command_lists_it(site: Path) -> None:
    told = json.loads(run(site, "-m", "ggmlb", "devices", "--json"))
    (abacus,) = [d for d in told["devices"] if d["backend"] == "Abacus"]
    assert (abacus["name"], abacus["type"]) == ("Abacus0", "ACCEL")


def test_models_use_it_only_where_it_is_named(site: Path, tmp_path: Path) -> None:
    """Without a name, ggmlb's own devices compute, and the command tells which."""
    model = str(write_text_model(tmp_path / "m.gguf"))
    for named in (False, True):
        options = ["-d", "Abacus0,CPU"] if named else []
        env = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
        args = ["generate", "-m", model, "--prompt-tokens", "1,5", "-n", "1", "--json", *options]
        done = python("-m", "ggmlb", *args, **env)
        used = json.loads(done.stdout)["model"]["parts"]
        assert ("Abacus" in used) is named
        assert re.findall("computes on ([^;]*)", done.stderr) == (
            [] if named else [", ".join(device_names(None))]
        )


def test_its_own_tests_pass(package: Path, site: Path) -> None:
    """All cases, in one process; an op that it declines as a whole is one skipped test."""
    env = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    plugin = ["-p", "no:ggmlb", "-p", "ggmlb_pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = python("-m", "pytest", "-q", *plugin, "-rs", cwd=package, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    passed, skipped = map(int, re.findall(r"(\d+) (?:passed|skipped)", done.stdout.splitlines()[-1]))
    assert passed > 50
    assert len(re.findall(r"declined as a whole: .*no function for DIV", done.stdout)) == 2  # of two modes
    assert skipped < 600


def test_a_name_must_be_free_and_a_folder_new(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, told in (
        (["opencl"], "there is a backend opencl already"),
        (["My-Chip"], "'My-Chip' cannot be a backend's name"),
        (["Chip2"], "'Chip2' cannot be a backend's name"),
        (["Other", "--output", str(package)], "exists; give another folder"),
    ):
        assert main(["new-backend", *args]) == 1
        assert told in capsys.readouterr().err


TEMPLATE = (ROOT / "ggmlb/testing/template/__init__.py").read_text()
BROKEN = {
    "no module": ("import numpy as np", "import no_such", "the Python module 'no_such' is not installed"),
    "no driver": ("return self._devices", "raise OSError('libabacus.so: none')", "libabacus.so: none"),
    "no method": ("    def declines(", "    def refuses(", "AbacusDevice lacks declines: a backend must"),
    "stream without method": ("    def _plan(", "    def _p(", "AbacusBackend lacks _plan: a backend must"),
    "raises": ("return AbacusBackend(self)", "1 / 0", "Abacus0 opens no stream: ZeroDivisionError: div"),
    "no stream": ("return AbacusBackend(self)", "return None", "init_backend returned None; it must"),
}


GRAPH = """
import ggmlb

def build():
    ctx = ggmlb.Context()
    return ggmlb.Graph().build_forward_expand(ctx.sqr(ctx.new_tensor("f32", (4,), "x")))
"""


@pytest.mark.parametrize("what", BROKEN)
def test_each_command_tells_why_a_device_cannot_be_made(what: str, tmp_path: Path) -> None:
    before, after, told = BROKEN[what]
    file = tmp_path / "abacus.py"
    file.write_text(TEMPLATE.replace(before, after))
    model = str(write_text_model(tmp_path / "m.gguf"))
    commands = [["test", "-o", "add", "--limit", "1"], ["bench"]]
    if what in ("no driver", "raises"):
        commands += [
            ["test", "-o", "plans", "--mode", "behaviour"],
            ["generate", "-m", model, "--prompt-tokens", "1", "-n", "1"],
            ["diff", f"{tmp_path / 'graph.py'}:build"],
        ]
        (tmp_path / "graph.py").write_text(GRAPH)
    for command in commands:
        args = [command[0], "-d", "CPU,Abacus0" if command[0] == "diff" else "Abacus0", *command[1:]]
        done = python("-m", "ggmlb", *args, GGMLB_BACKEND_PATH=str(file))
        assert done.returncode not in (0, 3), done.stdout
        text = " ".join((done.stdout + done.stderr).split())
        assert told in text and "should not happen" not in text, (args, text)
    if "method" in what:
        assert str(file) in done.stderr
