"""Rotary position embedding.

ROPE and ROPE_BACK have `src = (a, positions, freq_factors or None)` and the params `n_dims`, `mode` (a
`RopeType`), `n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow`, `sections`
(four counts of pairs; zeros unless the mode is multi-section) and `offset`, the first rotated dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Concatenate

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, RopeType, as_enum
from ggmlb.core.ops.base import F32_TINY, OpBase, P, checked, fail_arg, fail_dtype, fail_shape, require_finite
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

NO_SECTIONS = (0, 0, 0, 0)

_PARAMS = (
    "n_dims", "mode", "n_ctx_orig", "freq_base", "freq_scale", "ext_factor", "attn_factor",
    "beta_fast", "beta_slow", "sections", "offset",
)  # fmt: skip
"""`mode` is a RopeType, `sections` are four, `offset` is the first rotated dimension."""

Rotation = tuple[tuple[Tensor, Tensor, Tensor | None], dict[str, object]]
"""Checked operands and params of a rope node."""


def _node(
    check: Callable[Concatenate[str, P], Rotation], fn: str, op: Op, doc: str
) -> Callable[Concatenate[RopeOps, P], Tensor]:
    """Create the method `fn`, whose arguments go to `check`."""
    inplace = fn.endswith("_inplace")

    def make(self: RopeOps, rotation: Rotation) -> Tensor:
        src, params = rotation
        return self._like(inplace, op, src[0], src, params)

    return checked(check, make, fn, doc)


def _without_factors(
    check: Callable[Concatenate[str, Tensor, Tensor, Tensor | None, P], Rotation],
) -> Callable[Concatenate[str, Tensor, Tensor, P], Rotation]:
    """Return a check without the argument `c`."""

    def without(fn: str, a: Tensor, b: Tensor, *args: P.args, **kwargs: P.kwargs) -> Rotation:
        return check(fn, a, b, None, *args, **kwargs)

    signature = inspect.signature(check)
    others = [p for p in signature.parameters.values() if p.name != "c"]
    without.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return without  # type: ignore[return-value] # operands keep their names, for keyword arguments


def _multi(
    fn: str,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    sections: Sequence[int],
    mode: RopeType | int | str = RopeType.MROPE,
    n_ctx_orig: int = 0,
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Rotation:
    """Check the arguments of ggml_rope_multi, a superset of the other variants'."""
    mode = as_enum(fn, RopeType, mode)
    multi = mode & RopeType.MROPE
    n_pos = a.ne[2] * 4 if multi else a.ne[2]
    if b.ne != (n_pos, 1, 1, 1):
        fail_shape(fn, f"b must hold {n_pos} positions in one row", a, b)
    if b.dtype is not DType.I32:
        fail_dtype(fn, "b", b, DType.I32)
    if c is not None:
        if c.dtype is not DType.F32:
            fail_dtype(fn, "c", c, DType.F32)
        n_pairs = n_dims if mode is RopeType.VISION else n_dims // 2
        if c.ne[0] < n_pairs:
            fail_shape(fn, f"c must hold at least {n_pairs} frequency factors", a, c)
    if n_dims < 0 or n_dims % 2 or n_dims > a.ne[0]:
        fail_arg(fn, f"n_dims is {n_dims}; it must be even and at most the row length, {a.ne[0]}")
    if not multi:
        sections = NO_SECTIONS
    elif len(sections) != 4:
        fail_arg(fn, f"sections is {list(sections)}; it must hold four counts")
    elif mode is RopeType.VISION and n_dims * 2 != a.ne[0]:
        fail_arg(fn, f"n_dims is {n_dims}; mode VISION needs half the row length {a.ne[0]}")
    require_finite(fn, F32_TINY, freq_base=freq_base)
    require_finite(fn, freq_scale=freq_scale, ext_factor=ext_factor, attn_factor=attn_factor)
    require_finite(fn, 0, beta_fast=beta_fast, beta_slow=beta_slow)
    if ext_factor and (freq_base == 1 or freq_scale <= 0 or n_ctx_orig < 0):
        fail_arg(
            fn, "with an ext_factor, freq_scale must be above 0, freq_base not 1, n_ctx_orig not negative"
        )
    values = (
        n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow,
        tuple(sections), 0,
    )  # fmt: skip
    return (a, b, c), dict(zip(_PARAMS, values, strict=True))


