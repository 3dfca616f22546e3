"""Every golden program builds, with the types and shapes of ggml; every function of ggml.h exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggmlb.core.context import Context
from ggmlb.core.enums import NO_OPS, Op, TensorFlag
from ggmlb.core.ops import SPECS
from tests.support.golden import CASES

HERE = Path(__file__).parent
MORE_PARAMS = {
    "XIELU": {"alpha_n", "alpha_p", "beta", "eps"},
    "SWIGLU_OAI": {"alpha", "limit"},
    "SWIGLU_CLAMP": {"limit"},
}


@pytest.fixture(scope="module")
def built():
    return [case.build() for case in CASES]


def test_all_cases_are_there():
    assert len(CASES) == 862
    assert len({case.id for case in CASES}) == 862


@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_outputs_have_the_types_and_shapes_of_ggml(family, built):
    for program in built:
        if program.case.family != family:
            continue
        for spec in program.case.outputs:
            tensor = program.tensors[spec.name]
            assert (tensor.dtype, tensor.ne) == (spec.dtype, spec.ne), program.case.id
            assert tensor.flags & TensorFlag.OUTPUT
            assert tensor.view_src is None or tensor.view_src.flags & TensorFlag.OUTPUT


def test_graphs_hold_the_steps_in_program_order(built):
    for program in built:
        place = {node: i for i, node in enumerate(program.graph.nodes)}
        steps = [program.tensors[step.out] for step in program.case.steps if step.out]
        steps = list(dict.fromkeys(steps))  # rope_set_offset returns what it is given
        assert [place[t] for t in steps] == sorted(place[t] for t in steps), program.case.id
        for node, i in place.items():
            assert all(place.get(s, -1) < i for s in node.src if s is not None), program.case.id


def test_params_are_those_of_the_table(built):
    seen = set()
    for program in built:
        for node in program.graph.nodes:
            assert set(node.params) == set(SPECS[node.op].params) | MORE_PARAMS.get(node.op_desc(), set())
            seen.add(node.op)
    never = {Op.NONE, Op.FLASH_ATTN_BACK, Op.MAP_CUSTOM1, Op.MAP_CUSTOM2, Op.MAP_CUSTOM3, Op.CUSTOM}
    assert seen | never == set(Op)


def test_nodes_in_the_memory_of_another_name_it_as_source(built):
    for program in built:
        for node in program.graph.nodes:
            if node.view_src is not None and node.op not in NO_OPS:
                roots = {s.view_src or s for s in node.src if s is not None}
                assert node.view_src in roots, node


def test_every_function_of_ggml_exists():
    names = [n for n in (HERE / "ggml_functions.txt").read_text().splitlines() if not n.startswith("#")]
    missing = [name for name in names if not callable(getattr(Context, name, None))]
    assert not missing
    assert len(names) == 260


def test_every_method_says_what_it_gives_and_what_it_mirrors():
    for name in (HERE / "ggml_functions.txt").read_text().split("\n")[1:-1]:
        method = getattr(Context, name)
        assert method.__name__ == name
        assert method.__doc__.split("\n")[0].rstrip().endswith((".", "`.")), name
        assert f"ggml_{name}" in method.__doc__, name
