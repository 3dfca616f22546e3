"""What observers are told: the bytes that each transfer touches, once, and nothing of what moves none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context
from ggmlb.interface import observe
from ggmlb.interface.observe import Action
from ggmlb.testing.fake import FakeReg


class Notes(observe.Observer):
    def __init__(self) -> None:
        self.told: list[tuple[str, list[tuple[int, int, bool]], bool]] = []

    def end(self, action: Action) -> None:
        accesses = [(a.start, a.stop, a.is_write) for a in action.accesses()]
        self.told.append((action.name, accesses, action.stream is not None))


@pytest.fixture
def notes() -> Iterator[Notes]:
    notes = Notes()
    observe.start(notes)
    yield notes
    observe.stop(notes)


DATA = np.zeros(64, np.uint8)

# What is called; the bytes of the tensor that it touches; whether it writes, and whether it is queued.
CALLS: dict[str, tuple[Any, list[tuple[int, int]], bool, bool]] = {
    "set_tensor": (lambda t, k, d: t.set(d[:8], 4), [(4, 12)], True, False),
    "get_tensor": (lambda t, k, d: t.get(4, 8), [(4, 12)], False, False),
    "memset_tensor": (lambda t, k, d: t.memset(1, 4, 8), [(4, 12)], True, False),
    "set_tensor_2d": (
        lambda t, k, d: t.buffer.set_tensor_2d(t, d, 2, 3, 2, 10, 5), [(2, 5), (12, 15)], True, False,
    ),
    "get_tensor_2d": (
        lambda t, k, d: t.buffer.get_tensor_2d(t, d, 2, 3, 2, 10, 5), [(2, 5), (12, 15)], False, False,
    ),
    "set_tensor_async": (lambda t, k, d: k.set_tensor_async(t, d, 4, 8), [(4, 12)], True, True),
    "get_tensor_async": (lambda t, k, d: k.get_tensor_async(t, d[:8], 4), [(4, 12)], False, True),
    "set_tensor_2d_async": (
        lambda t, k, d: k.set_tensor_2d_async(t, d, 2, 3, 2, 10, 5), [(2, 5), (12, 15)], True, True,
    ),
    "get_tensor_2d_async": (
        lambda t, k, d: k.get_tensor_2d_async(t, d, 2, 3, 2, 10, 5), [(2, 5), (12, 15)], False, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_transfer_tells_which_bytes_it_touches(notes: Notes, name: str) -> None:
    call, spans, is_write, is_queued = CALLS[name]
    ctx = Context()
    _, t = ctx.new_tensor("i8", 64), ctx.new_tensor("i8", 64)
    with ggmlb.init_by_name("CPU") as cpu, ggmlb.alloc_ctx_tensors(ctx, cpu):
        notes.told.clear()
        call(t, cpu, DATA.copy())
        told = list(notes.told)
    expected = [(t.offset + start, t.offset + stop, is_write) for start, stop in spans]
    assert t.offset
    assert told == [(name, expected, is_queued)]


@pytest.mark.parametrize("name", CALLS)
def test_a_transfer_of_freed_memory_names_its_own_call(name: str) -> None:
    ctx = Context()
    t = ctx.new_tensor("i8", 64)
    with ggmlb.init_by_name("CPU") as cpu:
        ggmlb.alloc_ctx_tensors(ctx, cpu).free()
        with pytest.raises(ggmlb.FreedError, match=f"^{name}: this CPU buffer"):
            CALLS[name][0](t, cpu, DATA.copy())


@pytest.mark.parametrize("call", ["tensor_copy", "cpy_tensor", "cpy_tensor_async", "copy_on_stream"])
@pytest.mark.parametrize("names", [("CPU", "Fake0"), ("Fake0", "CPU"), ("Fake0", "Fake1")])
def test_a_copy_is_told_once_with_both_sides(notes: Notes, names: tuple[str, str], call: str) -> None:
    devices = {d.name: d for d in (*FakeReg(2).devices, ggmlb.device_by_name("CPU"))}
    with devices[names[0]].init_backend() as source, devices[names[1]].init_backend() as target:
        here, there = Context(), Context()
        src, dst = here.new_tensor("i8", 64), there.new_tensor("i8", 64)
        with ggmlb.alloc_ctx_tensors(here, source), ggmlb.alloc_ctx_tensors(there, target) as buffer:
            src.set(np.arange(64, dtype=np.uint8))
            notes.told.clear()
            done = {
                "tensor_copy": lambda: ggmlb.tensor_copy(src, dst) is None,
                "cpy_tensor": lambda: buffer.cpy_tensor(src, dst),
                "cpy_tensor_async": lambda: target.cpy_tensor_async(source, src, dst),
                "copy_on_stream": lambda: target.copy_on_stream(src, dst),
            }[call]()
            told = list(notes.told)
            target.synchronize()
            assert not done or np.array_equal(dst.get(), np.arange(64))
    sides = [(t.offset, t.offset + 64, t is dst) for t in (src, dst)]
    assert told == [(call, sides, call in ("cpy_tensor_async", "copy_on_stream"))]


@pytest.mark.parametrize(("size", "n"), [(0, 3), (3, 0)])
def test_nothing_is_told_of_no_bytes(notes: Notes, size: int, n: int) -> None:
    ctx = Context()
    t = ctx.new_tensor("i8", 64)
    with ggmlb.init_by_name("CPU") as cpu, ggmlb.alloc_ctx_tensors(ctx, cpu) as buffer:
        notes.told.clear()
        for transfer in (
            buffer.set_tensor_2d, buffer.get_tensor_2d, cpu.set_tensor_2d_async, cpu.get_tensor_2d_async,
        ):  # fmt: skip
            transfer(t, DATA.copy(), 0, size, n, 4, 4)
        t.set(b"", 64)
        t.memset(1, 64)
        assert t.get(64).size == 0
        cpu.set_tensor_async(t, b"")
        assert notes.told == []
