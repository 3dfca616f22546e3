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
    assert lint.complaint(lint.Nvrtc(), right, "sm_75") is None
    kernel, defines, wg = right
    broken = (kernel, (*defines[:-1], ("d_T", "no_such_type")), wg)
    name, why = lint.complaint(lint.Nvrtc(), broken, "sm_75")
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