def _ext(
    fn: str,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    mode: RopeType | int | str = RopeType.NORMAL,
    n_ctx_orig: int = 0,
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Rotation:
    """Check the arguments of ggml_rope_ext."""
    return _multi(
        fn, a, b, c, n_dims, NO_SECTIONS, mode, n_ctx_orig,
        freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow,
    )  # fmt: skip


_custom = _without_factors(_ext)


def _plain(
    fn: str, a: Tensor, b: Tensor, n_dims: int, mode: RopeType | int | str = RopeType.NORMAL
) -> Rotation:
    """Check the arguments of ggml_rope."""
    return _multi(fn, a, b, None, n_dims, NO_SECTIONS, mode, beta_fast=0.0, beta_slow=0.0)


class RopeOps(OpBase):
    """rope, rope_ext, rope_custom, rope_multi, their in-place forms and gradients, rope_set_offset.

    All take `a` of ne `[head size, n_head, n_tokens, ...]`, i32 positions `b` (one per token, or four where
    the mode is multi-section) and, where there is a `c`, f32 frequency factors, one per rotated pair.

    Raises:
        ShapeError: There is not one position (or four) per token, or `c` is too short.
        DTypeError: `b` is not i32, or `c` is not f32.
        ArgumentError: `n_dims` is odd or larger than the rows, there is no such mode, or a number is not
            finite or out of range: `freq_base` and, with an `ext_factor`, `freq_scale` are above 0.
    """

    rope = _node(_plain, "rope", Op.ROPE, "Return `rope_ext` with base 10000 and no scaling")
    rope_inplace = _node(_plain, "rope_inplace", Op.ROPE, "Return `rope`, written into the memory of `a`")
    rope_ext = _node(_ext, "rope_ext", Op.ROPE, "Return the rows of `a`, rotated by their positions")
    rope_ext_inplace = _node(
        _ext, "rope_ext_inplace", Op.ROPE, "Return `rope_ext`, written into the memory of `a`"
    )
    rope_ext_back = _node(
        _ext, "rope_ext_back", Op.ROPE_BACK, "Return the gradient of `rope_ext`: the inverse rotation"
    )
    rope_custom = _node(_custom, "rope_custom", Op.ROPE, "Return `rope_ext` without frequency factors")
    rope_custom_inplace = _node(
        _custom, "rope_custom_inplace", Op.ROPE, "Return `rope_custom`, written into the memory of `a`"
    )
    rope_multi = _node(
        _multi, "rope_multi", Op.ROPE, "Return `a`, each section of pairs rotated by its own positions"
    )
    rope_multi_inplace = _node(
        _multi, "rope_multi_inplace", Op.ROPE, "Return `rope_multi`, written into the memory of `a`"
    )
    rope_multi_back = _node(
        _multi, "rope_multi_back", Op.ROPE_BACK, "Return the gradient of `rope_multi`: the inverse rotation"
    )

    def rope_set_offset(self, a: Tensor, offset: int) -> Tensor:
        """Let ROPE node `a` rotate its dimensions from `offset` on; return the node (ggml_rope_set_offset).

        Raises:
            ArgumentError: `a` is no rope node, or the rotated dimensions end beyond its rows.
        """
        if a.op is not Op.ROPE and a.op is not Op.ROPE_BACK:
            fail_arg("rope_set_offset", f"a is {a.describe()}; it must be a ROPE node")
        n_dims = a.params["n_dims"]
        if offset < 0 or offset + n_dims > a.ne[0]:
            fail_arg(
                "rope_set_offset",
                f"offset {offset} and n_dims {n_dims} must lie within the {a.ne[0]} elements of a row",
            )
        a.params["offset"] = offset
        return a


# -- how results are sharded over devices ---


def _shard_rope(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard by heads, or by positions together with their operand."""
    state = states[0]
    if not state.is_cut or state.axis == 0 or any(s.is_cut for s in states[1:]):
        return None
    positions = MIRRORED
    if state.axis == 2:
        if node.params["mode"] & RopeType.MROPE:
            return None  # four positions for each token, token after token
        positions = state.moved(0)
    return ShardOutcome(state, (state, positions, *states[2:]))


# -- gradients ---


def _back_rope(c: Context, node: Tensor, grad: Tensor, back: bool = True) -> Tensor:
    numbers = dict(node.params)
    offset = numbers.pop("offset")
    rotate = c.rope_multi_back if back else c.rope_multi
    return c.rope_set_offset(rotate(grad, node.operand(1), node.src[2], **numbers), offset)


SPECS = (
    OpSpec(Op.ROPE, backward={0: _back_rope}, params=_PARAMS, inplace=1, shard=_shard_rope),
    OpSpec(
        Op.ROPE_BACK,
        backward={0: partial(_back_rope, back=False)},
        params=_PARAMS,
        inplace=1,
        shard=_shard_rope,
    ),
)
