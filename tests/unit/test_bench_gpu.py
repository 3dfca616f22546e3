"""The GPU benchmark runs from end to end, unattended, on whatever device there is."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import python

SCRIPT = str(Path(__file__).parents[2] / "benchmarks/gpu.py")


def test_every_section_runs_and_writes_its_figures(tmp_path: Path) -> None:
    done = python(SCRIPT, "--smoke", "--device", "CPU", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 sections failed, 0 left out" in done.stdout
    (page,) = tmp_path.glob("gpu-*.md")
    text = page.read_text()
    assert "these figures mean nothing" in text
    for what in (
        "copy to device, pageable",
        "rms_norm",
        "mul_mat(q6_k,f32;n=1)",
        "get_rows(q4_0)",
        "prefill",
        "MiniLM, batch 1",
        "decode step",
    ):
        assert what in text


def test_a_missing_card_is_told() -> None:
    done = python(SCRIPT, "--device", "CUDA77")
    assert done.returncode == 2
    assert "nothing was measured" in done.stdout
