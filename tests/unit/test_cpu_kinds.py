"""A node whose kind was lowered before computes what it would compute by its rule."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np
import pytest

from ggmlb import Backend, Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cpu import CpuReg, lowering, plan
from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import Error
from ggmlb.core.tensor import Tensor
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.programs import Built

CASES = [case for family in FAMILIES for case in cases_of(family)[:4]]


@pytest.fixture
def cpu() -> Iterator[Backend]:
    """A stream of a device that has lowered nothing yet."""
    with CpuReg().devices[0].init_backend({"n_threads": 1}) as backend:
        yield backend


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops of nodes that were lowered by their rules."""
    names: list[str] = []

    def noted(node: Tensor, n_threads: int) -> lowering.LoweredCalls:
        names.append(node.op_desc())
        return lowering.lower(node, n_threads)

    monkeypatch.setattr(plan, "lower", noted)
    return names


def fill(built: Built, factor: float) -> None:
    built.upload()
    for leaf in built.graph.leafs:
        if leaf.dtype is DType.F32 and leaf.view_src is None:
            leaf.set_array(factor * leaf.to_numpy())


def test_a_known_kind_gives_what_the_rule_gives(cpu: Backend, lowered: list[str]) -> None:
    found_again = set()
    for case in CASES:
        try:
            contexts = [Context() for _ in range(2)]
            first, second = (case.program.case(case.id).build(ctx) for ctx in contexts)
        except Error:
            continue  # the kit says why
        if any(cpu.device.declines(node) for built in (first, second) for node in built.graph.nodes):
            continue
        buffers = [alloc_ctx_tensors(ctx, cpu) for ctx in contexts]
        for built, factor in (first, 1.0), (second, 0.5):
            fill(built, factor)
        cpu.graph_compute(Graph(first.graph.nodes))
        lowered.clear()
        cpu.graph_compute(Graph(second.graph.nodes))
        found_again |= {node.op_desc() for node in second.graph.nodes} - set(lowered)
        found = [second.tensors[name].get().tobytes() for name in case.program.outputs]
        fill(second, 0.5)
        cpu.device.kinds.lowered.clear()
        cpu.graph_compute(Graph(second.graph.nodes))
        assert found == [second.tensors[name].get().tobytes() for name in case.program.outputs], case.id
        for buffer in buffers:
            if buffer is not None:
                buffer.free()
    assert len(found_again) > 100, sorted(found_again)


def test_what_is_kept_of_a_kind_keeps_no_tensor_alive(cpu: Backend) -> None:
    kept: list[weakref.ref[object]] = []
    for case in CASES:
        ctx = Context()
        try:
            built = case.program.case(case.id).build(ctx)
        except Error:
            continue
        if any(cpu.device.declines(node) for node in built.graph.nodes):
            continue
        buffer = alloc_ctx_tensors(ctx, cpu)
        built.upload()
        cpu.graph_compute(Graph(built.graph.nodes))
        kept += [weakref.ref(x) for x in (ctx, buffer, *built.graph.nodes) if x is not None]
        if buffer is not None:
            buffer.free()
        del ctx, built, buffer
    assert cpu.device.kinds.lowered
    cpu.graph_compute(Graph())
    gc.collect()
    assert not [ref() for ref in kept if ref() is not None]


def test_large_constants_and_the_functions_of_users_are_not_kept(
    cpu: Backend, lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "MAX_CONSTANTS", 100)
    ctx = Context()
    x = ctx.new_tensor("f32", (8, 2, 4))
    masks = [ctx.new_tensor("f32", (8, 2)) for _ in range(2)]
    nodes = [ctx.soft_max_ext(x, mask, 1.0, 8.0) for mask in masks]
    nodes += [ctx.map_custom1(x, lambda dst, a, *_: np.negative(a, out=dst)) for _ in range(2)]
    with alloc_ctx_tensors(ctx, cpu) as buffer:
        buffer.clear(0)
        cpu.graph_compute(Graph(nodes))
        assert lowered == ["SOFT_MAX", *2 * ["MAP_CUSTOM1"]]  # four slopes are few
        monkeypatch.setattr(lowering, "MAX_CONSTANTS", 0)
        cpu.device.kinds.lowered.clear()
        cpu.graph_compute(Graph(nodes[:2]))
        assert lowered[3:] == 2 * ["SOFT_MAX"]


