"""docs/ops.md is what `ggmlb ops` says today, and the samples reach every op."""

from __future__ import annotations

from pathlib import Path

import pytest

import ggmlb
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.ops import SPECS
from ggmlb.testing.claims import SAMPLES, TYPES, sample, supported_types
from ggmlb.testing.ops import RECORDS

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_every_op_has_a_record_with_samples_of_it():
    assert list(SPECS) == list(Op)
    for op in set(Op) - NO_OPS:
        assert RECORDS[op].samples, op
        for name in RECORDS[op].samples:
            made = [node for node in (sample(name, dtype) for dtype in TYPES) if node is not None]
            assert {node.op for node in made} == {op}, name
            more = {
                "unary xielu",
                "glu swiglu_oai",
                "glu swiglu_clamp",
            }  # functions of an op with parameters of their own
            assert {frozenset(node.params) for node in made} == {frozenset(SPECS[op].params)} or name in more


def test_the_ops_that_work_in_place_are_those_of_ggml():
    expected = """
        FILL SCALE DIAG_MASK_ZERO DIAG_MASK_INF ADD ADD_ID ADD1 SUB MUL DIV SQR SQRT LOG UNARY ROPE ROPE_BACK
        SILU_BACK RMS_NORM RMS_NORM_BACK SOFT_MAX SOFT_MAX_BACK
    """
    assert {op.value for op, spec in SPECS.items() if spec.inplace} == set(expected.split())


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
