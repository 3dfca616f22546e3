"""Kernel texts and launches: what can be said of them without a device."""

from __future__ import annotations

import ggmlb.backends.gpu
from ggmlb import Context, DType
from ggmlb.backends.gpu import RULES, Target, lower
from ggmlb.backends.gpu.source import kernels, source
from tests.support.golden import CASES

GPU, CPU = Target(False, 2, 128), Target(True, 2, 1)


def claimed_launches(target: Target) -> list[ggmlb.backends.gpu.Launch]:
    nodes = [node for case in CASES for node in case.build().graph.nodes if RULES.declines(node) is None]
    return [launch for node in nodes for launch in lower(node, target)]


def test_every_kernel_is_reached_from_the_golden_programs() -> None:
    reached = {launch.kernel.name for target in (GPU, CPU) for launch in claimed_launches(target)}
    fused = {"route", "sum_slots", "rope_kv"}  # of groups of nodes only
    newer = {"dsv4_hc_pre_gated", "dsv4_hc_post_plain"}  # than the ggml of the golden programs
    assert reached | fused | newer == set(kernels())


def test_an_empty_result_needs_no_launch() -> None:
    ctx = Context()
    y = ctx.relu(ctx.new_tensor(DType.F32, (4, 0)))
    assert RULES.declines(y) is None
    assert lower(y, GPU) == []


def test_reasons_name_the_operand() -> None:
    ctx = Context()
    w = ctx.new_tensor(DType.F32, (8, 8), "w")
    x = ctx.new_tensor(DType.F32, (8, 8), "x")
    assert RULES.declines(ctx.mul_mat(w, x)) is None
    why = RULES.declines(ctx.mul_mat(w, ctx.transpose(x)))
    assert why is not None
    assert "x (transposed)" in why
    assert "apply cont" in why
    double = ctx.new_tensor(DType.F64, (8,), "u")
    assert RULES.declines(ctx.relu(double)) == "src0 ('u') is f64: only f32, f16 and bf16; cast it to f32"
    custom = ctx.map_custom1(x, lambda *_: None, 1, None)
    assert RULES.declines(custom) == "no kernel for MAP_CUSTOM1"


def test_more_elements_than_an_index_counts_are_declined() -> None:
    ctx = Context()
    assert RULES.declines(ctx.relu(ctx.new_tensor(DType.F32, (1 << 20, (1 << 11) - 1)))) is None
    why = RULES.declines(ctx.relu(ctx.new_tensor(DType.F32, (1 << 20, 1 << 11), "big")))
    assert why is not None
    assert "'big'" in why or "RELU" in why
    assert "more than 2147483647 elements" in why


def test_a_text_has_the_large_tables_only_for_the_types_that_need_them() -> None:
    """They would be a fifth of the time to compile any kernel that reads rows."""
    copy = kernels()["copy"]
    for language in ("opencl", "cuda"):
        assert "GRID_iq2_xs" not in source(copy, language, [("a_T", "q4_0"), ("d_T", "f32")])
        assert "GRID_iq2_xs" in source(copy, language, [("a_T", "iq1_m"), ("d_T", "f32")])
