"""The meta device's memory: tensors are sharded to devices, and read back whole."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Graph, SplitAxis, SplitState, split_evenly
from ggmlb.parallel.meta import MIRRORED, split_by
from ggmlb.testing.fake import FakeDevice, FakeReg

CPU = ggmlb.device_by_name("CPU")


@pytest.fixture(
    params=[
        SplitState(SplitAxis.AXIS_0, ((32, 64, 0), (0, 32, 32))),
        SplitState(SplitAxis.AXIS_1, ((2, 1, 2),)),
        SplitState(SplitAxis.AXIS_2, ((1, 1, 1),)),
        MIRRORED,
    ],
    ids=str,
)
def placed(request: pytest.FixtureRequest) -> Iterator[tuple[ggmlb.Tensor, SplitState]]:
    device = ggmlb.meta_device([CPU] * 3, lambda t: request.param)
    ctx = Context()
    tensor = ctx.new_tensor("q8_0", (160, 5, 3), "w")
    with ggmlb.alloc_ctx_tensors(ctx, device.buffer_type):
        yield tensor, request.param


def test_bytes_go_to_their_devices_and_come_back(placed: tuple[ggmlb.Tensor, SplitState]) -> None:
    tensor, state = placed
    data = np.random.default_rng(0).integers(0, 256, tensor.nbytes, np.uint8)
    tensor.set(data)
    np.testing.assert_array_equal(tensor.get(), data)
    buffer = tensor.buffer
    assert isinstance(buffer, ggmlb.MetaBuffer)
    held = [own.nbytes for own in buffer.slices(tensor)]
    assert sum(held) == (tensor.nbytes if state.is_cut else 3 * tensor.nbytes)


def test_a_part_is_written_and_the_rest_stays(placed: tuple[ggmlb.Tensor, SplitState]) -> None:
    tensor, _ = placed
    expected = np.zeros(tensor.nbytes, np.uint8)
    tensor.memset(0)
    tensor.set(np.full(100, 7, np.uint8), 333)
    expected[333:433] = 7
    tensor.memset(9, 1000, 50)
    expected[1000:1050] = 9
    np.testing.assert_array_equal(tensor.get(), expected)
    np.testing.assert_array_equal(tensor.get(300, 200), expected[300:500])


def test_weights_take_their_slices_memory_only() -> None:
    ctx = Context()
    weights = [ctx.new_tensor("f32", (64, 128), f"w{i}") for i in range(8)]
    device = ggmlb.meta_device([CPU] * 4, lambda t: SplitState(SplitAxis.AXIS_1, (split_evenly(128, 4),)))
    with ggmlb.alloc_ctx_tensors(ctx, device.buffer_type) as buffer:
        assert isinstance(buffer, ggmlb.MetaBuffer)
        assert [part.size for part in buffer.parts] == [sum(w.nbytes for w in weights) // 4] * 4


@pytest.mark.parametrize("which", [0, 1, 2])
def test_when_a_device_lacks_room_the_others_give_theirs_back(which: int) -> None:
    reg = FakeReg(0)
    devices = [FakeDevice(reg, i, lambda op: None, 100 if i == which else 1 << 20) for i in range(3)]
    device = ggmlb.meta_device(devices, lambda t: SplitState(SplitAxis.AXIS_1, (split_evenly(64, 3),)))
    ctx = Context()
    tensor = ctx.new_tensor("f32", (64, 64), "w")
    free = [d.memory[0] for d in devices]
    for allocate in (
        lambda: ggmlb.alloc_ctx_tensors(ctx, device.buffer_type),
        lambda: device.buffer_type.alloc_buffer(1 << 14),
    ):
        with pytest.raises(ggmlb.AllocationError):
            allocate()
        gc.collect()
        assert [d.memory[0] for d in devices] == free
    assert tensor.buffer is None


def test_slices_fill_their_buffer() -> None:
    ctx = Context()
    ctx.new_tensor("f32", (8, 8), "w")
    device = ggmlb.meta_device([CPU] * 2, lambda t: SplitState(SplitAxis.AXIS_1, ((1, 7),)))
    with ggmlb.alloc_ctx_tensors(ctx, device.buffer_type) as buffer:
        with pytest.raises(ggmlb.ArgumentError, match="weight slices only"):
            ggmlb.tensor_alloc(buffer, Context().new_tensor("f32", (8,)), 0)
        buffer.reset()
        with pytest.raises(ggmlb.BoundsError):
            ggmlb.tensor_alloc(buffer, Context().new_tensor("f32", (32,)), 0)
        ggmlb.tensor_alloc(buffer, Context().new_tensor("f32", (8,)), 0)


def test_results_in_the_memory_of_weights_follow_their_operands() -> None:
    """Leafs are sharded as the user says; nodes that are placed with them as the ops say."""
    states = {"x": SplitState(SplitAxis.AXIS_0, ((1, 7),)), "b": SplitState(SplitAxis.AXIS_0, ((6, 2),))}
    device = ggmlb.meta_device([CPU] * 2, lambda t: states[t.name])
    ctx = Context()
    x, b = ctx.new_tensor("f32", (8, 3), "x"), ctx.new_tensor("f32", (8, 3), "b")
    y, z = ctx.sqr(x), ctx.add(ctx.sqr(x), b)
    values = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta):
        x.set_array(values[0])
        b.set_array(values[1])
        meta.graph_compute(Graph().build_forward_expand(y, z))
        assert device.state(y) == states["x"]
        np.testing.assert_array_equal(y.to_numpy(), values[0] ** 2)
        np.testing.assert_allclose(z.to_numpy(), values[0] ** 2 + values[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (SplitState(SplitAxis.AXIS_1, ((2, 2),)), "add up to 4, ne\\[1\\] is 5"),
        (SplitState(SplitAxis.AXIS_1, ((1, 2, 2),)), "an extent for each of 2 devices"),
        (SplitState(SplitAxis.AXIS_0, ((40, 120),)), "cuts blocks of Q8_0"),
        (SplitState(SplitAxis.PARTIAL), "PARTIAL"),
        (SplitState(SplitAxis.AXIS_1), "an extent for each"),
    ],
)
def test_states_that_do_not_fit_are_refused(state: SplitState, match: str) -> None:
    ctx = Context()
    tensor = ctx.new_tensor("q8_0", (160, 5), "w")
    device = ggmlb.meta_device([CPU] * 2, lambda t: state)
    with pytest.raises(ggmlb.ArgumentError, match=match):
        ggmlb.alloc_ctx_tensors(ctx, device.buffer_type)
    assert tensor.buffer is None


def test_devices_that_make_no_meta_device() -> None:
    device = ggmlb.meta_device([CPU], lambda t: MIRRORED)
    for devices in ([], [CPU] * 17, [device]):
        with pytest.raises(ggmlb.ArgumentError, match="meta_device"):
            ggmlb.meta_device(devices, lambda t: MIRRORED)


def test_proportions() -> None:
    assert split_by(100, [3, 1]) == (75, 25)
    assert split_by(96, [1, 1, 1], 32) == (32, 32, 32)
    assert split_by(64, [1, 0, 3], 16) == (16, 0, 48)
    assert sum(split_evenly(13, 5)) == 13
    for wrong in (lambda: split_evenly(33, 2, 32), lambda: split_by(8, [0, 0]), lambda: split_by(8, [-1, 2])):
        with pytest.raises(ggmlb.ArgumentError, match="sharded"):
            wrong()
