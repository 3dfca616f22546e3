"""One small node of every op, for any type of its main operand: what `ggmlb ops` asks devices about.

The main operand is the one whose type users choose: the weight of a product, the tensor that is copied
or looked up, the KV cache of an attention. The others have the types that models give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import GluOp, Op, OpPool, ScaleMode, TriType, UnaryOp
from ggmlb.core.errors import DTypeError, ShapeError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Device

Sample = Callable[[Context, DType], Tensor]

F32, F16, I32, I64 = DType.F32, DType.F16, DType.I32, DType.I64
ROW: Final = 256
"""Elements in a row: a whole number of blocks of every type."""


def _main(c: Context, dtype: DType, *ne: int) -> Tensor:
    return c.new_tensor(dtype, ne or (ROW, 4))


def _f32(c: Context, *ne: int) -> Tensor:
    return c.new_tensor(F32, ne)


def _i32(c: Context, *ne: int) -> Tensor:
    return c.new_tensor(I32, ne)


def _custom(*arrays: object) -> None:
    """A user's function."""


def _unary(op: UnaryOp) -> Sample:
    if op is UnaryOp.XIELU:
        return lambda c, t: c.xielu(_main(c, t), 0.8, 0.8, 0.5, -1e-6)
    return lambda c, t: c.unary(_main(c, t), op)


def _glu(op: GluOp) -> Sample:
    if op is GluOp.SWIGLU_OAI:
        return lambda c, t: c.swiglu_oai(_main(c, t), _main(c, t), 1.7, 7.0)
    return lambda c, t: c.glu(_main(c, t), op)


def _flash_attn(c: Context, t: DType) -> Tensor:
    k, v = _main(c, t, ROW, 32, 2), _main(c, t, ROW, 32, 2)
    return c.flash_attn_ext(_f32(c, ROW, 4, 4), k, v, c.new_tensor(F16, (32, 4)), 0.1)


def _ssm_scan(c: Context, t: DType) -> Tensor:
    state, heads, tokens = 16, 4, 3
    return c.ssm_scan(
        _main(c, t, state, 8, heads, 1), _f32(c, 8, heads, tokens, 1), _f32(c, heads, tokens, 1),
        _f32(c, 1, heads), _f32(c, state, 1, tokens, 1), _f32(c, state, 1, tokens, 1), _i32(c, 1),
    )  # fmt: skip


def _wkv6(c: Context, t: DType) -> Tensor:
    k, v, r, td = (_main(c, t, 64, 2, 3) for _ in range(4))
    return c.rwkv_wkv6(k, v, r, _f32(c, 64, 2), td, _f32(c, 64 * 64 * 2, 1))


def _wkv7(c: Context, t: DType) -> Tensor:
    r, w, k, v, a, b = (_main(c, t, 64, 2, 3) for _ in range(6))
    return c.rwkv_wkv7(r, w, k, v, a, b, _f32(c, 64 * 64 * 2, 1))


def _gated_linear_attn(c: Context, t: DType) -> Tensor:
    k, v, q, g = (_main(c, t, 64, 2, 3) for _ in range(4))
    return c.gated_linear_attn(k, v, q, g, _f32(c, 64 * 64 * 2, 1), 0.1)


def _gated_delta_net(c: Context, t: DType) -> Tensor:
    size, heads, tokens = 16, 2, 3
    q, k, v = (_main(c, t, size, heads, tokens, 1) for _ in range(3))
    g, beta = _f32(c, 1, heads, tokens, 1), _f32(c, 1, heads, tokens, 1)
    return c.gated_delta_net(q, k, v, g, beta, _f32(c, size, size, heads, 1))


def _opt_step_adamw(c: Context, t: DType) -> Tensor:
    a = c.set_param(_main(c, t))
    return c.opt_step_adamw(a, _f32(c, ROW, 4), _f32(c, ROW, 4), _f32(c, ROW, 4), _f32(c, 7))


