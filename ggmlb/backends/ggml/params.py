"""`op_params`: a node's parameters as ggml.c writes them into a tensor, word by word, and reads them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from ggmlb.core.enums import GluOp, Hint, Op, OpPool, Prec, RopeType, ScaleMode, SortOrder, TriType, UnaryOp
from ggmlb.core.errors import ArgumentError
from ggmlb.core.tensor import Tensor

_CONV_2D = "s0:i s1:i p0:i p1:i d0:i d1:i"
_CONV_3D = "s0:i s1:i s2:i p0:i p1:i p2:i d0:i d1:i d2:i"
_POOL_2D = "op:i k0:i k1:i s0:i s1:i p0:i p1:i"
_WINDOW = "nb1:i nb2:i nb3:i offset:i inplace:b"

WORDS: Final[dict[Op, str]] = {
    Op.ACC: _WINDOW,
    Op.ADD_REL_POS: "inplace:b",
    Op.ARANGE: "start:f stop:f step:f",
    Op.ARGSORT: "order:i",
    Op.CLAMP: "min:f max:f",
    Op.COL2IM_1D: "s0:i oc:i p0:i",
    Op.CONCAT: "dim:i",
    Op.CONV_2D: _CONV_2D,
    Op.CONV_2D_DW: _CONV_2D,
    Op.CONV_3D: f"{_CONV_3D} c:i n:i oc:i",
    Op.CONV_TRANSPOSE_1D: "s0:i p0:i d0:i",
    Op.CONV_TRANSPOSE_2D: "stride:i",
    Op.DIAG_MASK_INF: "n_past:i",
    Op.DIAG_MASK_ZERO: "n_past:i",
    Op.DSV4_HC_COMB: "eps:f n_iter:i",
    Op.FILL: "value:f",
    Op.FLASH_ATTN_BACK: "masked:b",
    Op.FLASH_ATTN_EXT: "scale:f max_bias:f logit_softcap:f prec:i",  # then n_kv_max, a hint
    Op.GATED_DELTA_NET: "k:i",
    Op.GATED_LINEAR_ATTN: "scale:f",
    Op.GROUP_NORM: "n_groups:i eps:f",
    Op.IM2COL: f"{_CONV_2D} is_2d:b",
    Op.IM2COL_3D: f"{_CONV_3D} ic:i",
    Op.IM2COL_BACK: f"{_CONV_2D} is_2d:b",
    Op.L2_NORM: "eps:f",
    Op.LEAKY_RELU: "negative_slope:f",
    Op.MUL_MAT: "prec:i hint:i _:i prec_src1:i",
    Op.MUL_MAT_ID: "prec:i _:i _:i prec_src1:i",
    Op.NORM: "eps:f",
    Op.PAD_REFLECT_1D: "left:i right:i",
    Op.POOL_1D: "op:i k0:i s0:i p0:i",
    Op.POOL_2D: _POOL_2D,
    Op.POOL_2D_BACK: _POOL_2D,
    Op.RMS_NORM: "eps:f",
    Op.RMS_NORM_BACK: "eps:f",
    Op.SCALE: "scale:f bias:f",
    Op.SET: _WINDOW,
    Op.SOFT_MAX: "scale:f max_bias:f",
    Op.SOFT_MAX_BACK: "scale:f max_bias:f",
    Op.SSM_SCAN: "k:i",
    Op.TIMESTEP_EMBEDDING: "dim:i max_period:i",
    Op.TRI: "type:i",
    Op.WIN_PART: "npx:i npy:i w:i",
    Op.WIN_UNPART: "w:i",
}
"""Parameters in the order of their words: int32 (`i`), float32 (`f`), truth value (`b`); `_` is none."""

ROPE_FLOATS: Final = ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")


_ENUMS: Final[dict[tuple[Op, str], type[IntEnum]]] = {
    (Op.ARGSORT, "order"): SortOrder,
    (Op.MUL_MAT, "hint"): Hint,
    (Op.POOL_1D, "op"): OpPool,
    (Op.POOL_2D, "op"): OpPool,
    (Op.POOL_2D_BACK, "op"): OpPool,
    (Op.TRI, "type"): TriType,
}


def _format(words: str) -> tuple[tuple[str, ...], struct.Struct]:
    pairs = [word.split(":") for word in words.split()]
    return tuple(name for name, _ in pairs), struct.Struct(
        "=" + "".join("f" if kind == "f" else "i" for _, kind in pairs)
    )


_FORMATS: Final = {op: _format(words) for op, words in WORDS.items()}


def encode(node: Tensor, unary_ops: Mapping[str, int], glu_ops: Mapping[str, int]) -> bytes:
    """Return a node's `op_params` as bytes; `unary_ops`, `glu_ops`: the library's enum values by name.

    Args:
        node: The node.
        unary_ops: The library's `ggml_unary_op` values, by name.
        glu_ops: Its `ggml_glu_op` values, by name.

    Raises:
        LookupError: The library has no such unary op or gated linear unit.
        ArgumentError: A number does not fit into ggml's 32 bits.
    """
    try:
        return _encode(node, unary_ops, glu_ops)
    except (OverflowError, struct.error):
        numbers = {name: x for name, x in node.params.items() if isinstance(x, (int, float))}
        wide = ", ".join(f"{name} = {x}" for name, x in numbers.items() if not _fits(x))
        wide = wide or str(dict(node.params))
        raise ArgumentError(f"{node.op}: each of ggml's op_params has 32 bits; {wide} does not fit") from None


def _fits(x: float) -> bool:
    return not math.isfinite(x) or abs(x) < (2**31 if isinstance(x, int) else 2.0**128)


def _encode(node: Tensor, unary_ops: Mapping[str, int], glu_ops: Mapping[str, int]) -> bytes:
    op, p = node.op, node.params
    if op in _FORMATS:
        names, form = _FORMATS[op]
        return form.pack(*(p.get(name, 0) for name in names))
    if op is Op.UNARY:
        number = unary_ops[p["op"].name]
        if p["op"] is UnaryOp.XIELU:
            return struct.pack("=i4f", number, p["alpha_n"], p["alpha_p"], p["beta"], p["eps"])
        return struct.pack("=i", number)
    if op is Op.GLU:
        limits = (p.get("alpha", 0.0), p.get("limit", 0.0))
        return struct.pack("=2i2f", glu_ops[p["op"].name], p["swapped"], *limits)
    if op in (Op.ROPE, Op.ROPE_BACK):
        floats = (p[name] for name in ROPE_FLOATS)
        head = (0, p["n_dims"], p["mode"], 0, p["n_ctx_orig"])
        return struct.pack("=5i6f5i", *head, *floats, *p["sections"], p["offset"])
    if op is Op.PAD:
        sides = (n for pair in zip(p["left"], p["right"], strict=True) for n in pair)
        return struct.pack("=9i", *sides, p["circular"])
    if op is Op.DSV4_HC_PRE:
        return struct.pack("=fi", p["scale"], p["gated"])
    if op is Op.PERMUTE:
        return struct.pack("=4i", *p["axes"])
    if op is Op.ROLL:
        return struct.pack("=4i", *p["shifts"])
    if op is Op.UPSCALE:
        return struct.pack("=i", p["mode"] | p["align_corners"] << 8 | p["antialias"] << 9)
    if op is Op.VIEW:
        return struct.pack("=Q", node.view_offs)
    return b""


# -- reading ---------------------------------------------------------------------------------------


def decode(
    op: Op, raw: bytes, ne: tuple[int, ...], unary_ops: Mapping[int, UnaryOp], glu_ops: Mapping[int, GluOp]
) -> dict[str, Any]:
    """Return a node's parameters by name; the inverse of `encode`.

    Args:
        op: The node's op.
        raw: Its `op_params`.
        ne: Its extents.
        unary_ops: The library's `ggml_unary_op` values.
        glu_ops: Its `ggml_glu_op` values.

    Raises:
        LookupError: ggmlb has no such parameter value; the message says which.
    """
    i, f = struct.unpack("=16i", raw), struct.unpack("=16f", raw)
    if op in WORDS:
        return _words(op, i, f)
    if op is Op.UNARY:
        if i[0] not in unary_ops:
            raise LookupError(f"ggmlb has no unary op {i[0]}")
        slopes = {"alpha_n": f[1], "alpha_p": f[2], "beta": f[3], "eps": f[4]}
        return {"op": unary_ops[i[0]], **(slopes if unary_ops[i[0]] is UnaryOp.XIELU else {})}
    if op is Op.GLU:
        if i[0] not in glu_ops:
            raise LookupError(f"ggmlb has no gated linear unit {i[0]}")
        limits: dict[GluOp, dict[str, float]] = {
            GluOp.SWIGLU_OAI: {"alpha": f[2], "limit": f[3]},
            GluOp.SWIGLU_CLAMP: {"limit": f[3]},
        }
        glu = glu_ops[i[0]]
        return {"op": glu, "swapped": bool(i[1]), **limits.get(glu, {})}
    if op in (Op.ROPE, Op.ROPE_BACK):
        floats = dict(zip(ROPE_FLOATS, f[5:11], strict=True))
        head = {"n_dims": i[1], "mode": RopeType(i[2]), "n_ctx_orig": i[4]}
        return {**head, **floats, "sections": i[11:15], "offset": i[15]}
    if op is Op.PAD:
        return {"left": i[0:8:2], "right": i[1:8:2], "circular": bool(i[8])}
    if op is Op.PERMUTE:
        return {"axes": i[:4]}
    if op is Op.ROLL:
        return {"shifts": i[:4]}
    if op is Op.UPSCALE:
        flags = {"align_corners": bool(i[0] & 256), "antialias": bool(i[0] & 512)}
        return {"mode": ScaleMode(i[0] & 255), **flags}
    if op is Op.TOP_K:
        return {"k": ne[0]}
    if op is Op.DSV4_HC_PRE:  # before 0.25 it has no parameters, not even a factor
        return {"gated": bool(i[1]), "scale": f[0] if i[1] else 1.0}
    return {}


def _words(op: Op, i: tuple[int, ...], f: tuple[float, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for k, word in enumerate(WORDS[op].split()):
        name, kind = word.split(":")
        value: Any = f[k] if kind == "f" else bool(i[k]) if kind == "b" else i[k]
        if name == "_" or (name == "prec_src1" and not value):
            continue
        if name == "prec":  # newer ones allow less precision than F32, and demand none
            value = Prec.F32 if value == Prec.F32 else Prec.DEFAULT
        enum = _ENUMS.get((op, name))
        found[name] = value if enum is None else enum(value)
    return found
