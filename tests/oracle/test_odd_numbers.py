"""NaN, infinities, denormals and numbers far out give on the CPU what the installed ggml gives."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("ggml") is None:
    pytest.skip("ggml-python is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

from ggmlb import Backend, DType
from tests.support.odd_numbers import computed, difference, variants
from tests.support.oracle import GgmlProcess, Missing, Refused

pytestmark = pytest.mark.oracle

FUNCTIONS = (
    "abs", "ceil", "cos", "elu", "exp", "expm1", "floor", "gelu", "gelu_erf", "gelu_quick", "hardsigmoid",
    "hardswish", "log", "neg", "relu", "round", "scale", "sgn", "sigmoid", "silu", "sin", "softplus", "sqr",
    "sqrt", "step", "tanh", "trunc", "xielu",
)  # fmt: skip
GATED = ("geglu", "geglu_erf", "geglu_quick", "reglu", "swiglu", "swiglu_oai")
OTHERS = (
    "add", "cont", "div", "group_norm", "l2_norm", "mean", "mul", "norm", "rms_norm", "soft_max_ext", "sub",
    "sum", "sum_rows",
)  # fmt: skip

STEP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""How exact numbers are in short types."""

TABLES = ("gelu", "gelu_quick", "geglu", "geglu_quick")
"""What ggml takes from tables of float16."""


@pytest.mark.parametrize("family", [*FUNCTIONS, *GATED, *OTHERS])
def test_odd_numbers_give_what_they_give_in_ggml(family: str, ggml: GgmlProcess, cpu: Backend) -> None:
    wrong = []
    for kind, label, program in variants(family):
        if kind == "-inf" and (family == "geglu" or program.leafs[0].dtype is not DType.F32):
            continue  # of a gate below -10 ggml's geglu is 0 though the rest be infinite; its tables have NaN
        try:
            expected = ggml.compute(*program.request())
        except (Refused, Missing):
            continue
        found = computed(cpu, program)
        assert found is not None
        for values, (dtype, _, data) in zip(found, expected, strict=True):
            right = np.frombuffer(data, DType.parse(dtype).numpy)
            step = max(STEP.get(values.dtype.name, 0.0), 1e-3 if family in TABLES else 2e-38)
            if reason := difference(values, right, max(10 * program.nmse, 1e-9), step=step):
                wrong.append(f"{label}: {reason}")
    assert not wrong, "\n".join(wrong)
