"""The op families: what each op takes, checks and gives, and the params that backends read.

A node keeps ggml's sources in ggml's places; an optional one that is absent is None. Some families say more:

    CPY          of `cpy`: (a, b), a view of b; of `cast`: (a,), a new tensor
    SET_ROWS     (b, c, a), a view of a
    GLU          (a, b or None)
    SOFT_MAX     (a, mask or None, sinks or None)
    ROPE, ROPE_BACK        (a, positions, frequency factors or None)
    FLASH_ATTN_EXT         (q, k, v, mask or None, sinks or None)

A node with `view_src` that is no view op writes into that tensor, which is among its sources.
"""

from __future__ import annotations

from typing import Final

from ggmlb.core.enums import Op

_CONV_2D: Final = ("s0", "s1", "p0", "p1", "d0", "d1")
_CONV_3D: Final = ("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2")
_POOL_2D: Final = ("op", "k0", "k1", "s0", "s1", "p0", "p1")
_WINDOW: Final = ("nb1", "nb2", "nb3", "offset", "inplace")
_CUSTOM: Final = ("fun", "n_tasks", "userdata")
_ROPE: Final = (
    "n_dims", "mode", "n_ctx_orig", "freq_base", "freq_scale", "ext_factor", "attn_factor",
    "beta_fast", "beta_slow", "sections", "offset",
)  # fmt: skip

PARAMS: Final[dict[Op, tuple[str, ...]]] = {
    Op.ACC: _WINDOW,
    Op.ADD_REL_POS: ("inplace",),
    Op.ARANGE: ("start", "stop", "step"),
    Op.ARGSORT: ("order",),  # SortOrder
    Op.CLAMP: ("min", "max"),
    Op.COL2IM_1D: ("s0", "oc", "p0"),
    Op.CONCAT: ("dim",),
    Op.CONV_2D: _CONV_2D,
    Op.CONV_2D_DW: _CONV_2D,
    Op.CONV_3D: (*_CONV_3D, "c", "n", "oc"),
    Op.CONV_TRANSPOSE_1D: ("s0", "p0", "d0"),
    Op.CONV_TRANSPOSE_2D: ("stride",),
    Op.CUSTOM: _CUSTOM,
    Op.DIAG_MASK_INF: ("n_past",),
    Op.DIAG_MASK_ZERO: ("n_past",),
    Op.DSV4_HC_COMB: ("eps", "n_iter"),
    Op.FILL: ("value",),
    Op.FLASH_ATTN_BACK: ("masked",),
    Op.FLASH_ATTN_EXT: ("scale", "max_bias", "logit_softcap", "prec"),  # prec: Prec
    Op.GATED_DELTA_NET: ("k",),
    Op.GATED_LINEAR_ATTN: ("scale",),
    Op.GLU: ("op", "swapped"),  # op: GluOp; SWIGLU_OAI adds alpha, limit
    Op.GROUP_NORM: ("n_groups", "eps"),
    Op.IM2COL: (*_CONV_2D, "is_2d"),
    Op.IM2COL_3D: (*_CONV_3D, "ic"),
    Op.IM2COL_BACK: (*_CONV_2D, "is_2d"),
    Op.L2_NORM: ("eps",),
    Op.LEAKY_RELU: ("negative_slope",),
    Op.MAP_CUSTOM1: _CUSTOM,
    Op.MAP_CUSTOM2: _CUSTOM,
    Op.MAP_CUSTOM3: _CUSTOM,
    Op.MUL_MAT: ("prec", "hint"),  # Prec, Hint
    Op.NORM: ("eps",),
    Op.PAD: ("left", "right", "circular"),  # left, right: four widths
    Op.PAD_REFLECT_1D: ("left", "right"),
    Op.PERMUTE: ("axes",),  # four; dimension i of the source is dimension axes[i] of the view
    Op.POOL_1D: ("op", "k0", "s0", "p0"),  # op: OpPool
    Op.POOL_2D: _POOL_2D,
    Op.POOL_2D_BACK: _POOL_2D,
    Op.RMS_NORM: ("eps",),
    Op.RMS_NORM_BACK: ("eps",),
    Op.ROLL: ("shifts",),  # four
    Op.ROPE: _ROPE,  # mode: RopeType; sections: four; offset: the first rotated dimension
    Op.ROPE_BACK: _ROPE,
    Op.SCALE: ("scale", "bias"),
    Op.SET: _WINDOW,
    Op.SOFT_MAX: ("scale", "max_bias"),
    Op.SOFT_MAX_BACK: ("scale", "max_bias"),
    Op.SSM_SCAN: ("k",),
    Op.TIMESTEP_EMBEDDING: ("dim", "max_period"),
    Op.TOP_K: ("k",),
    Op.TRI: ("type",),  # TriType
    Op.UNARY: ("op",),  # UnaryOp; XIELU adds alpha_n, alpha_p, beta, eps
    Op.UPSCALE: ("mode", "align_corners", "antialias"),  # mode: ScaleMode
    Op.WIN_PART: ("npx", "npy", "w"),
    Op.WIN_UNPART: ("w",),
}
"""The names in `Tensor.params` by op; an op that is not here has none."""
