"""Context: leafs, names, flags, contents."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import ArgumentError, DTypeError, NotAllocatedError, ShapeError, UnknownOpError


@pytest.mark.parametrize(
    ("dtype", "ne", "full", "nb"),
    [
        ("f32", (5,), (5, 1, 1, 1), (4, 20, 20, 20)),
        (DType.F16, [3, 2], (3, 2, 1, 1), (2, 6, 12, 12)),
        (np.float32, (3, 2, 4), (3, 2, 4, 1), (4, 12, 24, 96)),
        ("q8_0", (64, 3), (64, 3, 1, 1), (34, 68, 204, 204)),
        ("q4_K", (512, 2, 3, 2), (512, 2, 3, 2), (144, 288, 576, 1728)),
        (DType.I64, 7, (7, 1, 1, 1), (8, 56, 56, 56)),
        ("i32", (np.int64(2), np.int32(3)), (2, 3, 1, 1), (4, 8, 24, 24)),
        ("bf16", (0, 3), (0, 3, 1, 1), (2, 0, 0, 0)),
    ],
)
def test_new_tensor_has_the_extents_and_strides_of_ggml(dtype, ne, full, nb):
    tensor = Context().new_tensor(dtype, ne)
    assert (tensor.ne, tensor.nb) == (full, nb)
    assert tensor.op is Op.NONE
    assert tensor.src == ()
    assert all(type(n) is int for n in tensor.ne)


@pytest.mark.parametrize(
    ("ne", "part"),
    [
        ((), "one to four extents"),
        ((1, 2, 3, 4, 5), "one to four extents"),
        ((4, -1), "none negative"),
        ((2.5,), "whole numbers"),
        (("4",), "whole numbers"),
        (None, "whole numbers"),
    ],
)
def test_new_tensor_refuses_other_extents(ne, part):
    ctx = Context()
    with pytest.raises(ShapeError, match=part):
        ctx.new_tensor("f32", ne)
    assert len(ctx) == 0


def test_new_tensor_refuses_unknown_types_and_part_blocks():
    ctx = Context()
    with pytest.raises(DTypeError, match="F32"):
        ctx.new_tensor("f23", (4,))
    with pytest.raises(ShapeError, match="multiple of 32"):
        ctx.new_tensor("q4_0", (33,))
    assert len(ctx) == 0


def test_new_tensor_1d_to_4d_and_dup_tensor():
    ctx = Context()
    assert ctx.new_tensor_1d("f32", 2).ne == (2, 1, 1, 1)
    assert ctx.new_tensor_2d("f32", 2, 3).ne == (2, 3, 1, 1)
    assert ctx.new_tensor_3d("f32", 2, 3, 4).ne == (2, 3, 4, 1)
    last = ctx.new_tensor_4d("f16", 2, 3, 4, 5)
    assert last.ne == (2, 3, 4, 5)
    dup = ctx.dup_tensor(ctx.transpose(last))
    assert (dup.dtype, dup.ne, dup.nb) == (DType.F16, (3, 2, 4, 5), (2, 6, 12, 48))
    assert dup.view_src is None


def test_names():
    ctx = Context()
    a = ctx.new_tensor("f32", (4,), "a")
    b = ctx.set_name(ctx.new_tensor("f32", (4,)), "b")
    c = ctx.format_name(ctx.add(a, b), "layer.%d.%s", 3, "sum")
    assert c.name == "layer.3.sum"
    assert ctx.get_tensor("b") is b
    assert ctx.get_tensor("layer.3.sum") is c
    with pytest.raises(ArgumentError, match=r"'layer\.3\.sum'"):
        ctx.get_tensor("layer.3.sun")


def test_views_and_copies_are_named_after_their_source():
    ctx = Context()
    a = ctx.new_tensor("f32", (4, 6), "a")
    b = ctx.new_tensor("f32", (4, 6), "b")
    anonymous = ctx.new_tensor("f32", (4, 6))
    assert ctx.view_1d(a, 4).name == "a (view)"
    assert ctx.reshape_1d(a, 24).name == "a (reshaped)"
    assert ctx.permute(a, 1, 0, 2, 3).name == "a (permuted)"
    assert ctx.transpose(a).name == "a (transposed)"
    assert ctx.cont(a).name == "a (cont)"
    assert ctx.cast(a, "f16").name == "a (copy)"
    assert ctx.cpy(a, b).name == "b (copy of a)"
    assert ctx.cpy(a, anonymous).name == "a (copy)"
    assert ctx.cpy(anonymous, b).name == "b (copy)"
    assert ctx.relu_inplace(a).name == "a (view)"
    assert ctx.cont(anonymous).name == ""


def test_flags():
    ctx = Context()
    a = ctx.new_tensor("f32", (1,))
    assert ctx.set_input(a) is a
    assert ctx.set_output(a) is a
    assert ctx.set_param(a) is a
    assert ctx.set_loss(a) is a
    assert a.flags == TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS
    with pytest.raises(ArgumentError, match="is a node"):
        ctx.set_param(ctx.add(a, a))
    with pytest.raises(ArgumentError, match="f32 scalar"):
        ctx.set_loss(ctx.new_tensor("f32", (2,)))
    with pytest.raises(ArgumentError, match="f32 scalar"):
        ctx.set_loss(ctx.new_tensor("f16", (1,)))


def test_contents():
    ctx = Context()
    a = ctx.new_tensor("f32", (4,))
    b = ctx.neg(a)
    assert list(ctx) == [a, b]
    assert len(ctx) == 2
    assert "2 tensors" in repr(ctx)
    ctx.reset()
    assert len(ctx) == 0
    assert b.src == (a,)


def test_set_zero_asks_for_placed_tensors():
    ctx = Context()
    with pytest.raises(NotAllocatedError, match="memset"):
        ctx.set_zero(ctx.new_tensor("f32", (4,)))


def test_a_dropped_context_leaves_nothing_for_the_collector():
    ctx = Context()
    a = ctx.new_tensor("f32", (4, 4))
    node = ctx.cpy(ctx.cast(ctx.mul_mat(a, a), "f16"), ctx.new_tensor("f16", (4, 4)))
    alive = weakref.ref(node)
    gc.collect()
    gc.disable()
    try:
        del ctx, a, node
        assert alive() is None
    finally:
        gc.enable()


def test_an_op_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(UnknownOpError, match="Context has no op 'mul_mt'; did you mean 'mul_mat'"):
        Context().mul_mt()
    assert not hasattr(Context(), "no_such_thing")