SAMPLES: Final[dict[str, Sample]] = {
    "dup": lambda c, t: c.dup(_main(c, t)),
    "cont": lambda c, t: c.cont(_main(c, t)),
    "cpy (from f32)": lambda c, t: c.cpy(_f32(c, ROW, 4), _main(c, t)),
    "cpy (to f32)": lambda c, t: c.cpy(_main(c, t), _f32(c, ROW, 4)),
    "set": lambda c, t: c.set_2d(_main(c, t), _main(c, t, ROW, 2), DType.row_size(t, ROW), 0),
    "get_rows": lambda c, t: c.get_rows(_main(c, t), _i32(c, 3)),
    "get_rows_back": lambda c, t: c.get_rows_back(_main(c, t, ROW, 3), _i32(c, 3), _f32(c, ROW, 8)),
    "set_rows": lambda c, t: c.set_rows(_main(c, t), _f32(c, ROW, 2), c.new_tensor(I64, (2,))),
    "add": lambda c, t: c.add(_main(c, t), _f32(c, ROW, 4)),
    "sub": lambda c, t: c.sub(_main(c, t), _f32(c, ROW, 4)),
    "mul": lambda c, t: c.mul(_main(c, t), _f32(c, ROW, 4)),
    "div": lambda c, t: c.div(_main(c, t), _f32(c, ROW, 4)),
    "add1": lambda c, t: c.add1(_main(c, t), _f32(c, 1)),
    "add_id": lambda c, t: c.add_id(_main(c, t, ROW, 2, 3), _f32(c, ROW, 4), _i32(c, 2, 3)),
    "acc": lambda c, t: c.acc(_main(c, t), _f32(c, ROW, 2), 4 * ROW, 8 * ROW, 8 * ROW, 0),
    "scale": lambda c, t: c.scale(_main(c, t), 2.0),
    "clamp": lambda c, t: c.clamp(_main(c, t), -1.0, 1.0),
    "sqr": lambda c, t: c.sqr(_main(c, t)),
    "sqrt": lambda c, t: c.sqrt(_main(c, t)),
    "log": lambda c, t: c.log(_main(c, t)),
    "sin": lambda c, t: c.sin(_main(c, t)),
    "cos": lambda c, t: c.cos(_main(c, t)),
    "leaky_relu": lambda c, t: c.leaky_relu(_main(c, t), 0.1),
    "silu_back": lambda c, t: c.silu_back(_main(c, t), _main(c, t)),
    **{f"unary {op.name.lower()}": _unary(op) for op in UnaryOp},
    **{f"glu {op.name.lower()}": _glu(op) for op in GluOp},
    "sum": lambda c, t: c.sum(_main(c, t)),
    "sum_rows": lambda c, t: c.sum_rows(_main(c, t)),
    "mean": lambda c, t: c.mean(_main(c, t)),
    "cumsum": lambda c, t: c.cumsum(_main(c, t)),
    "argmax": lambda c, t: c.argmax(_main(c, t)),
    "argsort": lambda c, t: c.argsort(_main(c, t)),
    "top_k": lambda c, t: c.top_k(_main(c, t), 4),
    "count_equal": lambda c, t: c.count_equal(_main(c, t), _main(c, t)),
    "norm": lambda c, t: c.norm(_main(c, t), 1e-5),
    "rms_norm": lambda c, t: c.rms_norm(_main(c, t), 1e-5),
    "rms_norm_back": lambda c, t: c.rms_norm_back(_main(c, t), _main(c, t), 1e-5),
    "group_norm": lambda c, t: c.group_norm(_main(c, t, ROW, 4, 8), 2, 1e-5),
    "l2_norm": lambda c, t: c.l2_norm(_main(c, t), 1e-5),
    "mul_mat": lambda c, t: c.mul_mat(_main(c, t), _f32(c, ROW, 8)),
    "mul_mat_id": lambda c, t: c.mul_mat_id(_main(c, t, ROW, 4, 3), _f32(c, ROW, 1, 8), _i32(c, 2, 8)),
    "out_prod": lambda c, t: c.out_prod(_main(c, t), _f32(c, 8, 4)),
    "soft_max": lambda c, t: c.soft_max_ext(_main(c, t), c.new_tensor(F16, (ROW, 4)), 0.1, 0.0),
    "soft_max_back": lambda c, t: c.soft_max_ext_back(_main(c, t), _main(c, t)),
    "rope": lambda c, t: c.rope(_main(c, t, 64, 2, 3), _i32(c, 3), 64),
    "rope_back": lambda c, t: c.rope_ext_back(_main(c, t, 64, 2, 3), _i32(c, 3), None, 64),
    "flash_attn_ext": _flash_attn,
    "repeat": lambda c, t: c.repeat_4d(_main(c, t), 2 * ROW, 4, 2, 1),
    "repeat_back": lambda c, t: c.repeat_back(_main(c, t, ROW, 4), _f32(c, ROW, 2)),
    "concat": lambda c, t: c.concat(_main(c, t), _main(c, t), 1),
    "pad": lambda c, t: c.pad(_main(c, t), 1, 1),
    "pad_reflect_1d": lambda c, t: c.pad_reflect_1d(_main(c, t), 2, 3),
    "roll": lambda c, t: c.roll(_main(c, t), 1, 2),
    "tri": lambda c, t: c.tri(_main(c, t, ROW, ROW), TriType.LOWER),
    "diag": lambda c, t: c.diag(_main(c, t, ROW)),
    "diag_mask_inf": lambda c, t: c.diag_mask_inf(_main(c, t), 1),
    "diag_mask_zero": lambda c, t: c.diag_mask_zero(_main(c, t), 1),
    "fill": lambda c, t: c.fill(_main(c, t), 1.0),
    "arange": lambda c, t: c.arange(0, 8) if t == F32 else _unavailable(t),
    "timestep_embedding": lambda c, t: c.timestep_embedding(_main(c, t, 8), 64),
    "upscale": lambda c, t: c.upscale(_main(c, t, 16, 16, 3), 2, ScaleMode.BILINEAR),
    "im2col": lambda c, t: c.im2col(_main(c, t, 3, 3, 2, 4), _f32(c, 16, 16, 2), 1, 1, 1, 1, 1, 1, True),
    "im2col_3d": lambda c, t: c.im2col_3d(
        _main(c, t, 3, 3, 3, 2), _f32(c, 8, 8, 8, 1), 1, 1, 1, 1, 0, 0, 0, 1, 1, 1
    ),
    "conv_2d": lambda c, t: c.conv_2d_direct(_main(c, t, 3, 3, 2, 4), _f32(c, 16, 16, 2)),
    "conv_2d_dw": lambda c, t: c.conv_2d_dw_direct(_main(c, t, 3, 3, 1, 4), _f32(c, 16, 16, 4)),
    "conv_3d": lambda c, t: c.conv_3d_direct(
        _main(c, t, 3, 3, 3, 8), _f32(c, 8, 8, 8, 2), 1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 1, 4
    ),
    "conv_transpose_1d": lambda c, t: c.conv_transpose_1d(_main(c, t, 3, 4, 2), _f32(c, 16, 2)),
    "conv_transpose_2d": lambda c, t: c.conv_transpose_2d_p0(_main(c, t, 2, 2, 4, 2), _f32(c, 8, 8, 2), 2),
    "pool_1d": lambda c, t: c.pool_1d(_main(c, t), OpPool.MAX, 2, 2),
    "pool_2d": lambda c, t: c.pool_2d(_main(c, t, 16, 16, 2), OpPool.AVG, 2, 2, 2, 2),
    "ssm_conv": lambda c, t: c.ssm_conv(_main(c, t, 6, 8, 1), _f32(c, 4, 8)),
    "ssm_scan": _ssm_scan,
    "rwkv_wkv6": _wkv6,
    "rwkv_wkv7": _wkv7,
    "gated_linear_attn": _gated_linear_attn,
    "gated_delta_net": _gated_delta_net,
    "solve_tri": lambda c, t: c.solve_tri(_main(c, t, 16, 16), _f32(c, 8, 16)),
    "win_part": lambda c, t: c.win_part(_main(c, t, 8, 14, 14), 7),
    "win_unpart": lambda c, t: c.win_unpart(_main(c, t, 8, 7, 7, 4), 14, 14, 7),
    "get_rel_pos": lambda c, t: c.get_rel_pos(_main(c, t, 8, 7), 4, 4),
    "add_rel_pos": lambda c, t: c.add_rel_pos(
        _main(c, t, 16, 16, 2), _f32(c, 4, 4, 4, 2), _f32(c, 4, 4, 4, 2)
    ),
    "cross_entropy_loss": lambda c, t: c.cross_entropy_loss(_main(c, t), _f32(c, ROW, 4)),
    "cross_entropy_loss_back": lambda c, t: c.cross_entropy_loss_back(
        _f32(c, 1), _main(c, t), _f32(c, ROW, 4)
    ),
    "im2col_back": lambda c, t: c.im2col_back(
        _main(c, t, 18, 8, 7, 2), _f32(c, 3, 3, 2, 3), (8, 7, 2, 2), 1, 1, 1, 1, 1, 1, True
    ),
    "col2im_1d": lambda c, t: c.col2im_1d(_main(c, t, 12, 7), 2, 3),
    "pool_2d_back": lambda c, t: c.pool_2d_back(
        _main(c, t, 5, 4, 3, 2), _f32(c, 10, 8, 3, 2), OpPool.MAX, 2, 2, 2, 2
    ),
    "flash_attn_back": lambda c, t: c.flash_attn_back(
        _main(c, t, 32, 4, 2), _f32(c, 32, 8, 2), _f32(c, 8, 32, 2), _f32(c, 32, 4, 2), False
    ),
    "lightning_indexer": lambda c, t: c.lightning_indexer(
        _f32(c, 128, 4, 3), _main(c, t, 128, 1, 24), _f32(c, 4, 3), c.new_tensor(F16, (24, 3))
    ),
    "dsv4_hc_comb": lambda c, t: c.dsv4_hc_comb(_main(c, t, 24, 5), _f32(c, 3), _f32(c, 24), 1e-6, 4),
    "dsv4_hc_pre": lambda c, t: c.dsv4_hc_pre(_main(c, t, 31, 4, 5), _f32(c, 4, 5)),
    "dsv4_hc_post": lambda c, t: c.dsv4_hc_post(
        _main(c, t, 31, 5), _f32(c, 31, 4, 5), _f32(c, 4, 5), _f32(c, 4, 4, 5)
    ),
    "opt_step_adamw": _opt_step_adamw,
    "opt_step_sgd": lambda c, t: c.opt_step_sgd(c.set_param(_main(c, t)), _f32(c, ROW, 4), _f32(c, 2)),
    "map_custom1": lambda c, t: c.map_custom1(_main(c, t), _custom),
    "map_custom2": lambda c, t: c.map_custom2(_main(c, t), _f32(c, ROW, 4), _custom),
    "map_custom3": lambda c, t: c.map_custom3(_main(c, t), _f32(c, ROW, 4), _f32(c, ROW, 4), _custom),
    "custom_4d": lambda c, t: c.custom_4d(F32, ROW, 4, 1, 1, [_main(c, t)], _custom),
}
"""By the name that the table shows."""

