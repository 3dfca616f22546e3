"""The same graph and input give the same bits: in any thread, stream and memory, beside any load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ggmlb import Backend, Context, Device, DType, Status, alloc_ctx_tensors
from ggmlb.core.enums import NO_OPS
from ggmlb.testing.cases import FAMILIES, PlainChoices, Program, cases_of
from tests.support.gpus import LLVM, OPENCL, device_fixture

device = device_fixture(pytest.param("CPU", id="cpu"), LLVM, OPENCL)

MOST = 200_000
"""Elements of a program's leafs."""


@pytest.fixture(scope="module")
def streams(device: Device) -> Iterator[list[Backend]]:
    with device.init_backend() as one, device.init_backend() as other:
        yield [one, other]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """A thread, beside one that keeps processors, memory and the BLAS of NumPy busy."""
    end = threading.Event()

    def load() -> None:
        a = np.ones((300, 300), np.float32)
        while not end.wait(0.001):
            a @ a

    with ThreadPoolExecutor(2) as threads:
        threads.submit(load)
        yield threads
        end.set()


def programs(family: str) -> list[Program]:
    """The plainest of a family, the one of most elements, and one in between."""
    found = [case.program for case in cases_of(family)]
    size = {id(p): sum(int(np.prod(leaf.ne)) for leaf in p.leafs) for p in found}
    by_size = sorted((p for p in found if size[id(p)] <= MOST), key=lambda p: size[id(p)])
    return [found[0], by_size[len(by_size) // 2], by_size[-1]]


def bits(stream: Backend, program: Program, n_before: int = 0) -> list[bytes] | None:
    """What a stream gives, in memory that begins `n_before` floats further; `None` if it declines a node."""
    ctx = Context()
    if n_before:
        ctx.new_tensor("f32", (n_before,))
    built = program.case("bits").build(ctx)
    if any(stream.device.declines(node) for node in built.graph.nodes if node.op not in NO_OPS):
        return None
    with alloc_ctx_tensors(ctx, stream):
        built.upload()
        assert stream.graph_compute(built.graph) is Status.SUCCESS
        return [built.tensors[name].to_numpy().tobytes() for name in program.outputs]


def check(program: Program, streams: list[Backend], elsewhere: ThreadPoolExecutor) -> None:
    first = bits(streams[0], program)
    if first is None:
        return
    assert bits(streams[0], program) == first, f"a second time: {program.text}"
    assert bits(streams[1], program, 333) == first, f"on another stream: {program.text}"
    for stream in streams:
        found = elsewhere.submit(bits, stream, program, 77).result()
        assert found == first, f"in a thread: {program.text}"


@pytest.mark.parametrize("n_rows", [1, 32, 130])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q4_0"])
def test_products_as_large_as_a_models_have_the_same_bits(
    dtype: str, n_rows: int, streams: list[Backend], elsewhere: ThreadPoolExecutor
) -> None:
    program = Program(PlainChoices(0))
    weight, x = program.leaf(DType.parse(dtype), (256, 256)), program.leaf(DType.F32, (256, n_rows))
    program.out("rms_norm", program.step("mul_mat", weight, x), 1e-5)
    check(program, streams, elsewhere)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_bits_are_the_same(family: str, streams: list[Backend], elsewhere: ThreadPoolExecutor) -> None:
    for program in programs(family):
        check(program, streams, elsewhere)
