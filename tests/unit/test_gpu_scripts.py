"""What runs unattended on a machine with a card runs from end to end on the simulated driver."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support.processes import python

ROOT = Path(__file__).parents[2]
PLAYED = f"{ROOT / 'tests/support/played'}{os.pathsep}{ROOT}"


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / script), *args, PYTHONPATH=PLAYED)


def test_the_tests_of_a_card_run_and_what_fails_or_ends_its_process_is_told(tmp_path: Path) -> None:
    program = tmp_path / "test_some.py"
    program.write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_first(): pytest.fail('why' + 9000 * 'x')\n"
        "def test_second(): os._exit(1)\n"
        "def test_third(): pass\n"
    )
    chosen = "test_some or (test_cuda_graphs and not all_other_steps) or test_cuda_reuse or test_gpu_streams"
    chosen += " or direct_copies or is_captured[llama] or graphs_are_updated or dependent"
    done = run("scripts/test_gpu.py", "-k", chosen, str(program))
    assert done.returncode == 1
    assert re.search(r"^CUDA0: Host .*, 0000:00:00.0$", done.stdout, re.M)
    assert re.search(r"^FAILED .*test_first$", done.stdout, re.M)
    assert re.search(r"^FAILED .*test_second \(its process ended", done.stdout, re.M)
    assert "why" in done.stdout
    assert "characters ...]" in done.stdout
    told = re.search(r"^(\d+) passed, 2 failed, \d+ skipped in \d+ s$", done.stdout, re.M)
    assert told, done.stdout
    assert int(told[1]) > 25
    answers = done.stdout.partition("The card's answers")[2].splitlines()
    assert answers[1] == "Direct copies: there is one card."
    assert re.fullmatch(
        r"Capture of llama: \d+ steps are replayed in \d CUDA graphs; none was refused\.", answers[2]
    )
    assert answers[3].startswith("Programmatic dependent launch: the same logits, ")
    assert re.fullmatch(r"cuGraphExecUpdate: (\d) of \1 updates accepted\.", answers[4])


def test_the_benchmark_of_a_card_runs_every_section(tmp_path: Path) -> None:
    sections = "host,text,copies,ops,matmul,attention,decode"
    chosen = ("--only", sections, "--ops", "add,norm,rope,get_rows,mul_mat_id")
    done = run("benchmarks/gpu.py", "--smoke", *chosen, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = done.stdout.partition("== summary\n")[2].splitlines()
    told = r"Host: .* ms of processor time a token \(\d+\.\d calls of CUDA, of them 1\.0 graph launches .*"
    assert re.fullmatch(told, verdicts[0])
    assert re.fullmatch(r"Decoding: .* of what the memory's bandwidth allows: .*", verdicts[1])
    assert re.fullmatch(r"A prompt: .* of what the tensor cores' rate allows: .*", verdicts[2])
    assert re.fullmatch(r"Beside ggml:CUDA0: not compared, there is no device .*", verdicts[3])
    assert "0 sections failed, 0 left out" in verdicts[4]


def test_the_benchmark_runs_every_section_and_writes_its_figures(tmp_path: Path) -> None:
    chosen = ("--smoke", "--device", "CPU", "--beside", "LLVM", "--folder", str(tmp_path))
    done = python(str(ROOT / "benchmarks/gpu.py"), *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 sections failed, 0 left out" in done.stdout
    assert re.search(r"^Beside LLVM: .* times its tokens per second in decoding, ", done.stdout, re.M)
    (page,) = tmp_path.glob("gpu-*.md")
    text = page.read_text()
    assert "these figures mean nothing" in text
    rows = ("copy to device, pageable", "rms_norm", "mul_mat(q6_k,f32;n=1)", "get_rows(q4_0)", "prefill")
    assert all(row in text for row in (*rows, "MiniLM, batch 1", "decode step"))


def test_a_token_is_an_upload_a_launch_a_read_and_a_wait() -> None:
    """By a driver that counts calls; and a prompt in 16 chunks is as many launches, and a single wait."""
    done = python(str(ROOT / "benchmarks/host.py"), "--layers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for kind, read in (
        ("logits", "1 copy TO_HOST of 513024 bytes"),
        ("candidates", "2 copy TO_HOST of 256 bytes"),
    ):
        said = re.search(rf"^token: {kind}, sampled .* driver calls: (.*)$", done.stdout, re.M)
        assert said is not None
        calls = re.sub(r"(\d),(\d)", r"\1\2", said[1]).split(", ")
        upload, *names = [name for name in calls if not name.endswith((" on", " is_pinned"))]
        assert upload.startswith("1 copy TO_DEVICE")
        assert names == [read, "1 event_record", "1 event_synchronize", "1 exec_launch"]
    rows = re.findall(r"^chunks of 512: (.*?)  mean.* captures: (\d+)  waits: (\d+)$", done.stdout, re.M)
    assert [name for name, *_ in rows] == ["first", "again", "again, captured", "again, replayed"]
    assert [int(waits) for *_, waits in rows] == [1, 1, 1, 1]
    assert int(rows[-1][1]) == 16


def test_the_benchmark_tells_of_a_missing_card() -> None:
    done = python(str(ROOT / "benchmarks/gpu.py"), "--device", "CUDA77")
    assert done.returncode == 2
    assert "nothing was measured" in done.stdout
