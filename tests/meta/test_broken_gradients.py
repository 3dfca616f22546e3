"""Mode `grad` finds every rule that is wrong, and every op of gradients that a device computes wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ggmlb.core.enums import Op
from ggmlb.core.ops import SPECS
from ggmlb.core.ops.spec import zero_gradient
from ggmlb.interface.registry import device_by_name
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.results import Outcome
from ggmlb.testing.run import Runner, Selection, tasks
from tests.meta.broken.ops import WrongOp, wrong

RULES = [
    (op, i) for op, spec in SPECS.items() for i, rule in spec.backward.items() if rule is not zero_gradient
]

ELSEWHERE = {Op.RESHAPE: "conv_2d", Op.VIEW: "cont", Op.PERMUTE: "cont", Op.TRANSPOSE: "cont"}
"""Families in which ops without families of their own stand beside others."""


def outcomes(device, families):
    """Yield how the cases of families end."""
    with Runner([device]) as runner:
        for task in tasks(device, Selection("grad")):
            if task.family in families:
                yield from (result.outcome for result in runner.run(task))


@pytest.mark.parametrize(("op", "i"), RULES, ids=[f"{op.value}-{i}" for op, i in RULES])
def test_a_rule_that_is_wrong_is_found(op, i, monkeypatch):
    spec = SPECS[op]
    right = spec.backward[i]

    def too_large(c, node, grad):
        found = right(c, node, grad)
        return None if found is None else c.scale(found, 1.1)

    monkeypatch.setitem(SPECS, op, replace(spec, backward={**spec.backward, i: too_large}))
    families = RECORDS[op].families or (ELSEWHERE[op],)
    assert Outcome.FAILED in outcomes(device_by_name("CPU"), families)


BACK = {
    "OUT_PROD": "mul_mat", "SILU_BACK": "silu", "RMS_NORM_BACK": "rms_norm", "SOFT_MAX_BACK": "soft_max_ext",
    "ROPE_BACK": "rope", "GET_ROWS_BACK": "get_rows", "CROSS_ENTROPY_LOSS_BACK": "cross_entropy_loss",
    "REPEAT_BACK": "repeat", "IM2COL_BACK": "conv_2d", "POOL_2D_BACK": "pool_2d",
}  # fmt: skip


@pytest.mark.parametrize("op", BACK)
def test_an_op_of_gradients_that_is_wrong_is_found(op):
    assert Outcome.FAILED in outcomes(wrong(WrongOp, op), (BACK[op],))
