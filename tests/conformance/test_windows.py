"""ACC and SET write a window of a tensor: refused, or the elements that it names and no other byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from ggmlb import Backend, Context, Device, Error, Graph, Tensor, UnsupportedOpError, alloc_ctx_tensors
from tests.support.gpus import LLVM, OPENCL, PLAYED, device_fixture

CPU = pytest.param("CPU", id="cpu")
GGML = pytest.param("ggml:CPU", id="ggml")
device = device_fixture(CPU, LLVM, OPENCL, PLAYED, GGML)

FUNCTIONS = ("set", "set_inplace", "acc", "acc_inplace")


def _laid_out(ctx: Context, base: Tensor, kind: int) -> Tensor:
    """A tensor in the memory of another: all of it, transposed, with gaps, or some whole rows."""
    n0, n1, n2, n3 = base.ne
    _, nb1, nb2, nb3 = base.nb
    if kind == 0:
        return base
    if kind == 1:
        return ctx.transpose(base)
    if kind == 2:
        return ctx.view_4d(base, n0 - 2, n1, n2, n3, nb1, nb2, nb3, 4)
    return ctx.view_2d(base, n0, n1 * n2 - 1, nb1, nb1)


def _array(t: Tensor, memory: Any) -> np.ndarray:
    return np.ndarray(t.ne[::-1], t.dtype.numpy, memory, t.view_offs, t.nb[::-1])


class Window:
    """A drawn window: bases and a result among guards, in one context."""

    def __init__(self, seed: int) -> None:
        r = np.random.default_rng(seed)
        self.ctx = ctx = Context()
        self.roots: list[Tensor] = []
        fn = FUNCTIONS[seed % 4]
        dtype = ("f32", "i32", "f16")[r.integers(3)] if fn.startswith("set") else "f32"
        a = self._root(dtype, r.integers((3, 2, 1, 1), (9, 6, 4, 3)).tolist())
        b = self._root(dtype, r.integers((3, 2, 1, 1), (6, 4, 3, 2)).tolist())
        a, b = _laid_out(ctx, a, r.choice([0, 0, 3, 1, 2])), _laid_out(ctx, b, r.choice([0, 0, 2, 1]))
        size = a.dtype.type_size
        nb = [
            int(r.choice([n, m, size * r.integers(0, 40), r.integers(0, 99)]))
            for n, m in zip(a.nb[1:], b.nb[1:], strict=True)
        ]
        offset = int(r.choice([0, size * r.integers(0, 20), r.integers(0, 60), b.nb[1]]))
        self.a, self.b, self.window, self.how = (
            a,
            b,
            (*nb, offset),
            f"{fn} {a!r} {b!r} nb {nb} offset {offset}",
        )
        self.node: Tensor | None = None
        try:
            self.node = getattr(ctx, fn)(a, b, *self.window)
        except Error:
            if a.is_contiguous() and b.is_contiguous() and b.nbytes <= a.nbytes:  # as changed params, too
                self.node = getattr(ctx, fn)(a, b, *b.nb[1:], 0)
                self.node.params.update(zip(("nb1", "nb2", "nb3", "offset"), self.window, strict=True))
        if self.node is not None and self.node.view_src is None:
            self.roots += [self.node, ctx.new_tensor("i8", (512,))]

    def _root(self, dtype: str, ne: list[int]) -> Tensor:
        if not self.roots:
            self.roots.append(self.ctx.new_tensor("i8", (512,)))
        found = self.ctx.new_tensor(dtype, ne)
        self.roots += [found, self.ctx.new_tensor("i8", (512,))]
        return found

    def expected(self, before: dict[Tensor, Any]) -> dict[Tensor, Any]:
        """The bytes of all roots after the op; NumPy raises if the window lies outside."""
        assert self.node is not None
        after = {t: v.copy() for t, v in before.items()}
        a, b = (_array(t, before[t.view_src or t]) for t in (self.a, self.b))
        result = np.ascontiguousarray(a)
        (*nb, offset), size = self.window, a.itemsize
        window = np.ndarray(b.shape, b.dtype, result.data, offset, (*nb[::-1], size))
        window[...] = window + b if self.node.op.value == "ACC" else b
        _array(self.node, after[self.node.view_src or self.node])[...] = result
        return after


def _outcome(w: Window, stream: Backend) -> str:
    if w.node is None:
        return "refused"
    with alloc_ctx_tensors(w.ctx, stream):
        for i, t in enumerate(w.roots):
            t.set(np.random.default_rng(i).integers(8, 60, t.nbytes, np.uint8))
        before = {t: t.get() for t in w.roots}
        try:
            stream.graph_compute(Graph().build_forward_expand(w.node))
        except UnsupportedOpError:
            return "declined"
        found, right = {t: t.get() for t in w.roots}, w.expected(before)
    wrong = [t for t in w.roots if not np.array_equal(found[t], right[t])]
    assert not wrong, f"{w.how}: {wrong}"
    return "computed"


def test_a_window_is_refused_or_writes_no_byte_beside_it(device: Device) -> None:
    with device.init_backend() as stream:
        outcomes = Counter(_outcome(Window(seed), stream) for seed in range(400))
    assert min(outcomes[kind] for kind in ("refused", "declined", "computed")) > 15, outcomes
