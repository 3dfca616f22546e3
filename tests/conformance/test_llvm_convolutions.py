"""Convolutions on LLVM with the nodes behind them, in one kernel and one by one, beside the CPU device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ggmlb import Context, Graph, GraphAllocator, Tensor
from ggmlb.backends.common.fusion import Group, fuse
from tests.support.gpus import first

Build = Callable[["Program"], Tensor]


class Program:
    """A context, and the leafs with their values."""

    def __init__(self) -> None:
        self.ctx, self.leafs = Context(), list[tuple[Tensor, np.ndarray]]()
        self._rng = np.random.default_rng(3)

    def leaf(self, *ne: int) -> Tensor:
        tensor = self.ctx.set_input(self.ctx.new_tensor("f32", ne))
        self.leafs.append((tensor, self._rng.standard_normal(tensor.shape).astype(np.float32)))
        return tensor


def dense(p: Program, ne: tuple[int, ...], taps: tuple[int, int], out: int, *place: int) -> Tensor:
    return p.ctx.conv_2d_direct(p.leaf(*taps, ne[2], out), p.leaf(*ne), *place)


def depthwise(p: Program, ne: tuple[int, ...], taps: tuple[int, int], *place: int) -> Tensor:
    return p.ctx.conv_2d_dw_direct(p.leaf(*taps, 1, ne[2]), p.leaf(*ne), *place)


def product(p: Program, width: int, height: int, channels: int, out: int) -> Tensor:
    rows = p.ctx.cont(p.ctx.transpose(p.leaf(width * height, channels)))
    return p.ctx.reshape_3d(p.ctx.mul_mat(rows, p.leaf(channels, out)), width, height, out)


CONVOLUTIONS: dict[str, Build] = {
    "a tile and a part": lambda p: dense(p, (19, 3, 16, 2), (3, 3), 13, 1, 1, 1, 1),
    "rows shorter than a vector": lambda p: dense(p, (5, 9, 4, 1), (3, 2), 12, 1, 1, 2, 1, 2, 1),
    "strides": lambda p: dense(p, (70, 11, 3, 2), (5, 3), 16, 2, 3, 2, 1),
    "one tap": lambda p: dense(p, (20, 20, 40, 3), (1, 1), 25),
    "in several passes": lambda p: dense(p, (6, 6, 300, 1), (3, 3), 14, 1, 1, 1, 1),
    "patches": lambda p: dense(p, (33, 27, 3, 2), (8, 6), 40, 8, 8, 4, 2),
    "few pixels": lambda p: dense(p, (4, 2, 12, 1), (3, 2), 20, 1, 1, 1, 0),
    "one pixel": lambda p: dense(p, (5, 1, 12, 3), (5, 1), 20),
    "depthwise": lambda p: depthwise(p, (20, 11, 7, 2), (5, 5), 1, 1, 2, 2),
    "depthwise with strides": lambda p: depthwise(p, (41, 9, 3, 2), (3, 4), 3, 2, 0, 2, 1, 2),
    "product": lambda p: product(p, 15, 3, 40, 13),
}


ALONE = {"in several passes", "patches", "few pixels", "one pixel"}
"""Convolutions that no kernel computes with the nodes behind them."""


def bias(p: Program, t: Tensor) -> Tensor:
    return p.ctx.add(t, p.leaf(1, 1, t.ne[2]))


def residual(p: Program, t: Tensor) -> Tensor:
    return p.ctx.add(t, p.leaf(*t.ne))


TAILS: dict[str, list[Callable[[Program, Tensor], Tensor]]] = {
    "nothing": [],
    "bias and a function": [bias, lambda p, t: p.ctx.hardswish(t)],
    "of all kinds": [
        lambda p, t: p.ctx.mul(t, p.leaf(1, 1, t.ne[2])), bias, residual, lambda p, t: p.ctx.relu(t),
        lambda p, t: p.ctx.scale_bias(t, 1.5, 0.25), lambda p, t: p.ctx.clamp(t, -1.0, 2.0),
    ],
    "a residual first": [lambda p, t: p.ctx.add(p.leaf(*t.ne), t), lambda p, t: p.ctx.relu(t)],
}  # fmt: skip


def computed(
    device: str, build: Build, tail: str = "nothing", n_threads: int = 1
) -> tuple[np.ndarray, list[str]]:
    p = Program()
    t = build(p)
    for step in TAILS[tail]:
        t = step(p, t)
    graph = Graph().build_forward_expand(p.ctx.set_output(t))
    with first(device).init_backend({"n_threads": n_threads}) as stream:
        stream.graph_optimize(graph)
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            for node in graph.nodes:
                if node.view_src is None:
                    node.memset(0xFF)  # NaN, whatever is not written
            for leaf, data in p.leafs:
                leaf.set_array(data)
            stream.graph_compute(graph)
            can_fuse = getattr(stream, "can_fuse", lambda group: False)
            found = [item.pattern for item in fuse(graph, can_fuse) if isinstance(item, Group)]
            return t.to_numpy(), found


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("convolution", CONVOLUTIONS)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_as_on_the_cpu(convolution: str, tail: str, n_threads: int) -> None:
    want, _ = computed("CPU", CONVOLUTIONS[convolution], tail)
    got, found = computed("LLVM", CONVOLUTIONS[convolution], tail, n_threads)
    is_fused = (TAILS[tail] or convolution == "product") and convolution not in ALONE
    assert found == (["conv"] if is_fused else [])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("kind", ["transposed", "a part", "another shape"])
def test_views_that_are_not_of_the_same_planes_are_computed_alone(kind: str) -> None:
    def build(p: Program) -> Tensor:
        y = dense(p, (6, 6, 8, 1), (1, 1), 6)
        views = {
            "transposed": lambda: p.ctx.add(p.leaf(6, 6, 6), p.ctx.permute(y, 0, 2, 1, 3)),
            "a part": lambda: p.ctx.relu(p.ctx.view_3d(y, 6, 6, 5, y.nb[1], y.nb[2], y.nb[2])),
            "another shape": lambda: p.ctx.add(p.ctx.reshape_4d(y, 1, 1, 1, 216), p.leaf(1, 1, 1, 216)),
        }
        return views[kind]()

    want, _ = computed("CPU", build)
    got, found = computed("LLVM", build)
    assert not found
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("place", "images"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 1)])
def test_operands_of_the_tail_have_strides_of_their_own(place: int, images: int) -> None:
    def build(p: Program) -> Tensor:
        y = dense(p, (6, 6, 8, images), (1, 1), 5)
        ne = {1: (36, 5, images), 2: (6, 6, 5, images), 3: (6, 6, 1, 5)}[place]
        y = p.ctx.reshape(y, p.ctx.new_tensor("f32", ne))
        table, (n1, n2, n3) = p.leaf(3, 5), (5 if d == place else 1 for d in (1, 2, 3))
        nb = table.nb[1]
        bias = p.ctx.view_4d(table, 1, n1, n2, n3, nb, nb, nb, 4)
        return p.ctx.add(p.ctx.add(y, bias), p.leaf(*ne))

    want, _ = computed("CPU", build)
    got, found = computed("LLVM", build)
    assert found == ["conv"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_result_that_others_read_is_kept() -> None:
    p = Program()
    y = CONVOLUTIONS["a tile and a part"](p)
    z = p.ctx.relu(y)
    graph = Graph().build_forward_expand(p.ctx.set_output(z), p.ctx.set_output(p.ctx.neg(y)))
    with first("LLVM").init_backend() as stream:
        assert not [item for item in fuse(graph, stream.can_fuse) if isinstance(item, Group)]  # type: ignore[attr-defined]