def functions_of(lowered: lowering.LoweredCalls) -> Iterator[object]:
    for step in lowered.steps:
        if isinstance(step, lowering.TileStage):
            yield step.kernel
        elif isinstance(step, tuple):
            yield step[0]
        else:
            yield from [fn for calls in step for fn, _ in calls]


def captured_by(fn: object) -> Iterator[object]:
    """What a function has captured, with what is in its lists and what its functions have captured."""
    found = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    if isinstance(fn, partial):
        found += [fn.func, *fn.args, *fn.keywords.values()]
    for x in found:
        yield from x if isinstance(x, list) else [x]
        yield from captured_by(x)


def test_constants_are_arguments_so_that_their_size_is_known(cpu: Backend) -> None:
    wrong = set()
    for case in CASES:
        try:
            built = case.program.case(case.id).build(ctx := Context())
        except Error:
            continue
        if any(cpu.device.declines(node) for node in built.graph.nodes):
            continue
        buffer = alloc_ctx_tensors(ctx, cpu)
        for node in built.graph.nodes:
            if node.op not in NO_OPS and not node.is_empty:
                functions = functions_of(lowering.lower(node, 2))
                held = chain.from_iterable(map(captured_by, functions))
                wrong |= {node.op_desc() for x in held if isinstance(x, np.ndarray)}
        if buffer is not None:
            buffer.free()
    assert not wrong


def test_zeros_of_either_sign_are_two_kinds(cpu: Backend) -> None:
    ctx = Context()
    fills = [ctx.fill(ctx.new_tensor("f32", 4), value) for value in (0.0, -0.0)]
    with alloc_ctx_tensors(ctx, cpu):
        cpu.graph_compute(Graph(fills))
        assert [bool(np.signbit(y.to_numpy()).all()) for y in fills] == [False, True]


def test_one_tensor_twice_is_another_kind_than_two(cpu: Backend) -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 4)
    row = ctx.new_tensor("f32", 8)
    halves = ctx.view_1d(row, 4, 0), ctx.view_1d(row, 4, 8)  # which share elements
    sums = [ctx.add(x, x), ctx.sub(*halves)]
    sums += [ctx.add(sums[0], x), ctx.sub(x, halves[1]), ctx.add(x, sums[0]), ctx.sub(sums[0], x)]
    with alloc_ctx_tensors(ctx, cpu):
        x.set_array(np.arange(4))
        row.set_array(np.arange(8) ** 2)
        cpu.graph_compute(Graph(sums))
        assert [list(y.to_numpy()) for y in sums[:4]] == [
            [0, 2, 4, 6],
            [-4, -8, -12, -16],
            [0, 3, 6, 9],
            [-4, -8, -14, -22],
        ]
        assert [list(y.to_numpy()) for y in sums[4:]] == [[0, 3, 6, 9], [0, 1, 2, 3]]


def test_the_layers_of_a_model_are_lowered_once(cpu: Backend, lowered: list[str]) -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", (8, 2))
    w = ctx.new_tensor("f32", (8, 8))
    norm = ctx.new_tensor("f32", 8)
    y = x
    for _ in range(4):
        y = ctx.silu(ctx.mul_mat(w, ctx.mul(ctx.rms_norm(y, 1e-5), norm)))
    graph = Graph().build_forward_expand(y)
    with alloc_ctx_tensors(ctx, cpu):
        x.set_array(np.ones((2, 8)))
        w.set_array(np.eye(8))
        norm.set_array(np.ones(8))
        cpu.graph_compute(graph)
        assert sorted(lowered) == ["MUL", "MUL_MAT", "RMS_NORM", "SILU"]
        assert np.isfinite(y.to_numpy()).all()
