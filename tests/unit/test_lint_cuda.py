"""What `make lint-cuda` runs fails where it should."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from ggmlb.backends.gpu.source import kernels

pytest.importorskip("nvidia.cu13", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.fixture
def lint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return import_module("lint_cuda")


def test_it_reaches_every_kernel(lint: ModuleType) -> None:
    assert {kernel.name for kernel, *_ in lint.variants()} == set(kernels())
    assert {"q4_0_x8", "q8_0_x8"} <= {dict(defines).get("a_T") for _, defines, _ in lint.variants()}


def test_a_failure_and_a_stale_exception_are_both_errors(
    lint: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint, "SOME", ("sm_80",))
    one_of_each = {kernel.name: (name, (kernel, *rest)) for name, (kernel, *rest) in lint.hot().items()}
    monkeypatch.setattr(lint, "hot", lambda *_: dict(one_of_each.values()))
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
    assert lint.Resources.parse(str(spilling)) == spilling
    tidy = lint.Resources(40)
    monkeypatch.setattr(import_module("cuda_resources"), "TABLE", tmp_path / "table.md")
    hot, other = {"mul": {"sm_90": tidy}}, {"add": {"sm_90": tidy}}
    (tmp_path / "table.md").write_text(lint.page("12.9", ["sm_90"], hot, other))
    assert lint.complaints("12.9", hot, other) == []
    spills, differs, _ = lint.complaints("12.9", {"mul": {"sm_90": spilling}}, other)
    assert spills == "mul spills 156 bytes on sm_90"
    assert differs == "mul on sm_90: 255, 512 B (156 B spilled); in table.md: 40"
    assert len(lint.complaints("12.9", {"mul": {"sm_90": lint.Resources(41)}}, other)) == 2
    assert lint.complaints("12.9", hot, {"add": {"sm_90": spilling}}) == ["add spills 156 bytes on sm_90"]
    assert lint.complaints("12.9", hot, {"add": {"sm_90": lint.Resources(60)}}) == []
    assert lint.complaints("13.0", {"mul": {"sm_90": lint.Resources(41)}}, other) == []
