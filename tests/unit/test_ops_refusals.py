"""What a refused op or setter says, and that it changes nothing."""

from __future__ import annotations

import pytest

from ggmlb.core.context import Context
from ggmlb.core.errors import ArgumentError, DTypeError, ShapeError

S, D, A = ShapeError, DTypeError, ArgumentError


def test_a_refused_op_leaves_the_context_as_it_was():
    ctx = Context()
    a, b = ctx.new_tensor("f32", (4, 3)), ctx.new_tensor("f32", (5, 3))
    for fn in ("add", "mul_mat", "cpy", "soft_max_ext", "repeat"):
        with pytest.raises(ShapeError):
            getattr(ctx, fn)(a, b)
    assert list(ctx) == [a, b]


def test_messages_name_the_operands():
    ctx = Context()
    w = ctx.new_tensor("q8_0", (64, 32), "blk.0.ffn_up.weight")
    x = ctx.norm(ctx.new_tensor("f32", (32, 7)), 1e-5)
    with pytest.raises(ShapeError) as caught:
        ctx.mul_mat(w, x)
    assert str(caught.value) == (
        "mul_mat(tensor q8_0[64, 32] (leaf 'blk.0.ffn_up.weight'), NORM f32[32, 7]): a has rows of 64 "
        "elements, b of 32; they must be equally long, and ne[2] and ne[3] of b must be multiples of those "
        "of a"
    )


def test_setters_check_values_and_double_use():
    ctx = Context()
    product = ctx.mul_mat(ctx.new_tensor("f32", (4, 3)), ctx.new_tensor("f32", (4, 2)))
    with pytest.raises(ArgumentError, match="5 is not a Prec"):
        ctx.mul_mat_set_prec(product, 5)
    with pytest.raises(ArgumentError, match="Hint"):
        ctx.mul_mat_set_hint(product, 7)
    soft = ctx.soft_max(ctx.new_tensor("f32", (4, 3, 2)))
    with pytest.raises(ShapeError, match="one element per head, 2"):
        ctx.soft_max_add_sinks(soft, ctx.new_tensor("f32", (3,)))
    with pytest.raises(DTypeError, match=r"sinks is .* must be f32"):
        ctx.soft_max_add_sinks(soft, ctx.new_tensor("f16", (2,)))
    sinks = ctx.new_tensor("f32", (2,))
    ctx.soft_max_add_sinks(soft, sinks)
    with pytest.raises(ArgumentError, match="remove them first"):
        ctx.soft_max_add_sinks(soft, sinks)
    ctx.soft_max_add_sinks(soft, None)
    assert soft.src == (soft.src[0], None, None)
    rope = ctx.rope(ctx.new_tensor("f32", (8, 2, 3)), ctx.new_tensor("i32", (3,)), 6)
    for offset in (-2, 4):
        with pytest.raises(ArgumentError, match="must lie within the 8 elements"):
            ctx.rope_set_offset(rope, offset)
