"""The command line's frame: help, usage, how an error is told, and the table of devices."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggmlb
from ggmlb import DType, open_gguf
from ggmlb.cli import main
from tests.support.gguf_files import write_gguf
from tests.support.processes import ggmlb_command as run

ROOT = Path(__file__).parents[2]


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "devices" in capsys.readouterr().out


def test_no_arguments_show_the_help() -> None:
    done = run()
    assert done.returncode == 2
    assert "Usage: ggmlb" in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ggmlb {ggmlb.__version__}\n"


@pytest.mark.parametrize("args", [["device"], ["devices", "--jsn"], ["devices", "extra"], ["--what"]])
def test_wrong_usage_is_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Usage: ggmlb" in told.err


# -- errors ----------------------------------------------------------------------------------------


EMBED = ("embed", "--input", str(ROOT / "tests/golden/minilm/sentences.json"), "--output", os.devnull)


def test_our_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    done = run(*EMBED, "--model", nowhere)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(rf"ggmlb: .*{re.escape(nowhere)}.*\n", done.stderr)


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback(before: bool, tmp_path: Path) -> None:
    args = [*EMBED, "--model", str(tmp_path / "nowhere")]
    done = run(*(["--debug", *args] if before else [*args, "--debug"]))
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "ModelError: " in done.stderr.splitlines()[-1]


def test_nothing_is_cut_where_there_is_little_room() -> None:
    for args in (["devices"], ["test", "-d", "CPU", "-o", "mul_mat", "--limit", "1"]):
        done = run(*args, COLUMNS="80")
        assert done.returncode == 0
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines()[:4])) <= 80


def test_devices_say_which_extra_is_missing(tmp_path: Path) -> None:
    (tmp_path / "pyopencl.py").write_text("raise ModuleNotFoundError('none here', name='pyopencl')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run("devices", PYTHONPATH=path, COLUMNS="200")
    assert done.returncode == 0
    assert "CPU " in done.stdout and "pip install 'ggmlb[opencl]'" in done.stdout
    # It does not mind a reader that has seen enough, as `| head` has.
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "ggmlb", "devices"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=env, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="no shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    """As by a service's start: a file that is opened must not take a stream's number."""
    model = write_gguf(
        tmp_path / "in.gguf", {"general.architecture": "llama"}, {"w.weight": np.ones((4, 32), "f4")}
    )
    commands = (["devices"], ["--version"], ["--help"], ["ops", "-d", "CPU", "--json"], ["show", str(model)],
                ["quantize", str(model), str(tmp_path / "out.gguf"), "--type", "q8_0"])  # fmt: skip
    for command in commands:
        line = f'exec "$0" -m ggmlb "$@" {closed}'
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["/bin/sh", "-c", line, sys.executable, *command],
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        assert "should not happen" not in done.stderr
    assert open_gguf(tmp_path / "out.gguf")["w.weight"].dtype is DType.Q8_0


# -- escapes ---------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x1b[2J\x9b31m\u202e"
SHOWN = "\\x1b]0;owned\\x1b[2J\\x9b31m\\u202e"

HOSTILE = f"""
from ggmlb import BackendReg, DeviceType
from ggmlb.backends.cpu import CpuDevice

class Hostile(CpuDevice):
    name = "Evil{ESCAPE}"
    description = "Device {ESCAPE}"
    type = DeviceType.ACCEL

class Reg(BackendReg):
    name = "Evil"
    devices = ()

    def __init__(self):
        self.devices = (Hostile(self),)

def backend_reg():
    return Reg()
