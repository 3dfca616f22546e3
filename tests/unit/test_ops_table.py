"""docs/ops.md is what `ggmlb ops` says today, and the samples reach every op."""

from __future__ import annotations

from pathlib import Path

import pytest

import ggmlb
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.testing.samples import SAMPLES, ops_covered, supported_types

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_there_is_a_sample_of_every_op():
    assert ops_covered() == set(Op) - NO_OPS


def test_the_cpu_runs_every_sample():
    cpu = ggmlb.device_by_name("CPU")
    # ggml.h declares flash_attn_back, but ggml cannot build it.
    assert [name for name in SAMPLES if not supported_types(cpu, name)] == ["flash_attn_back"]


def test_the_page_is_current():
    pytest.importorskip("typer")
    pytest.importorskip("llvmlite")
    pytest.importorskip("pyopencl")
    from ggmlb.cli.ops import as_markdown

    devices = [ggmlb.device_by_name(name) for name in ("CPU", "LLVM", "OpenCL0")]
    assert PAGE.read_text(encoding="utf-8") == as_markdown(devices), (
        "run `python -m ggmlb ops --devices CPU,LLVM,OpenCL0 --markdown docs/ops.md`"
    )
