"""NaN, infinities, denormals, signed zeros and numbers far out: all devices compute what the CPU does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ggmlb import Backend, Device, Error
from ggmlb.testing.cases import FAMILIES
from ggmlb.testing.draw import Program
from tests.support.gpus import LLVM, OPENCL, device_fixture
from tests.support.odd_numbers import cases, computed, difference, variants

device = device_fixture(LLVM, OPENCL)

SIGNED = {
    "abs",
    "neg",
    "cast",
    "cont",
    "cpy",
    "dup",
    "get_rows",
    "set_rows",
    "concat",
    "repeat",
    "pad",
    "roll",
}
"""Families that move numbers, or change nothing but the sign: zeros keep theirs."""

PRODUCTS = {"mul_mat", "mul_mat_id", "flash_attn_ext", "rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn"}
"""Sums of products: which of several values that are not finite comes out depends on their order."""

SMOOTH = {"elu", "expm1", "gelu", "gelu_erf", "gelu_quick", "sigmoid", "silu", "softplus", "tanh"}
"""Functions that approach 0 without crossing it: their tails have the right sign, however small."""

UNSPECIFIED = {
    "argsort": "which of equals comes first, and where NaN does",
    "argsort_top_k": "the same",
    "top_k": "the same",
}
"""What neither ggml nor we say of a family's results; only that it is computed is asked."""

PADDED = {"conv_2d_direct", "conv_2d_dw_direct", "conv_3d_direct"}
"""Some devices leave out padding and some multiply with it: a kernel's NaN and infinities show which."""

STEPS = {"float16": 2.0**-24, "bfloat16": 1e-40}
"""The distance of the least numbers of short types."""


@pytest.fixture(scope="module")
def stream(device: Device) -> Iterator[Backend]:
    with device.init_backend() as backend:
        yield backend


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_odd_numbers_give_what_they_give_on_the_cpu(family: str, stream: Backend, cpu: Backend) -> None:
    wrong = []
    for kind, label, program in variants(family):
        found = computed(stream, program)
        right = None if found is None else computed(cpu, program)
        if found is None or right is None:
            continue
        if family in UNSPECIFIED or (family.split(" of ")[0] in PADDED and kind in ("nan", "inf", "-inf")):
            continue
        for x, y in zip(found, right, strict=True):
            reason = difference(
                x,
                y,
                max(10 * program.nmse, 1e-9),
                step=1e-37 if family in PRODUCTS else STEPS.get(x.dtype.name, 0.0),
                signs=family in SIGNED and kind == "zeros",
                products=family in PRODUCTS,
            )
            if reason:
                wrong.append(f"{label}: {reason}")
            elif family in SMOOTH and _is_opposite(x, y).any():
                wrong.append(f"{label}: of opposite signs")
    assert not wrong, "\n".join(wrong)


ODD_PARAMETERS = (-1.5, -0.0, np.nan, np.inf, -np.inf)


def _with_odd_parameters(family: str) -> Iterator[tuple[str, Program]]:
    """A family's programs with each float parameter odd in turn."""
    for case in cases(family)[:2]:
        steps = case.program.steps
        for s, step in enumerate(steps):
            for i in (i for i, arg in enumerate(step.args) if type(arg) is float):
                for odd in ODD_PARAMETERS:
                    changed = replace(step, args=(*step.args[:i], odd, *step.args[i + 1 :]))
                    program = replace(case.program, steps=[*steps[:s], changed, *steps[s + 1 :]])
                    yield f"{step.fn}, argument {i} = {odd}", program


def test_an_odd_parameter_is_refused_by_the_op_or_the_same_everywhere(stream: Backend, cpu: Backend) -> None:
    wrong, n = [], 0
    for family in sorted(FAMILIES):
        for label, program in _with_odd_parameters(family):
            try:
                program.case("odd").build()
            except Error:
                continue
            found, right = computed(stream, program), computed(cpu, program)
            if found is None or right is None:
                continue
            n += 1
            for x, y in zip(found, right, strict=True):
                if reason := difference(x, y, max(10 * program.nmse, 1e-8)):
                    wrong.append(f"{label}: {reason}")
    assert n > 100
    assert not wrong, "\n".join(wrong)


def _is_opposite(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where one number is above 0 and the other below."""
    with np.errstate(invalid="ignore"):
        return np.sign(x) * np.sign(y) < 0
