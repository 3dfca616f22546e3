"""Calls that ggml asserts against raise our errors, when the op is built, with what was wrong."""

from __future__ import annotations

import pickle

import pytest

from ggmlb.core.context import Context
from ggmlb.core.enums import GluOp, OpPool, Prec, RopeType, ScaleFlag, ScaleMode, TriType, UnaryOp
from ggmlb.core.errors import ArgumentError, DTypeError, Error, ShapeError
from tests.support.operands import call

S, D, A = ShapeError, DTypeError, ArgumentError
ROPE = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)


def _nothing(*args):
    """Stand for the function of a custom op."""


WRONG = [
    # parameters that no float32 holds, as all of ggml's are
    ("scale", ("[4]", 1e300), A, "scale: scale is 1e.300; give one in the range of float32"),
    # binary
    ("add", ("[4,3]", "[5,3]"), S, r"every extent of b, ne \[5, 3, 1, 1\], must divide"),
    ("add", ("[4,3]", "[4,6]"), S, "must divide"),
    ("add_inplace", ("[4,3]", "[8,3]"), S, "add_inplace"),
    ("sub", ("[4,3]", "[4,2]"), S, r"sub\(tensor f32\[4, 3\], tensor f32\[4, 2\]\)"),
    ("mul", ("[4,3,2]", "[4,3,3]"), S, "must divide"),
    ("div_inplace", ("[4]", "[3]"), S, "must divide"),
    ("add_cast", ("f16[4,3]", "[2,3]", "f32"), S, "equally long"),
    ("add_cast", ("f16[4,3]", "[4,2]", "f32"), S, "must divide"),
    ("add_cast", ("[4,3]", "[4,3]", "f32"), D, "f16 or bf16"),
    ("add_cast", ("f16[4,3]", "[4,3]", "f33"), D, "F32"),
    ("add_id", ("[4,3,2]", "[5,7]", "i32[3,2]"), S, "ids must have ne"),
    ("add_id", ("[4,3,2]", "[4,7]", "i32[3,3]"), S, "ids must have ne"),
    ("add_id", ("[4,3,2]", "[4,7]", "[3,2]"), D, "ids is .* must be i32"),
    ("add1", ("[4,3]", "[2]"), S, "scalar"),
    ("add1_inplace", ("[4,3].T", "[1]"), S, "gaps between rows"),
    ("acc", ("[4,3]", "[4,4]", 16, 48, 48, 0), S, "ends outside"),
    ("acc", ("[4,3]", "[4,3]", 16, 48, 48, 4), S, "ends outside"),
    ("acc", ("[4,3].T", "[2,3]", 16, 48, 48, 0), S, "contiguous"),
    ("acc", ("f16[4,3]", "[2,3]", 8, 24, 24, 0), D, "a is .* must be f32"),
    ("acc_inplace", ("[4,3]", "f16[2,3]", 16, 48, 48, 0), D, "b is .* must be f32"),
    ("acc", ("[4,3]", "[2,3]", 16, 48, 48, -4), S, "negative"),
    # unary
    ("abs", ("[4,3].T",), S, "contiguous within its rows"),
    ("gelu_inplace", ("[4,3].T",), S, "gelu_inplace"),
    ("unary", ("[4,3].T", UnaryOp.SILU), S, "contiguous within its rows"),
    ("unary", ("[4]", 99), A, "99 is not a UnaryOp"),
    ("unary_inplace", ("[4]", -1), A, "UnaryOp"),
    ("silu_back", ("[4,3]", "[4,2]"), S, "must equal"),
    # glu
    ("swiglu", ("[5,3]",), S, "row length 5 must be even"),
    ("swiglu", ("[6,4].T",), S, "gaps between rows"),
    ("geglu_swapped", ("[6,4].T",), S, "geglu_swapped"),
    ("reglu_split", ("[4,3]", "[4,2]"), S, "must equal"),
    ("swiglu_split", ("[4,3]", "f16[4,3]"), D, "b is .* must be f32"),
    ("swiglu_split", ("[4,3]", "[4,3].T"), S, "b has strides"),
    ("swiglu_oai", ("[4,3]", "[3,4]", 1.0, 7.0), S, "must equal"),
    ("glu", ("[4,3]", 77), A, "GluOp"),
    ("glu", ("[4,3]", "swiglu_oai", False), A, r"use swiglu_oai\(a, b, alpha, limit\)"),
    ("glu_split", ("[4,3]", "[4,3]", GluOp.SWIGLU_OAI), A, "use swiglu_oai"),
    ("glu", ("[4,3]", "swiglu_clamp", False), A, r"use swiglu_clamp\(a, b, limit\)"),
    ("swiglu_clamp", ("[4,3]", "[3,4]", 7.0), S, "must equal"),
    ("glu_split", ("[4,3]", "[4,3]", -2), A, "GluOp"),
    ("glu", ("[7]", GluOp.REGLU), S, "even"),
    # norm
    ("norm", ("[4]", -1e-5), A, "eps is -1e-05"),
    ("rms_norm", ("[4]", float("nan")), A, "eps is nan"),
    ("l2_norm_inplace", ("[4]", -1.0), A, "l2_norm_inplace"),
    ("rms_norm_back", ("[4]", "[5]", 1e-5), S, "must equal"),
    ("group_norm", ("[4,4,4]", 0, 1e-5), A, "n_groups is 0"),
    ("group_norm_inplace", ("[4,4,4]", 2, -1.0), A, "eps"),
    # scale, clamp
    ("scale", ("[4,3].T", 2.0), S, "gaps between rows"),
    ("scale_inplace", ("[4,3,2].P", 2.0), S, "scale_inplace"),
    ("scale_bias", ("[4,3].T", 2.0, 1.0), S, "scale_bias"),
    ("scale_bias_inplace", ("[4,3].T", 2.0, 1.0), S, "scale_bias_inplace"),
    ("clamp", ("[4]", 1.0, -1.0), A, "min is 1.0 and max is -1.0"),
    ("clamp_inplace", ("[4]", float("nan"), 1.0), A, "nan"),
    # soft_max
    ("soft_max", ("[4,3].T",), S, "contiguous"),
    ("soft_max_inplace", ("[4,3].G",), S, "soft_max_inplace"),
    ("soft_max_ext", ("[4,3].T", None, 1.0, 0.0), S, "a has strides"),
    ("soft_max_ext", ("[4,3]", "[5,3]", 1.0, 0.0), S, "the mask must have"),
    ("soft_max_ext", ("[4,3]", "[4,2]", 1.0, 0.0), S, "the mask must have"),
    ("soft_max_ext", ("[4,3,4]", "[4,3,3]", 1.0, 0.0), S, "the mask must have"),
    ("soft_max_ext", ("[4,3]", "[4,3].T", 1.0, 0.0), S, "mask has strides"),
    ("soft_max_ext", ("[4,3]", "i32[4,3]", 1.0, 0.0), D, "mask is .* f16 or f32"),
    ("soft_max_ext_inplace", ("[4,3]", None, 1.0, 8.0), A, "needs a mask"),
    ("soft_max_ext_back", ("[4,3]", "[4,2]", 1.0, 0.0), S, "must equal"),
    # products
    ("mul_mat", ("[4,3]", "[5,3]"), S, "rows of 4 elements, b of 5"),
    ("mul_mat", ("[4,3,2]", "[4,3,3]"), S, "multiples"),
    ("mul_mat", ("[4,3].T", "[4,3]"), S, "not transposed"),
    ("mul_mat_id", ("[4,3,8]", "[5,2,6]", "i32[2,6]"), S, "rows of 4 elements, b of 5"),
    ("mul_mat_id", ("[4,3,8]", "[4,2,6]", "i32[2,5]"), S, r"ne\[1\] = b.ne\[2\] = 6"),
    ("mul_mat_id", ("[4,3,8]", "[4,2,6]", "i32[3,6]"), S, "multiple of 2"),
    ("mul_mat_id", ("[4,3,8]", "[4,2,6]", "i64[2,6]"), D, "ids is .* must be i32"),
    ("mul_mat_id", ("[4,3,8].T", "[4,2,6]", "i32[2,6]"), S, "not transposed"),
    ("mul_mat_id", ("[4,3,8,2]", "[4,2,6]", "i32[2,6]"), S, "3d"),
    ("mul_mat_id", ("[4,3,8]", "[4,2,6]", "i32[2,6,2]"), S, "ids 2d"),
    ("out_prod", ("[4,3]", "[5,2]"), S, r"\(3 and 2\)"),
    ("out_prod", ("[4,3].T", "[5,3]"), S, "not transposed"),
    ("mul_mat_set_prec", ("[4,3]", Prec.F32), A, "must be a MUL_MAT node"),
    ("prec_set_acc", ("[4,3]", Prec.F32), A, "must be a MUL_MAT, MUL_MAT_ID or FLASH_ATTN_EXT node"),
    ("prec_set_src", ("[4,3]", Prec.F32, 1), A, "must be a MUL_MAT or MUL_MAT_ID node"),
    ("mul_mat_set_hint", ("[4,3]", 1), A, "must be a MUL_MAT node"),
    # attention
    ("flash_attn_ext", ("[8,3,4]", "f16[6,5,2]", "f16[8,5,2]", None, 1.0, 0.0, 0.0), S, "q and k"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,3]", "f16[8,5,3]", None, 1.0, 0.0, 0.0), S, "q and k"),
    ("flash_attn_ext", ("[8,3,4,2]", "f16[8,5,2,2]", "f16[8,5,2]", None, 1.0, 0.0, 0.0), S, "v must"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,6,2]", None, 1.0, 0.0, 0.0), S, "v must"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,5,2]", "[5,3]", 1.0, 0.0, 0.0), D, "f16"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,5,2]", "f16[5,3].T", 1.0, 0.0, 0.0), S, "mask"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,5,2]", "f16[5,3,3]", 1.0, 0.0, 0.0), S, "divide"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,5,2]", "f16[4,3]", 1.0, 0.0, 0.0), S, "mask must"),
    ("flash_attn_ext", ("[8,3,4]", "f16[8,5,2]", "f16[8,5,2]", None, 1.0, 8.0, 0.0), A, "needs a mask"),
    ("flash_attn_ext_set_prec", ("[4]", Prec.F32), A, "FLASH_ATTN_EXT node"),
    ("flash_attn_ext_get_prec", ("[4]",), A, "FLASH_ATTN_EXT node"),
    ("flash_attn_ext_add_sinks", ("[4]", "[4]"), A, "FLASH_ATTN_EXT node"),
    ("soft_max_add_sinks", ("[4]", "[4]"), A, "SOFT_MAX node"),
    ("flash_attn_back", ("[8,3,4]", "[8,5,2]", "[8,5,2]", "[8,3,4]", False), S, "v must have"),
    # rope
    ("rope", ("[8,2,3]", "i32[4]", 8, 0), S, "3 positions"),
    ("rope", ("[8,2,3]", "i32[3,2]", 8, 0), S, "in one row"),
    ("rope_inplace", ("[8,2,3]", "[3]", 8, 0), D, "b is .* must be i32"),
    ("rope_ext", ("[8,2,3]", "i32[3]", "[3]", 8, 2, *ROPE), S, "at least 4 frequency factors"),
    ("rope_ext", ("[8,2,3]", "i32[3]", "f16[4]", 8, 2, *ROPE), D, "c is .* must be f32"),
    ("rope_ext", ("[8,2,3]", "i32[3]", None, 8, 1, *ROPE), A, "1 is not a RopeType"),
    ("rope_ext_inplace", ("[8,2,3]", "i32[3]", None, 10, 0, *ROPE), A, "n_dims is 10"),
    ("rope_ext_back", ("[8,2,3]", "i32[3]", None, 7, 0, *ROPE), A, "must be even"),
    ("rope_custom", ("[8,2,3]", "i32[2]", 8, 0, *ROPE), S, "rope_custom"),
    ("rope_custom_inplace", ("[8,2,3]", "i32[2]", 8, 0, *ROPE), S, "rope_custom_inplace"),
    ("rope_multi", ("[8,2,3]", "i32[3]", None, 8, [1, 1, 1, 1], 8, *ROPE), S, "12 positions"),
    ("rope_multi_inplace", ("[8,2,3]", "i32[12]", None, 8, [1, 1], 8, *ROPE), A, "four counts"),
    (
        "rope_multi_back",
        ("[8,2,3]", "i32[12]", None, 8, [1, 1, 1, 1], RopeType.VISION, *ROPE),
        A,
        "VISION needs half",
    ),
    ("rope_set_offset", ("[8,2,3]", 2), A, "must be a ROPE node"),
    # rows
    ("get_rows", ("[4,5,3]", "i32[2,2]"), S, r"ne\[1:\] of b"),
    ("get_rows", ("[4,5]", "i64[2]"), D, "b is .* must be i32"),
    ("get_rows_back", ("[4,3,2]", "i32[3]", "[4,9]"), S, "matrices"),
    ("get_rows_back", ("[4,3]", "i32[3]", "[5,9]"), S, "equal ne"),
    ("get_rows_back", ("[4,3]", "i32[4]", "[4,9]"), S, "more elements"),
    ("get_rows_back", ("[4,3]", "[3]", "[4,9]"), D, "i32"),
    ("set_rows", ("[4,9]", "[5,3]", "i64[3]"), S, "a and b must have equal"),
    ("set_rows", ("[4,9]", "[4,3]", "i64[2]"), S, r"ne\[0\] of c"),
    ("set_rows", ("[4,9,4]", "[4,3,4]", "i64[3,3]"), S, "must divide"),
    ("set_rows", ("[4,9]", "i32[4,3]", "i64[3]"), D, "b is .* f32 or f16"),
    ("set_rows", ("[4,9]", "[4,3]", "[3]"), D, "c is .* i64 or i32"),
    ("set_rows", ("[4,9].T", "[4,3]", "i64[3]"), S, "a has strides"),
    ("set_rows", ("[4,9]", "[4,3].T", "i64[3]"), S, "b has strides"),
    # copies
    ("cpy", ("[4,3]", "[4,4]"), S, "a has 12 elements, b 16"),
    ("cast", ("[4,3]", "q8_0"), S, "multiple of 32"),
    ("cast", ("[4,3]", "f17"), D, "F16"),
    ("cont_1d", ("[4,3]", 13), S, "as many elements as a, 12"),
    ("cont_2d", ("[4,3]", 4, 4), S, "cont_2d"),
    ("cont_3d", ("[4,3]", 2, 2, 2), S, "cont_3d"),
    ("cont_4d", ("[4,3]", 2, 2, 3, 2), S, "cont_4d"),
    ("reshape_3d", ("[4,3].T", 2, 2, 3), S, "apply cont first"),
    ("set", ("[4,3]", "[4,3]", 16, 48, 48, 4), S, "ends outside"),
    ("set", ("[4,3]", "f16[4,3]", 16, 48, 48, 0), D, "b is .* must be f32"),
    ("set_inplace", ("[4,3]", "[2,3]", -16, 48, 48, 32), S, "negative"),
    ("set", ("[4,3].G", "[2,1]", 16, 48, 48, 16), S, "must be contiguous: apply cont first"),
    ("set_inplace", ("[4,3].T", "[2,1]", 16, 48, 48, 0), S, "must be contiguous"),
    ("set", ("[4,3]", "[2,2]", 4, 48, 48, 0), S, "overlap"),
    ("set", ("[4,3]", "[2,2]", 18, 48, 48, 0), S, "multiples of 4 bytes"),
    ("acc_inplace", ("[4,3]", "[2]", 16, 48, 48, 2), S, "multiples of 4 bytes"),
    ("set_1d", ("[4,3]", "[8]", 20), S, "set_1d"),
    ("set_1d_inplace", ("[4,3]", "[8]", 20), S, "set_1d_inplace"),
    ("set_2d", ("[4,3]", "[2,3]", 16, 12), S, "set_2d"),
    ("set_2d_inplace", ("[4,3]", "[2,3]", 16, 12), S, "set_2d_inplace"),
    # reductions, selection
    ("cumsum", ("f16[4]",), D, "a is .* must be f32"),
    ("count_equal", ("i32[4]", "i32[5]"), S, "must equal"),
    ("argmax", ("[4,3,2]",), S, "must be a matrix"),
    ("argsort", ("[4]", 2), A, "SortOrder"),
    ("top_k", ("[4]", 5), A, "k is 5"),
    ("argsort_top_k", ("[4]", 5), A, "k is 5"),
    ("top_k", ("[4]", -1), A, "k is -1"),
    # shape
    ("repeat", ("[4,3]", "[6,3]"), S, "must divide"),
    ("repeat_4d", ("[4,3]", 4, 4, 1, 1), S, r"must divide that of ne \[4, 4, 1, 1\]"),
    ("repeat_back", ("[4,3]", "[3,3]"), S, "must divide"),
    ("concat", ("[4,3]", "[4,2]", 0), S, r"all extents but ne\[0\]"),
    ("concat", ("[4,3]", "f16[4,3]", 0), D, "b is .* must be f32"),
    ("concat", ("[4,3]", "[4,3]", 4), A, "dim is 4"),
    ("pad", ("[4,3]", -1, 0, 0, 0), A, "none may be negative"),
    ("pad_circular", ("[4,3]", 0, -1, 0, 0), A, "pad_circular"),
    ("pad_ext", ("[4,3]", 1, 1, -1, 0, 0, 0, 0, 0), A, "pad_ext"),
    ("pad_ext_circular", ("[4,3]", 1, 1, 0, -1, 0, 0, 0, 0), A, "pad_ext_circular"),
    ("pad_reflect_1d", ("[4,3]", 4, 0), A, "must be less than the row length"),
    ("pad_reflect_1d", ("[4,3].T", 1, 1), S, "contiguous"),
    ("pad_reflect_1d", ("f16[4,3]", 1, 1), D, "f32"),
    ("roll", ("[4,3]", 4, 0, 0, 0), A, "smaller than the extents"),
    ("roll", ("[4,3]", 0, -3, 0, 0), A, "smaller than the extents"),
    ("roll", ("[4,3].T", 1, 0, 0, 0), S, "contiguous within its rows"),
    # constants
    ("arange", (1.0, 1.0, 1.0), A, "stop must be above start"),
    ("arange", (0.0, 1.0, 0.0), A, "step above 0"),
    ("fill", ("bf16[4]", 1.0), D, "f32 or f16"),
    ("fill_inplace", ("[4,3].T", 1.0), S, "contiguous"),
    ("tri", ("[4,3]", TriType.LOWER), S, "must be equal"),
    ("tri", ("f16[4,4]", TriType.LOWER), D, "f32"),
    ("tri", ("[4,4].T", TriType.LOWER), S, "contiguous"),
    ("tri", ("[4,4]", 4), A, "TriType"),
    ("diag", ("[4,3]",), S, r"ne\[1\] is 3"),
    ("timestep_embedding", ("[4]", 0, 10000), A, "must be positive"),
    # convolution
    ("im2col", ("f16[3,3,2,4]", "[8,8,3]", 1, 1, 0, 0, 1, 1, True, "f32"), S, "2 channels"),
    ("im2col", ("f16[3,2,4]", "[8,3]", 1, 0, 0, 0, 1, 0, False, "f32"), S, "the channels"),
    ("im2col", ("f16[9,3,2,4]", "[8,8,2]", 1, 1, 0, 0, 1, 1, True, "f32"), S, "larger than the padded"),
    ("im2col", ("f16[3,9,2,4]", "[8,8,2]", 1, 1, 0, 0, 1, 1, True, "f32"), S, "dimension 1"),
    ("im2col", ("f16[3,3,2,4]", "[8,8,2]", 0, 1, 0, 0, 1, 1, True, "f32"), A, "s0 = 0"),
    ("im2col_back", ("[18,6,6]", "[3,3,2,4]", [8, 8, 2, 1, 1], 1, 1, 0, 0, 1, 1, True), S, "one to four"),
    ("im2col_3d", ("f16[3,3,3,4]", "[8,8,8,3]", 2, 1, 1, 1, 0, 0, 0, 1, 1, 1, "f16"), S, "IC = 2"),
    ("im2col_3d", ("f16[3,3,9,4]", "[8,8,8,2]", 2, 1, 1, 1, 0, 0, 0, 1, 1, 1, "f16"), S, "dimension 2"),
    ("conv_1d", ("f16[3,2,4]", "[8,3]", 1, 1, 1), S, "the channels"),
    ("conv_1d_ph", ("f16[3,2,4]", "[8,3]", 1, 1), S, "the channels"),
    ("conv_1d_dw", ("f16[3,2,4]", "[8,4]", 1, 1, 1), S, "the channels"),
    ("conv_1d_dw_ph", ("f16[3,2,4]", "[8,4]", 1, 1), S, "the channels"),
    ("conv_2d", ("f16[3,3,2,4]", "[8,8,3]", 1, 1, 0, 0, 1, 1), S, "2 channels"),
    ("conv_2d_sk_p0", ("f16[9,9,2,4]", "[8,8,2]"), S, "larger than the padded"),
    ("conv_2d_s1_ph", ("f16[3,3,2,4]", "[8,8,3]"), S, "2 channels"),
    ("conv_2d_dw", ("f16[9,3,1,4]", "[8,8,4]", 1, 1, 0, 0, 1, 1), S, "larger than the padded"),
    ("conv_3d", ("f16[3,3,3,4]", "[8,8,8,3]", 2, 1, 1, 1, 0, 0, 0, 1, 1, 1), S, "IC = 2"),
    ("conv_2d_direct", ("f16[3,3,2,4]", "[8,8,3]", 1, 1, 0, 0, 1, 1), S, "2 channels"),
    ("conv_2d_direct", ("f16[3,3,2,4]", "[8,8,2]", 1, 1, -1, 0, 1, 1), A, "p0 = -1"),
    ("conv_2d_dw_direct", ("f16[3,3,2,4]", "[8,8,4]", 1, 1, 0, 0, 1, 1), S, r"ne\[2\] = 1"),
    ("conv_2d_dw_direct", ("f16[3,3,1,3]", "[8,8,4]", 1, 1, 0, 0, 1, 1), S, r"ne\[3\] = 4"),
    (
        "conv_3d_direct",
        ("f16[3,3,3,4]", "[8,8,8,2]", 1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 1, 3),
        S,
        r"c \* oc = 6",
    ),
    ("conv_transpose_1d", ("[3,4,2]", "[8,3]", 1, 0, 1), S, r"ne\[2\] = 3"),
    ("conv_transpose_1d", ("[3,4,2]", "[8,2,2]", 1, 0, 1), S, "matrix"),
    ("conv_transpose_1d", ("[3,4,2]", "[8,2]", 1, 1, 1), A, "p0 be 0"),
    ("conv_transpose_1d", ("[3,4,2]", "[8,2]", 1, 0, 2), A, "d0 be 1"),
    ("conv_transpose_2d_p0", ("f16[3,3,4,2]", "[8,8,3]", 2), S, r"ne\[3\] = 3"),
    ("conv_transpose_2d_p0", ("f16[3,3,4,2]", "[8,8,2]", 0), A, "stride is 0"),
    ("col2im_1d", ("[6,4,2]", 1, 2, 0), S, "matrix"),
    ("col2im_1d", ("[6,4].T", 1, 2, 0), S, "contiguous"),
    ("col2im_1d", ("i32[6,4]", 1, 2, 0), D, "f32 or f16 or bf16"),
    ("col2im_1d", ("[6,4]", 0, 2, 0), A, "s0 = 0"),
    ("col2im_1d", ("[6,4]", 1, 4, 0), S, "multiple of oc = 4"),
    ("col2im_1d", ("[6,4]", 1, 2, 3), A, "leaves no element"),
    # pooling, interpolation
    ("pool_1d", ("[4]", OpPool.MAX, 5, 1, 0), S, "window of 5"),
    ("pool_1d", ("[4]", OpPool.MAX, 2, 0, 0), A, "s0 = 0"),
    ("pool_1d", ("[4]", 7, 2, 2, 0), A, "OpPool"),
    ("pool_2d", ("[4,2]", OpPool.AVG, 2, 3, 1, 1, 0.0, 0.0), S, "dimension 1"),
    ("pool_2d", ("[4,2]", 9, 2, 2, 1, 1, 0.0, 0.0), A, "OpPool"),
    ("pool_2d_back", ("[2,2]", "[6,6]", OpPool.AVG, 2, 2, 2, 2, 0, 0), S, r"a must have ne \[3, 3"),
    ("upscale", ("[4,4]", 1, ScaleMode.NEAREST), A, "more than 1"),
    ("upscale_ext", ("f16[4,4]", 8, 8, 1, 1, ScaleMode.NEAREST), D, "f32"),
    ("interpolate", ("[4,4]", 8, 8, 1, 1, 3), A, "ScaleMode"),
    ("interpolate", ("[4,4]", 8, -8, 1, 1, 0), S, "none negative"),
    (
        "interpolate",
        ("[4,4]", 8, 8, 1, 1, ScaleMode.BICUBIC | ScaleFlag.ANTIALIAS),
        A,
        "ANTIALIAS needs BILINEAR",
    ),
    # recurrent layers
    ("ssm_conv", ("[8,5,2]", "[4,6]"), S, "sx must be 3d"),
    ("ssm_conv", ("[2,6,2]", "[4,6]"), S, "at most one longer"),
    *[
        ("ssm_scan", args, error, part)
        for args, error, part in [
            (
                ("[16,8,4,2].T", "[8,4,3,2]", "[4,3,2]", "[1,4]", "[16,2,3,2]", "[16,2,3,2]",
                 "i32[2]"), S, "s has strides",
            ),
            (
                ("[16,8,4,2]", "[8,4,3,2].G", "[4,3,2]", "[1,4]", "[16,2,3,2]", "[16,2,3,2]",
                 "i32[2]"), S, "x has strides",
            ),
            (
                ("[16,8,4,2]", "[8,4,3,2]", "[4,3,1]", "[1,4]", "[16,2,3,2]", "[16,2,3,2]",
                 "i32[2]"), S, r"dt must have ne \[4, 3, 2, 1\]",
            ),
            (
                ("[16,8,4,2]", "[8,4,3,2]", "[4,3,2]", "[2,4]", "[16,2,3,2]", "[16,2,3,2]",
                 "i32[2]"), S, r"A must have ne \[16, 4, 1, 1\]",
            ),
            (
                ("[16,8,4,2]", "[8,4,3,2]", "[4,3,2]", "[1,4]", "[16,2,3,2]", "[16,1,3,2]",
                 "i32[2]"), S, "C must have",
            ),
            *[
                (
                    ("[16,8,4,2]", "[8,4,3,2]", "[4,3,2]", "[1,4]", f"[16,{n},3,2]", f"[16,{n},3,2]",
                     "i32[2]"), S, f"{n} groups, which must divide the 4 heads",
                )
                for n in (0, 3, 8)
            ],
            (
                ("[16,8,4,2]", "[8,4,3,2]", "[4,3,2]", "[1,4]", "[16,2,3,2]", "[16,2,3,2]",
                 "i64[2]"), D, "ids is",
            ),
            (
                ("[16,8,4,2]", "[8,4,3,2]", "[4,3,2]", "[1,4]", "[16,2,3,2]", "[16,2,3,2]",
                 "i32[2]", 0), A, "K is 0",
            ),
        ]
    ],
    ("rwkv_wkv6", ("[8,2,3]", "[8,2,4]", "[8,2,3]", "[8,2]", "[8,2,3]", "[128,1]"), S, "v must"),
    ("rwkv_wkv6", ("[8,2,3]", "[8,2,3]", "[8,2,3]", "[8,3]", "[8,2,3]", "[128,1]"), S, "tf must"),
    ("rwkv_wkv6", ("[8,2,3]", "[8,2,3]", "[8,2,3]", "[8,2]", "[8,2,3]", "[64,1]"), S, "state must"),
    (
        "rwkv_wkv7",
        ("[8,2,3]", "[8,2,3]", "[8,2,3]", "[8,2,3]", "[8,2,3]", "[8,3,3]", "[128,1]"),
        S,
        "b must have",
    ),
    ("gated_linear_attn", ("[8,2,3]", "[8,2,3]", "[8,2,3]", "[8,2,3].T", "[128,1]", 1.0), S, "g has"),
    *[
        ("gated_delta_net", args, error, part)
        for args, error, part in [
            (("[8,2,3]", "[8,2,3]", "[8,4,3]", "[1,4,3]", "[1,4,3]", "[8,8,3]", 1), S, "state"),
            (("[8,3,3]", "[8,3,3]", "[8,4,3]", "[1,4,3]", "[1,4,3]", "[8,8,4]", 1), S, "3 heads"),
            (("[8,2,3]", "[8,2,3]", "[8,4,3]", "[2,4,3]", "[1,4,3]", "[8,8,4]", 1), S, "g must"),
            (("[8,2,3]", "[8,2,3]", "[8,4,3]", "[1,4,3]", "[8,4,3]", "[8,8,4]", 1), S, "beta"),
            (("f16[8,2,3]", "[8,2,3]", "[8,4,3]", "[1,4,3]", "[1,4,3]", "[8,8,4]", 1), D, "q is"),
            (("[8,2,3].T", "[8,2,3]", "[8,4,3]", "[1,4,3]", "[1,4,3]", "[8,8,4]", 1), S, "q has"),
            (("[8,2,3]", "[8,2,3]", "[8,4,3]", "[1,4,3]", "[1,4,3]", "[8,8,4]", 0), A, "K is 0"),
        ]
    ],
    ("solve_tri", ("[4,3]", "[2,3]", True, True, False), S, "square"),
    ("solve_tri", ("[4,4]", "[2,3]", True, True, False), S, "square"),
    ("solve_tri", ("f16[4,4]", "[2,4]", True, True, False), D, "a is"),
    ("solve_tri", ("[4,4].T", "[2,4]", True, True, False), S, "a has strides"),
    ("solve_tri", ("[4,4]", "[2,4]", False, True, False), A, "only left"),
    # losses and optimiser steps
    ("cross_entropy_loss", ("[4,3]", "[4,2]"), S, "must equal"),
    ("cross_entropy_loss_back", ("[2]", "[4,3]", "[4,3]"), S, "a must be a scalar"),
    ("cross_entropy_loss_back", ("[1]", "[4,3]", "[4,2]"), S, "must equal"),
    ("opt_step_adamw", ("[4]", "[4]", "[4]", "[4]", "[7]"), A, "call set_param"),
    ("opt_step_adamw", ("[4].W", "[4]", "[5]", "[4]", "[7]"), S, "must equal"),
    ("opt_step_adamw", ("[4].W", "[4]", "[4]", "[4]", "[6]"), S, "7 numbers"),
    ("opt_step_adamw", ("[4].W", "[4]", "[4]", "[4]", "f16[7]"), D, "adamw_params is"),
    ("opt_step_sgd", ("[4]", "[4]", "[2]"), A, "call set_param"),
    ("opt_step_sgd", ("[4].W", "[4]", "[3]"), S, "2 numbers"),
    # numbers out of range
    ("soft_max_ext", ("[4,3]", "[4,3]", 1.0, -1.0), A, "max_bias is -1.0; give a finite number, 0 or more"),
    ("soft_max_ext_back", ("[4,3]", "[4,3]", float("nan"), 0.0), A, "scale is nan; give a finite"),
    ("flash_attn_ext", ("[8,3]", "f16[8,5]", "f16[8,5]", "f16[5,3]", 1.0, -2.0), A, "max_bias"),
    ("flash_attn_ext", ("[8,3]", "f16[8,5]", "f16[8,5]", None, 1.0, 0.0, -5.0), A, "logit_softcap"),
    ("swiglu_oai", ("[4,3]", "[4,3]", 1.7, -7.0), A, "limit"),
    ("swiglu_clamp", ("[4,3]", "[4,3]", -7.0), A, "limit"),
    ("leaky_relu", ("[4,3]", float("inf")), A, "negative_slope"),
    ("xielu", ("[4,3]", 1e39, 0.1, 0.1, 0.1), A, "alpha_n"),
    ("rope_ext", ("[8,2,3]", "i32[3]", None, 8, 0, 0, 0.0), A, "freq_base"),
    ("rope_ext", ("[8,2,3]", "i32[3]", None, 8, 0, 0, 1e4, 0.0, 1.0), A, "with an ext_factor"),
    # windows
    ("win_part", ("[4,5,6,2]", 3), S, r"ne\[3\] is 2"),
    ("win_part", ("f16[4,5,6]", 3), D, "f32"),
    ("win_part", ("[4,5,6]", 0), A, "w is 0"),
    ("win_unpart", ("[4,3,3,3]", 5, 6, 3), S, "4 windows of 3 by 3"),
    ("win_unpart", ("f16[4,3,3,4]", 5, 6, 3), D, "f32"),
    ("get_rel_pos", ("f16[4,7]", 4, 5), A, "must be equal"),
    ("get_rel_pos", ("f16[4,6]", 4, 4), S, "= 7 rows"),
    ("add_rel_pos", ("[9,6,2]", "[3,2,3,2]", "[3,2,3,1]"), S, "equal shapes"),
    ("add_rel_pos", ("[8,6,2]", "[3,2,3,2]", "[3,2,3,2]"), S, r"a ne \[9, 6, 2\]"),
    ("add_rel_pos_inplace", ("[9,6,2]", "f16[3,2,3,2]", "[3,2,3,2]"), D, "pw is"),
    ("add_rel_pos_inplace", ("[9,6,2].T", "[3,2,3,2]", "[3,2,3,2]"), S, "a has strides"),
    # DeepSeek
    ("lightning_indexer", ("[8,4,3]", "f16[8,1,5]", "[4,3]", "f16[6,3]"), S, "k must have"),
    ("lightning_indexer", ("[8,4,3]", "f16[8,1,5]", "f16[4,3]", "f16[5,3]"), D, "weights is"),
    ("dsv4_hc_pre", ("[8,4,3]", "[4,2]"), S, r"must have ne \[4, 3, 1, 1\]"),
    ("dsv4_hc_pre_gated", ("[8,4,3]", "[4,3]", 1.0), S, r"must have ne \[8, 4, 3, 1\]"),
    ("dsv4_hc_pre_gated", ("[8,4,3]", "[8,4,3]", float("inf")), A, "scale is inf"),
    ("dsv4_hc_post", ("[8,3]", "[8,4,3]", "[4,3]", "[4,3,3]"), S, r"must have ne \[4, 4, 3, 1\]"),
    ("dsv4_hc_comb", ("[23,5]", "[3]", "[23]", 1e-6, 4), S, "row length 23"),
    ("dsv4_hc_comb", ("[24,5]", "[2]", "[24]", 1e-6, 4), S, r"must have ne \[3"),
    ("dsv4_hc_comb", ("[24,5]", "f16[3]", "[24]", 1e-6, 4), D, "must be f32"),
    ("dsv4_hc_comb", ("[24,5]", "[3]", "[24]", 1e-6, 0), A, "n_iter is 0"),
    # custom
    ("map_custom1", ("[4]", 3, 1, None), A, "fun is an int; give a function"),
    ("map_custom2", ("[4]", "[4]", _nothing, 0, None), A, "n_tasks is 0"),
    ("map_custom3_inplace", ("[4]", "[4]", "[4]", _nothing, -2, None), A, "map_custom3_inplace"),
    ("custom_4d", ("f32", 4, 1, 1, -1, (), _nothing, 1, None), S, "none negative"),
    ("custom_4d", ("f32", 4, 1, 1, 1, ("[4]",) * 10, _nothing, 1, None), A, "at most 9"),
    ("custom_inplace", ("[4]", ("[4]",) * 9, _nothing, 1, None), A, "at most 8"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "error", "part"), WRONG)
def test_wrong_call(fn, args, error, part):
    with pytest.raises(error, match=part) as caught:
        call(Context(), fn, args)
    assert type(caught.value) is error
    assert isinstance(caught.value, Error)
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not any("Tensor" in type(v).__name__ for v in vars(caught.value).values())


def test_the_table_covers_every_family():
    from ggmlb.core.ops.base import OpBase

    families = [k for k in Context.__mro__ if issubclass(k, OpBase) and k not in (Context, OpBase)]
    tried = {fn for fn, *_ in WRONG}
    views = {"ViewOps"}  # test_views.py
    for family in families:
        assert family.__name__ in views or tried & set(vars(family)), family
    assert len(families) > 20
