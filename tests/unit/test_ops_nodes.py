"""What ops make: in-place forms, sources, params, setters, and ops that are made of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Hint, Op, OpPool, Prec, RopeType, UnaryOp
from ggmlb.core.errors import ArgumentError
from ggmlb.core.ops import SPECS
from ggmlb.core.ops.custom import N_TASKS_MAX
from ggmlb.core.placement import placement_clock
from tests.support.operands import call, operand

NAMES = (Path(__file__).parent / "ggml_functions.txt").read_text().splitlines()[1:]
ROPE = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)


def _nothing(*args):
    """Stand for the function of a custom op."""


TWINS = {
    "acc": ("[4,3]", "[2,3]", 16, 48, 48, 8),
    "add": ("[4,3].T", "[4]"),
    "add1": ("[4,3].G", "[1]"),
    "add_rel_pos": ("[9,6,2]", "[3,2,3,2]", "[3,2,3,2]"),
    "clamp": ("[4,3].P", -1.0, 1.0),
    "diag_mask_inf": ("[4,3]", 1),
    "diag_mask_zero": ("[4,3]", 1),
    "div": ("f16[4,3]", "[4,3]"),
    "dup": ("[4,3]",),
    "fill": ("f16[4,3]", 2.0),
    "group_norm": ("[4,3,8]", 4, 1e-6),
    "l2_norm": ("[4,3].P", 1e-6),
    "map_custom1": ("[4,3]", _nothing, 1, None),
    "map_custom2": ("[4,3]", "[2]", _nothing, 1, None),
    "map_custom3": ("[4,3]", "[2]", "[7]", _nothing, N_TASKS_MAX, None),
    "mul": ("[4,3]", "[1,3]"),
    "norm": ("[4,3].G", 1e-6),
    "rms_norm": ("[4,3]", 1e-6),
    "rope": ("[8,2,3]", "i32[3]", 6, RopeType.NEOX),
    "rope_custom": ("[8,2,3]", "i32[3]", 6, 0, *ROPE),
    "rope_ext": ("[8,2,3].P", "i32[3]", "[4]", 8, RopeType.NEOX, *ROPE),
    "rope_multi": ("[8,2,3]", "i32[12]", None, 8, [2, 1, 1, 0], RopeType.MROPE, *ROPE),
    "scale": ("[4,3].G", 2.0),
    "scale_bias": ("[4,3]", 2.0, 1.0),
    "set": ("[4,3]", "[2,3]", 16, 48, 48, 8),
    "set_1d": ("[4,3]", "[8]", 16),
    "set_2d": ("[4,3]", "[2,3]", 16, 8),
    "soft_max": ("[4,3]",),
    "soft_max_ext": ("[4,3]", "f16[4,3]", 0.5, 8.0),
    "soft_max_ext_back": ("[4,3]", "[4,3]", 0.5, 0.0),
    "sub": ("[4,3]", "[4,3]"),
    "unary": ("[4,3].G", UnaryOp.TANH),
}
ELEMENTWISE = {
    name
    for name in NAMES
    if name.upper() in UnaryOp.__members__ or name in ("sqr", "sqrt", "log", "sin", "cos")
} - {"xielu"}
TWINS |= {name: ("bf16[4,3]",) for name in ELEMENTWISE if f"{name}_inplace" in NAMES}


def test_all_clones_are_tested():
    inplace = {name.removesuffix("_inplace") for name in NAMES if name.endswith("_inplace")}
    assert inplace - {"custom"} == set(TWINS)


@pytest.mark.parametrize("fn", sorted(TWINS))
def test_inplace_clone(fn):
    ctx = Context()
    new, inplace = call(ctx, fn, TWINS[fn]), call(ctx, f"{fn}_inplace", TWINS[fn])
    a = inplace.src[0]
    assert a is not None
    assert (new.op, new.dtype, new.ne) == (inplace.op, inplace.dtype, inplace.ne) == (new.op, a.dtype, a.ne)
    assert new.view_src is None
    assert new.is_contiguous()
    assert inplace.view_src is (a.view_src or a)
    assert (inplace.nb, inplace.view_offs) == (a.nb, a.view_offs)
    assert len(new.src) == len(inplace.src)
    assert {**new.params, "inplace": True} == {**inplace.params, "inplace": True}
    assert set(new.params) >= set(SPECS[new.op].params)
    if "inplace" in new.params:
        assert (new.params["inplace"], inplace.params["inplace"]) == (False, True)


@pytest.mark.parametrize(
    ("fn", "args", "dtype", "ne"),
    [
        ("add_cast", ("q4_0[32,3]", "[32,3]", "f32"), "f32", (32, 3, 1, 1)),
        ("argsort", ("f16[4,3,2]", 0), "i32", (4, 3, 2, 1)),
        ("sum_rows", ("f16[4,3,2]",), "f16", (1, 3, 2, 1)),
        ("mean", ("f16[4,3,2]",), "f32", (1, 3, 2, 1)),
        ("repeat_4d", ("f16[2,3]", 4, 3, 5, 2), "f16", (4, 3, 5, 2)),
        ("repeat_back", ("f16[4,3,5]", "[2,3]"), "f16", (2, 3, 1, 1)),
        ("concat", ("q8_0[32,3]", "q8_0[32,2]", 1), "q8_0", (32, 5, 1, 1)),
        ("cast", ("[32,3].T", "q8_0"), "q8_0", (32, 3, 1, 1)),
        ("flash_attn_ext", ("[8,3,4,2]", "f16[8,5,2,2]", "f16[6,5,2,2]"), "f32", (6, 4, 3, 2)),
        ("flash_attn_back", ("[8,3,4]", "[8,5,2]", "[5,8,2]", "[8,3,4]", True), "f32", (256, 1, 1, 1)),
        ("arange", (0.0, 1.0, 0.1), "f32", (10, 1, 1, 1)),
        ("arange", (2.0, 9.5, 2.0), "f32", (4, 1, 1, 1)),
        ("timestep_embedding", ("[5]", 33, 10000), "f32", (33, 5, 1, 1)),
        ("im2col", ("f16[3,4,5]", "[8,4,2]", 2, 0, 1, 0, 1, 0, False, "f32"), "f32", (12, 4, 2, 1)),
        ("pool_1d", ("f16[7,3]", OpPool.AVG, 2, 2, 1), "f32", (4, 3, 1, 1)),
        ("col2im_1d", ("bf16[6,4]", 2, 3, 1), "bf16", (6, 3, 1, 1)),
        ("custom_4d", ("i32", 4, 3, 2, 1, (), _nothing), "i32", (4, 3, 2, 1)),
    ],
)  # fmt: skip
def test_result_where_no_golden_program_reaches(fn, args, dtype, ne):
    node = call(Context(), fn, args)
    assert (node.dtype, node.ne) == (DType.parse(dtype), ne)
    assert node.is_contiguous()
    assert node.view_src is None


def test_operands_may_be_empty():
    ctx = Context()
    empty, a = ctx.new_tensor("f32", (4, 0)), ctx.new_tensor("f32", (4, 3))
    assert ctx.mul_mat(a, empty).ne == (3, 0, 1, 1)
    assert ctx.add(empty, ctx.new_tensor("f32", (4,))).ne == (4, 0, 1, 1)
    assert ctx.concat(a, empty, 1).ne == (4, 3, 1, 1)
    assert ctx.get_rows(a, ctx.new_tensor("i32", (0,))).ne == (4, 0, 1, 1)
    assert ctx.silu(empty).is_empty
    assert ctx.cpy(empty, ctx.new_tensor("f16", (0, 7))).is_empty
    assert ctx.set_1d(a, ctx.new_tensor("f32", (0,)), 0).ne == a.ne


def test_set_rows_and_cpy_keep_the_sources_of_ggml():
    ctx = Context()
    a, b, c = (operand(ctx, t) for t in ("f16[4,9]", "[4,3]", "i64[3]"))
    rows = ctx.set_rows(a, b, c)
    assert (rows.src, rows.view_src, rows.dtype) == ((b, c, a), a, DType.F16)
    copy = ctx.cpy(b, ctx.view_1d(a, 12, 8))
    assert (copy.src[0], copy.view_src, copy.view_offs, copy.ne) == (b, a, 8, (12, 1, 1, 1))
    assert ctx.cast(b, "f16").src == (b,)


def test_optional_operands_keep_their_places():
    ctx = Context()
    q, k, mask = (operand(ctx, t) for t in ("[8,3,4]", "f16[8,5,2]", "f16[5,3]"))
    assert ctx.flash_attn_ext(q, k, k).src == (q, k, k, None, None)
    assert ctx.flash_attn_ext(q, k, k, mask, scale=0.1).src == (q, k, k, mask, None)
    assert ctx.soft_max(q).src == (q, None, None)
    pos = operand(ctx, "i32[4]")
    assert ctx.rope_ext(q, pos, None, 8).src == (q, pos, None)


def test_rope_params():
    ctx = Context()
    a, b, c = (operand(ctx, t) for t in ("[8,2,3]", "i32[3]", "[4]"))
    node = ctx.rope_ext(a, b, c, 8, RopeType.NEOX, 4096, 1e6, 0.5, 1.0, 0.9, 16.0, 2.0)
    assert node.params == {
        "n_dims": 8, "mode": RopeType.NEOX, "n_ctx_orig": 4096, "freq_base": 1e6, "freq_scale": 0.5,
        "ext_factor": 1.0, "attn_factor": 0.9, "beta_fast": 16.0, "beta_slow": 2.0,
        "sections": (0, 0, 0, 0), "offset": 0,
    }  # fmt: skip
    same = ctx.rope_custom(a, b, 8, 2, 4096, 1e6, 0.5, 1.0, 0.9, beta_fast=16.0, beta_slow=2.0)
    assert same.params == node.params
    plain = ctx.rope(a, b, 6)
    assert (plain.params["freq_base"], plain.params["beta_fast"], plain.params["mode"]) == (10000.0, 0.0, 0)
    multi = ctx.rope_multi(a, operand(ctx, "i32[12]"), None, 8, [2, 1, 1, 0], RopeType.IMROPE)
    assert multi.params["sections"] == (2, 1, 1, 0)
    ignored = ctx.rope_multi(a, b, None, 8, [2, 1, 1, 0], RopeType.NEOX)
    assert ignored.params["sections"] == (0, 0, 0, 0)
    assert ctx.rope_ext_back(a, b, None, 8).op is Op.ROPE_BACK
    assert ctx.rope_multi_back(a, b, None, 8, [0] * 4, 2).op is Op.ROPE_BACK


def test_xielu_constrains_its_slopes():
    params = Context().xielu(operand(Context(), "[4]"), 4.0, 30.0, 0.5, 1e-7).params
    assert params["op"] is UnaryOp.XIELU
    assert params["alpha_n"] == pytest.approx(0.5 + np.log1p(np.exp(4.0)))
    assert params["alpha_p"] == 30.0


SETTERS = [
    ("mul_mat", ("[4,3]", "[4,2]"), "mul_mat_set_prec", Prec.F32, "prec"),
    ("mul_mat", ("[4,3]", "[4,2]"), "prec_set_acc", Prec.F16, "prec"),
    ("mul_mat_id", ("[4,3,2]", "[4,1,5]", "i32[1,5]"), "prec_set_acc", Prec.BF16, "prec"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,5,2]"), "prec_set_acc", Prec.F32, "prec"),
    ("mul_mat", ("[4,3]", "[4,2]"), "mul_mat_set_hint", Hint.SRC0_IS_HADAMARD, "hint"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,5,2]"), "flash_attn_ext_set_prec", Prec.F32, "prec"),
    ("rope", ("[8,2,3]", "i32[3]", 6), "rope_set_offset", 2, "offset"),
]


@pytest.mark.parametrize(("fn", "args", "setter", "value", "param"), SETTERS)
def test_setters_change_their_node_and_tick_the_clock(fn, args, setter, value, param):
    ctx = Context()
    node, other = call(ctx, fn, args), call(ctx, fn, args)
    before, now = dict(node.params), placement_clock.now
    assert getattr(ctx, setter)(node, value) is node
    assert node.params == {**before, param: value}
    assert other.params == before
    assert placement_clock.now > now


@pytest.mark.parametrize(
    ("fn", "args", "setter"),
    [
        ("soft_max", ("[4,3,2]",), "soft_max_add_sinks"),
        ("flash_attn_ext", ("[4,3,2]", "f16[4,5]", "f16[4,5]"), "flash_attn_ext_add_sinks"),
    ],
)
def test_sinks_join_and_leave_the_sources(fn, args, setter):
    ctx = Context()
    node, sinks = call(ctx, fn, args), operand(ctx, "[2]")
    src, now = node.src, placement_clock.now
    getattr(ctx, setter)(node, sinks)
    assert node.src == (*src[:-1], sinks)
    assert placement_clock.now > now
    getattr(ctx, setter)(node, None)
    assert node.src == src


def test_depthwise_convolution_keeps_channels_innermost():
    ctx = Context()
    kernel, data = operand(ctx, "[3,3,1,8]"), operand(ctx, "[8,7,6,2]")
    inner = ctx.permute(data, 2, 0, 1, 3)  # ne [7, 6, 8, 2], channels innermost in memory
    node = ctx.conv_2d_dw_direct(kernel, inner, 1, 1, 1, 1, 1, 1)
    assert (node.ne, node.nb) == ((7, 6, 8, 2), (32, 224, 4, 1344))
    plain = ctx.conv_2d_dw_direct(kernel, operand(ctx, "[7,6,8,2]"), 1, 1, 1, 1, 1, 1)
    assert (plain.ne, plain.nb) == ((7, 6, 8, 2), (4, 28, 168, 1344))


def test_attention_keeps_the_promise_of_a_sparse_mask():
    ctx = Context()
    q, k, v = (ctx.new_tensor("f32", (32, n, 2)) for n in (4, 64, 64))
    node = ctx.flash_attn_ext(q, k, v, ctx.new_tensor("f16", (64, 4)), 1.0)
    assert ctx.flash_attn_ext_set_n_kv_max(node, 16) is node
    assert node.params["n_kv_max"] == 16
    bare = ctx.flash_attn_ext(q, k, v, None, 1.0)
    for a, n, told in (
        (bare, 16, "has no mask"),
        (node, -1, "must be at least 0"),
        (q, 16, "FLASH_ATTN_EXT node"),
    ):
        with pytest.raises(ArgumentError, match=told):
            ctx.flash_attn_ext_set_n_kv_max(a, n)
