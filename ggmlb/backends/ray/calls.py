"""The calls of `Context` that build a node: a node is sent as calls, and built by them on the other side.

So the other side trusts nothing about operands, extents or parameters: the method checks them. The arguments
are found by the names of the method's parameters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from ggmlb.core.context import Context
from ggmlb.core.enums import GluOp, Op, RopeType, ScaleFlag, UnaryOp
from ggmlb.core.tensor import Tensor

Call = tuple[str, list[Tensor | None], list[Any]]
"""Name of a method, tensors, and the other arguments. Of all calls but the first, the node comes before."""

VIEW: Final = "view"
"""Name of a view with any strides, for which `Context` has no public method."""


def calls_of(node: Tensor) -> list[Call]:
    """Return the call that creates a node, and those that change it afterwards."""
    if node.op is Op.VIEW:
        return [(VIEW, list(node.src), [node.ne, node.nb, node.view_offs - node.operand(0).view_offs])]
    name = _METHODS.get(node.op, node.op.value.lower())
    name = name(node) if callable(name) else name
    n_tensors, names = _parameters(name)
    src = (*node.src[2:], *node.src[:2]) if node.op is Op.SET_ROWS else node.src
    operands = [src[i] if i < len(src) else _shape_of(node) for i in range(n_tensors)]
    values = _values(node)
    if node.view_src is not None and hasattr(Context, f"{name}_inplace"):
        name += "_inplace"
    return [(name, operands, [values[n] for n in names if n in values]), *_changes(node)]


@cache
def _parameters(method: str) -> tuple[int, list[str]]:
    """Return how many tensors a method takes, and the names of its other arguments."""
    _, *found = inspect.signature(getattr(Context, method)).parameters.values()
    n_tensors = sum("Tensor" in str(p.annotation) for p in found)
    return n_tensors, [_NAMES.get(p.name, p.name.lower()) for p in found[n_tensors:]]


_NAMES: Final = {
    "b": "bias", "c": "value", "dst_type": "dtype", "s": "scale",
    "h0": "ne2", "kh": "ne1", "qh": "ne2", "w0": "ne1",
    "stride0": "s0", "stride1": "s1", "pad0": "p0", "pad1": "p1", "dilation0": "d0", "dilation1": "d1",
}  # fmt: skip
"""Names of values, where they are not those of the method's parameters."""


def _values(node: Tensor) -> Mapping[str, Any]:
    """The parameters of a node, its type and extents, by the names of arguments."""
    p: dict[str, Any] = {**node.params, "dtype": node.dtype.name, "inplace": node.view_src is not None}
    p |= {"ne": node.ne, **{f"ne{i}": n for i, n in enumerate(node.ne)}}
    if node.op is Op.CONV_3D:
        p["value"] = p["c"]
    elif node.op is Op.PERMUTE:
        p |= {f"axis{i}": n for i, n in enumerate(p["axes"])}
    elif node.op is Op.ROLL:
        p |= {f"shift{i}": n for i, n in enumerate(p["shifts"])}
    elif node.op is Op.PAD:
        p |= {f"{side[0]}p{i}": n for side in ("left", "right") for i, n in enumerate(p[side])}
    elif node.op is Op.PAD_REFLECT_1D:
        p |= {"p0": p["left"], "p1": p["right"]}
    elif node.op is Op.UPSCALE:
        flags = {ScaleFlag.ALIGN_CORNERS: p["align_corners"], ScaleFlag.ANTIALIAS: p["antialias"]}
        p["mode"] |= sum(flag for flag, is_set in flags.items() if is_set)
    elif p.get("op") is UnaryOp.XIELU:
        p |= {
            "alpha_n": _inverse_softplus(p["alpha_n"] - p["beta"]),
            "alpha_p": _inverse_softplus(p["alpha_p"]),
        }
    return p


def _inverse_softplus(y: float) -> float:
    return y if y > 20 else math.log(math.expm1(y)) if y > 0 else -math.inf


def _shape_of(node: Tensor) -> Tensor:
    """An operand of which only the shape is read."""
    like = Tensor(node.dtype, node.ne)
    like.buffer, like.offset = node.buffer, node.offset
    return like


def _rope(node: Tensor) -> str:
    name = "rope_multi" if node.params["mode"] & RopeType.MROPE else "rope_ext"
    return f"{name}_back" if node.op is Op.ROPE_BACK else name


def _glu(node: Tensor) -> str:
    is_oai = node.params["op"] is GluOp.SWIGLU_OAI
    return "swiglu_oai" if is_oai else "glu" if node.src[1] is None else "glu_split"


_METHODS: Final[Mapping[Op, str | Callable[[Tensor], str]]] = {
    Op.ADD: lambda t: "add" if t.dtype is t.operand(0).dtype else "add_cast",
    Op.CONT: "cont_4d",
    Op.CONV_2D: "conv_2d_direct",
    Op.CONV_2D_DW: "conv_2d_dw_direct",
    Op.CONV_3D: "conv_3d_direct",
    Op.CONV_TRANSPOSE_2D: "conv_transpose_2d_p0",
    Op.CPY: lambda t: "cast" if len(t.src) == 1 else "cpy",
    Op.GLU: _glu,
    Op.PAD: lambda t: "pad_ext_circular" if t.params["circular"] else "pad_ext",
    Op.REPEAT: "repeat_4d",
    Op.RESHAPE: "reshape_4d",
    Op.ROPE: _rope,
    Op.ROPE_BACK: _rope,
    Op.SCALE: "scale_bias",
    Op.SOFT_MAX: "soft_max_ext",
    Op.SOFT_MAX_BACK: "soft_max_ext_back",
    Op.UNARY: lambda t: "xielu" if t.params["op"] is UnaryOp.XIELU else "unary",
    Op.UPSCALE: "interpolate",
}
"""The method that creates a node of an op, where it is not named as the op."""


def _changes(node: Tensor) -> list[Call]:
    p, name = node.params, node.op.value.lower()
    calls: list[Call] = [(f"{name}_set_{key}", [], [p[key]]) for key in ("prec", "hint") if p.get(key)]
    if node.op in (Op.SOFT_MAX, Op.FLASH_ATTN_EXT) and node.src[-1] is not None:
        calls.append((f"{name}_add_sinks", [node.src[-1]], []))
    if node.op in (Op.ROPE, Op.ROPE_BACK) and p["offset"]:
        calls.append(("rope_set_offset", [], [p["offset"]]))
    return calls
