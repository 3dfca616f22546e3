"""Random programs give what the installed ggml (ggml-python) gives: `make test-oracle`."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import event, given, note, reject, settings
from hypothesis import strategies as st

if importlib.util.find_spec("ggml") is None:
    pytest.skip("ggml-python is not installed: pip install 'ggmlb[oracle]'", allow_module_level=True)

from ggmlb.core.enums import Status
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.cases import FAMILIES, NOT_OF_GGML
from tests.support.oracle import Missing, Refused, programs

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

POISON = 0xFF  # NaN in every float type, so that an element that is not written shows


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_OF_GGML))
@settings(max_examples=200)
@given(data=st.data())
def test_it_computes_what_ggml_computes(name, data, ggml, cpu):
    program = data.draw(programs(name))
    note(repr(program))
    try:
        expected = ggml.compute(*program.request())
    except Refused as refusal:
        event(f"ggml refuses: {refusal}")
        reject()
    except Missing as missing:
        pytest.skip(f"this ggml has no ggml_{missing}")
    built = program.case(name, expected).build()
    with alloc_ctx_tensors(built.ctx, cpu) as buffer:
        buffer.clear(POISON)
        built.upload()
        assert cpu.graph_compute(built.graph) is Status.SUCCESS
        wrong = {n: v.reason for n, v in built.compare().items() if not v.ok}
    assert not wrong
