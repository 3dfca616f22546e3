"""The default `ggmlb test` finds an op that a device computes wrongly, whichever it is."""

from __future__ import annotations

import pytest

from ggmlb.backends.cpu.device import CpuReg
from ggmlb.core.enums import Op
from ggmlb.core.ops import SPECS
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.compute import inplace_operands
from ggmlb.testing.results import Outcome
from ggmlb.testing.run import Runner, Selection, tasks
from tests.meta.broken.ops import (
    VIEWS,
    SmallDevice,
    WrongInPlace,
    WrongOnOneElement,
    WrongWhereMemoryIsShared,
    op_names,
    wrong,
)
from tests.meta.broken.values import WrongDevice


def outcomes(device, op):
    """Yield how the cases of an op end."""
    with Runner([device]) as runner:
        for task in tasks(device, Selection(ops=(op,))):
            yield from (result.outcome for result in runner.run(task))


OPS = op_names(WrongDevice)


def inplace_ops():
    """The ops that functions compute in an operand's place."""
    cases = [case for family in FAMILIES for case in cases_of(family)]
    found = set().union(*(case.ops for case in cases if case.program.fn.endswith("_inplace")))
    return [op for op in OPS if op.lower() in found]


def test_every_op_of_the_kit_is_broken_in_turn():
    ops = {case.op for family in FAMILIES for case in cases_of(family)}
    assert set(OPS) == ops - VIEWS
    assert len(op_names(SmallDevice)) > 100, "most of them on the small device"


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_is_wrong_in_one_element_is_found(op):
    assert Outcome.FAILED in outcomes(wrong(WrongOnOneElement, op), op)


@pytest.mark.parametrize("op", inplace_ops())
def test_an_op_that_is_wrong_in_place_is_found(op):
    assert Outcome.FAILED in outcomes(wrong(WrongInPlace, op), op)


def nodes_in_lent_memory():
    """The nodes whose result an allocator may lay where an operand lies."""
    cases = (case for family in FAMILIES for case in cases_of(family))
    nodes = (case.program.case().build().graph.nodes[-1] for case in cases)
    return [node for node in nodes if inplace_operands(node)]


LENT = nodes_in_lent_memory()


def test_each_op_that_may_lie_in_its_operand_does_in_some_case():
    assert {op for op in Op if SPECS[op].inplace} == {node.op for node in LENT}


@pytest.mark.parametrize("op", sorted({node.op_desc() for node in LENT}))
def test_an_op_that_is_wrong_in_memory_of_its_operand_is_found(op):
    assert Outcome.FAILED in outcomes(wrong(WrongWhereMemoryIsShared, op), op)


def test_what_they_are_made_of_computes():
    found = [outcome for op in op_names(SmallDevice) for outcome in outcomes(SmallDevice(CpuReg()), op)]
    assert Outcome.FAILED not in found
    assert Outcome.PASSED in found