TYPES: Final = tuple(t for t in DType if t not in (DType.Q8_1, DType.Q8_K))
"""Types of the table; Q8_1 and Q8_K are only ggml's scratch."""


def _unavailable(dtype: DType) -> Tensor:
    raise DTypeError(f"there is no such node of type {dtype.name}")


def sample(name: str, dtype: DType) -> Tensor | None:
    """Return the node, or `None` if the op takes no main operand of that type."""
    try:
        return SAMPLES[name](Context(), dtype)
    except (DTypeError, ShapeError):
        return None


def supported_types(device: Device, name: str) -> list[DType]:
    """Return the types of the main operand for which the device computes the op."""
    nodes = ((dtype, sample(name, dtype)) for dtype in TYPES)
    return [dtype for dtype, node in nodes if node is not None and device.supports_op(node)]


def ops_covered() -> set[Op]:
    """Return the ops that the samples make."""
    nodes = (sample(name, dtype) for name in SAMPLES for dtype in (F32, I32, I64))
    return {node.op for node in nodes if node is not None}


def brief(types: Iterable[DType]) -> str:
    """Return the types in words: families whole where they are whole, else one by one."""
    left = list(types)
    words = []
    for word, family in FAMILIES.items():
        if len(family) > 1 and family <= set(left):
            words.append(word)
            left = [t for t in left if t not in family]
    return ", ".join([*words, *(t.name.lower() for t in left)]) or "-"


FAMILIES: Final[dict[str, frozenset[DType]]] = {
    "all types": frozenset(TYPES),
    "all quantised": frozenset(t for t in TYPES if t.is_quantized),
    "floats": frozenset({DType.F32, DType.F16, DType.BF16}),
    "integers": frozenset({DType.I8, DType.I16, DType.I32, DType.I64}),
    "q4_0 to q8_0": frozenset({DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0}),
    "q2_K to q6_K": frozenset({DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K}),
    "iq*": frozenset(t for t in TYPES if t.name.startswith("IQ")),
}
