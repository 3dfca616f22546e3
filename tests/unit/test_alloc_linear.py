"""TensorAllocator and alloc_ctx_tensors: placing without reuse."""

from __future__ import annotations

import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import AllocationError, ArgumentError, FreedError, NotAllocatedError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import MultiBuffer
from ggmlb.runtime.alloc import TensorAllocator, alloc_ctx_tensors, alloc_ctx_tensors_size
from ggmlb.testing.memory import TestBuffer, TestMemory


def leaf(nbytes: int, name: str = "") -> Tensor:
    return Tensor(DType.I8, (nbytes, 1, 1, 1), name=name)


def context(*sizes: int) -> Context:
    ctx = Context()
    for i, size in enumerate(sizes):
        ctx.new_tensor(DType.I8, (size,), name=f"t{i}")
    return ctx


# -- TensorAllocator -------------------------------------------------------------------------------


def test_tensors_lie_one_after_another_aligned() -> None:
    allocator = TensorAllocator(TestMemory(alignment=32).alloc_buffer(128))
    a, b, empty, c = leaf(1), leaf(33), leaf(0), leaf(32)
    for t in (a, b, empty, c):
        allocator.alloc(t)
    assert [t.offset for t in (a, b, empty, c)] == [0, 32, 96, 96]
    assert allocator.used == 128


def test_a_tensor_that_does_not_fit_is_not_placed_and_the_rest_can_be_used() -> None:
    allocator = TensorAllocator(TestMemory(alignment=32).alloc_buffer(96))
    allocator.alloc(leaf(40))
    big = leaf(33, "big")
    with pytest.raises(AllocationError, match=r"'big'.* takes 64 bytes, 32 of 96 are left") as caught:
        allocator.alloc(big)
    assert (caught.value.asked, caught.value.free, caught.value.total) == (64, 32, 96)
    assert big.buffer is None
    allocator.alloc(leaf(32))
    assert allocator.used == 96


def test_views_placed_tensors_and_freed_buffers_are_refused() -> None:
    buffer = TestMemory().alloc_buffer(64)
    allocator = TensorAllocator(buffer)
    ctx = context(8)
    a = ctx.tensors[0]
    with pytest.raises(ArgumentError, match="is a view"):
        allocator.alloc(ctx.view_1d(a, 4))
    allocator.alloc(a)
    with pytest.raises(ArgumentError, match="already in"):
        allocator.alloc(a)
    buffer.free()
    b = leaf(4)
    with pytest.raises(FreedError):
        allocator.alloc(b)
    assert b.buffer is None
    assert allocator.used == 32


# -- alloc_ctx_tensors -----------------------------------------------------------------------------


def test_all_tensors_of_a_context_are_placed_views_in_their_sources() -> None:
    memory = TestMemory(alignment=32)
    ctx = context(10, 70)
    a, b = ctx.tensors
    view = ctx.view_1d(b, 20, 5)
    node = ctx.add(view, view)
    assert alloc_ctx_tensors_size(ctx, memory) == 32 + 96 + 32
    assert memory.n_calls == 0
    with alloc_ctx_tensors(ctx, memory) as buffer:
        assert buffer.size == memory.used == 160
        assert [(t.buffer, t.offset) for t in (a, b, view, node)] == [
            (buffer, 0),
            (buffer, 32),
            (buffer, 37),
            (buffer, 128),
        ]
        view.set(bytes(range(20)))
        assert b.get(5, 20).tolist() == list(range(20))
    assert memory.used == 0


def test_tensors_already_placed_are_left_alone_and_cost_nothing() -> None:
    memory = TestMemory(alignment=32)
    ctx = context(10, 20)
    a, b = ctx.tensors
    elsewhere = memory.alloc_buffer(64)
    TensorAllocator(elsewhere).alloc(a)
    view = ctx.view_1d(a, 2, 3)
    view.buffer = None  # as if made before its source was placed
    assert alloc_ctx_tensors_size(ctx, memory) == 32
    with alloc_ctx_tensors(ctx, memory) as buffer:
        assert a.buffer is elsewhere and b.buffer is buffer
        assert (view.buffer, view.offset) == (elsewhere, 3)


