"""What `make lint-cuda` runs fails where it should."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ggmlb.kernels import kernels

if TYPE_CHECKING:
    from types import ModuleType

pytest.importorskip("nvidia.cuda_nvrtc", reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")


@pytest.fixture
def lint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return import_module("lint_cuda")


def test_a_kernel_that_is_not_cuda_is_told_with_the_compilers_words(lint: ModuleType) -> None:
    right = (kernels()["rms_norm"], (("a_STEP", "4"), ("a_T", "f32"), ("d_STEP", "4"), ("d_T", "f32")), 128)
    _, why, taken = lint.compiled(lint.Nvrtc(), right, "sm_75")
    assert why == ""
    assert taken.registers > 8
    assert taken.spilled == 0
    kernel, defines, wg = right
    broken = (kernel, (*defines[:-1], ("d_T", "no_such_type")), wg)
    name, why, _ = lint.compiled(lint.Nvrtc(), broken, "sm_75")
    assert name == "rms_norm"
    assert "error" in why


def test_it_reaches_every_kernel(lint: ModuleType) -> None:
    assert {kernel.name for kernel, *_ in lint.variants()} == set(kernels())


def test_a_failure_and_a_stale_exception_are_both_errors(
    lint: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint, "ARCHITECTURES", ("sm_75",))
    monkeypatch.setattr(lint, "variants", lambda: [(kernels()["arange"], (("d_T", "no_type"),), 128)])
    assert lint.main() == 1
    assert "arange" in capsys.readouterr().out
    monkeypatch.setattr(lint, "ONLY_OPENCL", {"rope": "for the test"})
    assert lint.main() == 1
    assert "rope: compiles for CUDA after all" in capsys.readouterr().out


def test_spills_of_hot_kernels_and_other_figures_are_errors(
    lint: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = "80 bytes spill stores, 76 bytes spill loads\nUsed 255 registers, 512 bytes smem"
    spilling = lint.Resources.read(log)
    assert spilling == lint.Resources(255, 512, 156)
    assert str(spilling) == "255, 512 B (156 B spilled)"
    tidy = lint.Resources(40)
    resources = import_module("cuda_resources")
    monkeypatch.setattr(resources, "TABLE", tmp_path / "table.md")
    page = lint.text("12.9", ["sm_90"], {"mul": {"sm_90": tidy}}, {"add": {"sm_90": tidy}})
    resources.TABLE.write_text(page)
    assert lint.complaints(page, "12.9", {"mul": {"sm_90": tidy}}) == []
    rows = {"mul": {"sm_90": spilling}}
    worse = lint.text("12.9", ["sm_90"], rows, {"add": {"sm_90": tidy}})
    spills, differs, *_ = lint.complaints(worse, "12.9", rows)
    assert spills == "mul spills 156 bytes on sm_90"
    assert differs == "not in table.md: | mul | 255, 512 B (156 B spilled) |"
    other = lint.text("13.0", ["sm_90"], {"mul": {"sm_90": lint.Resources(41)}}, {"add": {"sm_90": tidy}})
    assert lint.complaints(other, "13.0", {"mul": {"sm_90": lint.Resources(41)}}) == []


def test_the_table_is_there(lint: ModuleType) -> None:
    page = lint.TABLE.read_text()
    assert all(f"| {name} |" in page for name in lint.hot())
