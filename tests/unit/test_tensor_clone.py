"""`Tensor.reading`: the clones that the scheduler makes."""

from __future__ import annotations

from ggmlb import Context, DType, Tensor


def test_a_clone_has_every_attribute_of_its_original():
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (4, 2), name="a")
    node = ctx.scale(ctx.set_output(a), 2.0)
    clone = node.reading((a,), None)
    for slot in set(Tensor.__slots__) - {"__weakref__"}:
        assert getattr(clone, slot) == getattr(node, slot), slot
    assert clone.params is node.params