def test_tensors_of_a_freed_buffer_are_placed_again() -> None:
    memory = TestMemory(alignment=32)
    ctx = context(10, 70)
    a, b = ctx.tensors
    view = ctx.view_1d(b, 20, 5)
    alloc_ctx_tensors(ctx, memory).free()
    memory.alloc_buffer(64)  # so that the old place is another's
    with alloc_ctx_tensors(ctx, memory) as buffer:
        assert {t.buffer for t in (a, b, view)} == {buffer}
        view.set(bytes(range(20)))
        assert b.get(5, 20).tolist() == list(range(20))


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_a_context_without_bytes_gives_a_buffer_without_bytes(sizes: tuple[int, ...]) -> None:
    memory = TestMemory()
    ctx = context(*sizes)
    assert alloc_ctx_tensors_size(ctx, memory) == 0
    with alloc_ctx_tensors(ctx, memory) as buffer:
        assert buffer.size == 0
        assert all(t.buffer is buffer and t.get().size == 0 for t in ctx)
        again = alloc_ctx_tensors(ctx, memory)  # nothing is left to be placed
        assert again.size == 0
        again.free()
    assert memory.n_buffers == 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 32), [64]),
        ((32, 32, 1), [64, 32]),
        ((64, 64, 64), [64, 64, 64]),
        ((32, 64, 32), [32, 64, 32]),
        ((0, 64, 0, 1), [64, 32]),
    ],
)
def test_a_limit_on_buffers_splits_the_context(sizes: tuple[int, ...], expected: list[int]) -> None:
    memory = TestMemory(alignment=32, max_size=64)
    ctx = context(*sizes)
    assert alloc_ctx_tensors_size(ctx, memory) == sum(expected)
    with alloc_ctx_tensors(ctx, memory) as buffer:
        parts = buffer.parts if isinstance(buffer, MultiBuffer) else (buffer,)
        assert [part.size for part in parts] == expected
        assert {t.buffer for t in ctx} == set(parts)
        for i, t in enumerate(ctx):
            t.memset(i)
        assert all((t.get() == i).all() for i, t in enumerate(ctx))
    assert memory.n_buffers == 0


def test_a_tensor_larger_than_any_buffer_is_refused_before_anything_is_allocated() -> None:
    memory = TestMemory(alignment=32, max_size=64)
    ctx = context(32, 32, 32, 65)
    for call in (alloc_ctx_tensors, alloc_ctx_tensors_size):
        with pytest.raises(AllocationError, match=r"'t3'.*exceeds a buffer's 64 bytes"):
            call(ctx, memory)
    assert memory.n_calls == 0


@pytest.mark.parametrize("k", range(4))
def test_when_the_kth_allocation_fails_nothing_stays(k: int) -> None:
    memory = TestMemory(alignment=32, max_size=64)
    ctx = context(64, 64, 64, 64)
    before = TestMemory().alloc_buffer(32)
    placed = leaf(4)
    TensorAllocator(before).alloc(placed)
    ctx.tensors.insert(2, placed)
    ctx.view_1d(ctx.tensors[0], 8)
    memory.fail_at = k
    with pytest.raises(AllocationError, match="asked for this failure") as caught:
        alloc_ctx_tensors(ctx, memory)
    assert caught.value.asked == 64
    assert memory.n_buffers == memory.used == 0
    assert [t for t in ctx if t.buffer is not None] == [placed]
    with alloc_ctx_tensors(ctx, memory) as buffer:
        assert buffer.size == 256


def test_a_view_of_an_unplaced_tensor_elsewhere_fails_and_nothing_stays() -> None:
    memory = TestMemory()
    ctx = context(64)
    ctx.view_1d(leaf(16, "far"), 4)
    with pytest.raises(NotAllocatedError, match="view_init"):
        alloc_ctx_tensors(ctx, memory)
    assert memory.n_buffers == 0
    assert all(t.buffer is None for t in ctx)


def test_a_failing_hook_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = TestMemory(alignment=32)
    ctx = context(8, 8, 8)
    seen: list[str] = []

    def prepare(buffer: TestBuffer, tensor: Tensor) -> None:
        seen.append(tensor.name)
        if tensor.name == "t1":
            raise KeyboardInterrupt

    monkeypatch.setattr(TestBuffer, "_init_tensor", prepare)
    with pytest.raises(KeyboardInterrupt):
        alloc_ctx_tensors(ctx, memory)
    assert seen == ["t0", "t1"]
    assert memory.n_buffers == 0
    assert all(t.buffer is None for t in ctx)


def test_a_list_of_tensors_is_placed_alone():
    ctx = Context()
    a, b, c = (ctx.new_tensor(DType.F32, (n,)) for n in (8, 16, 32))
    memory = TestMemory()
    assert alloc_ctx_tensors_size([a, c], memory) == 4 * (8 + 32)
    with alloc_ctx_tensors([c, a], memory) as buffer:
        assert (c.buffer, c.offset, a.offset, b.buffer) == (buffer, 0, 128, None)
    with pytest.raises(ArgumentError, match="ctx"):
        alloc_ctx_tensors(["a"], memory)
