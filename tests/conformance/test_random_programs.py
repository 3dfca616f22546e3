"""Random programs: layouts do not matter to the CPU, and other devices compute what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from ggmlb import Backend, Error, Status, alloc_ctx_tensors, init_by_name
from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import BackendUnavailable, RegistryError
from ggmlb.testing.cases import FAMILIES
from ggmlb.testing.devices import device_named
from ggmlb.testing.draw import Program
from ggmlb.testing.programs import Built, ProgramStep
from tests.support.oracle import programs

POISON = 0xFF  # NaN in every float type, so that an element that is not written shows


@pytest.fixture(scope="module")
def cpu() -> Iterator[Backend]:
    with init_by_name("CPU") as backend:
        yield backend


@pytest.fixture(scope="module", params=["LLVM", "OpenCL0", "ggml:CPU", "Meta(CPU,OpenCL0)"])
def stream(request: pytest.FixtureRequest) -> Iterator[Backend]:
    try:
        device = device_named(request.param)
    except (RegistryError, BackendUnavailable) as error:
        pytest.skip(str(error))
    with device.init_backend() as backend:
        yield backend


@contextmanager
def computed(backend: Backend, program: Program, expected: Any = ()) -> Iterator[Built | None]:
    """A program that was computed; `None` if it cannot be built, or the backend declines a node."""
    try:
        built = program.case("random", expected).build()
    except Error:
        yield None
        return
    nodes = [node for node in built.graph.nodes if node.op not in NO_OPS]
    if any(backend.device.declines(node) for node in nodes):
        yield None
        return
    with alloc_ctx_tensors(built.ctx, backend) as buffer:
        buffer.clear(POISON)
        built.upload()
        assert backend.graph_compute(built.graph) is Status.SUCCESS
        yield built


def outputs(program: Program, built: Built) -> list[tuple[int, list[int], bytes]]:
    found = [built.tensors[name] for name in program.outputs]
    return [(int(t.dtype), list(t.ne), t.packed().tobytes()) for t in found]


def compare(program: Program, backend: Backend, reference: Backend, other: Program) -> None:
    """Compare a program on a backend with another one on the reference."""
    note(repr(program))
    with computed(reference, other) as built:
        expected = None if built is None else outputs(other, built)
    if expected is not None:
        with computed(backend, program, expected) as built:
            if built is not None:
                assert {n: v.reason for n, v in built.compare().items() if not v.ok} == {}


def in_order(program: Program) -> Program:
    """The program with a contiguous copy of each operand that is a view of a leaf."""
    leafs = {f"${leaf.name}" for leaf in program.leafs}
    steps: list[ProgramStep] = []
    copies: dict[str, str] = {}
    for step in program.steps:
        steps.append(replace(step, args=_named(step.args, copies)))
        if step.fn in ("permute", "view_4d") and step.args[0] in leafs and step.out not in program.outputs:
            steps.append(ProgramStep(f"{step.out}c", "cont", (f"${step.out}",)))
            copies[f"${step.out}"] = f"${step.out}c"
    return replace(program, steps=steps)


def _named(args: Any, names: dict[str, str]) -> Any:
    if isinstance(args, (list, tuple)):
        return type(args)(_named(arg, names) for arg in args)
    return names.get(args, args) if isinstance(args, str) else args


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=12)
@given(data=st.data())
def test_layouts_of_operands_change_no_result(family: str, data: st.DataObject, cpu: Backend) -> None:
    program = data.draw(programs(family, beyond=True))
    compare(program, cpu, cpu, in_order(program))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=100)
@given(data=st.data())
def test_devices_compute_what_the_cpu_does(
    family: str, data: st.DataObject, stream: Backend, cpu: Backend
) -> None:
    program = data.draw(programs(family, beyond=True))
    compare(program, stream, cpu, program)