"""


def _hostile(tmp_path: Path) -> str:
    """Write a backend whose names are full of escapes, and one whose failure is."""
    folder = tmp_path / "backends"
    folder.mkdir()
    (folder / "evil.py").write_text(HOSTILE, encoding="utf-8")
    (folder / "bad.py").write_text(f"def backend_reg(): raise OSError({ESCAPE!r})\n", encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    "args", [["devices"], ["devices", "--json"], ["ops", "-d", "nowhere"], ["bench", "-d", f"E{ESCAPE}"]]
)
def test_escapes_in_names_and_messages_are_shown_not_sent(args: list[str], tmp_path: Path) -> None:
    done = run(*args, GGMLB_BACKEND_PATH=_hostile(tmp_path))
    told = done.stdout + done.stderr
    assert not set("\x1b\x07\x9b\u202e") & set(told)
    if args == ["devices"]:
        assert f"Device {SHOWN}" in told and f"OSError: {SHOWN}" in told


def test_escapes_in_an_error_are_shown_by_python_too() -> None:
    ctx = ggmlb.Context()
    a = ctx.new_tensor("f32", (4,), f"a{ESCAPE}")
    with pytest.raises(ggmlb.ShapeError) as caught:
        ctx.mul_mat(a, ctx.new_tensor("f32", (3,)))
    assert SHOWN in str(caught.value) and "\x1b" not in caught.value.message


def test_colours_of_our_own_are_sent() -> None:
    from rich.style import Style
    from rich.text import Text

    from ggmlb.cli.frame import console

    (segment, _) = console(io.StringIO()).render(Text(f"a{ESCAPE}", "red"))
    assert (segment.text, segment.style) == (f"a{SHOWN}", Style.parse("red"))


def test_only_one_place_prints() -> None:
    for path in sorted((ROOT / "ggmlb/cli").glob("*.py")):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        printing = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        assert len(printing) == (path.name == "plain.py"), path
        assert not [n for n in calls if ast.unparse(n.func) in ("sys.stdout.write", "typer.echo")], path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("args", [["devices"], ["devices", "--json"], ["--version"]])
def test_a_full_disk_is_told_as_what_it_is(args: list[str]) -> None:
    command = [sys.executable, "-m", "ggmlb", *args]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    told = "ggmlb: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_folder_that_is_no_model_is_not_listed_whole(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"file{i:03}").touch()
    (tmp_path / "texts.json").write_text('["a"]')
    texts = str(tmp_path / "texts.json")
    done = run("embed", "--model", str(tmp_path), "--input", texts, "--output", "x.npy")
    assert done.returncode == 1
    assert "lacks config.json; it holds file000, file001, file002, file003, file004 and 96" in done.stderr


# -- devices ---------------------------------------------------------------------------------------


def test_devices_as_json() -> None:
    done = run("devices", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    (cpu,) = [d for d in told["devices"] if d["name"] == "CPU"]
    assert (cpu["backend"], cpu["type"], cpu["device_id"]) == ("CPU", "CPU", None)
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]
    assert set(cpu["caps"]) == {"async", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support"}
    for missing in told["unavailable"]:
        assert missing["kind"] in ("absent", "broken")
        assert missing["reason"]


def test_devices_as_a_table() -> None:
    done = run("devices")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout  # no colours in a pipe
    (cpu,) = [line for line in done.stdout.splitlines() if "│ CPU " in line]
    assert "buffer_from_host_ptr" in cpu  # and whole lines, whatever their length


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("OSError('libfoo [v1] is too old')", r"is broken: .*OSError: libfoo \[v1\] is too old"),  # no markup
        ("ModuleNotFoundError(name='foo')", "is not available: .*'foo' is not installed"),
    ],
)
def test_a_backend_that_cannot_be_used_is_listed_with_its_reason(
    failure: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(f"def backend_reg(): pass\nraise {failure}\n")
    done = run("devices", GGMLB_BACKEND_PATH=str(tmp_path / "bad.py"))
    assert done.returncode == 0
    assert re.search(f"^bad {told}", done.stdout, re.MULTILINE)
    assert "│ CPU " in done.stdout


def test_colours_on_a_terminal() -> None:
    parent, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}
    env.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "ggmlb", "devices"]
    with subprocess.Popen(command, stdout=child, stderr=child, env=env) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:  # how Linux tells that the other end was closed
                break
            if not chunk:
                break
            shown += chunk
    os.close(parent)
    assert process.returncode == 0
    assert b"\x1b[" in shown
    assert b"CPU" in shown


def test_env_tells_what_a_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POCL_SOMETHING", "seven")
    monkeypatch.setenv("CUPY_TOKEN", "hidden")
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    assert main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [*told] == [
        "ggmlb", "system", "python", "packages", "devices", "unavailable", "drivers", "caches", "environment",
    ]  # fmt: skip
    assert told["ggmlb"]["version"] == ggmlb.__version__
    assert told["packages"]["numpy"] == np.__version__
    assert set(told["devices"]) == {device.name for device in ggmlb.devices()}
    assert "NUMPY" in told["devices"]["CPU"]["features"]
    assert set(told["unavailable"]) == {m.name for m in ggmlb.unavailable()}
    assert told["environment"]["POCL_SOMETHING"] == "seven"
    assert told["environment"]["CUPY_TOKEN"] == "(not shown)"
    assert "AWS_REGION" not in told["environment"]
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "devices:" in lines and "  CPU:" in lines and f"  numpy: {np.__version__}" in lines


def test_the_forms_for_issues_ask_for_env() -> None:
    for name in ("fault", "device"):
        assert "`ggmlb env`" in (ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text()
