"""The golden programs on the Numba device, with every instruction set that this processor runs."""

from __future__ import annotations

import pytest
from golden import claimed, too_few, wrong

pytest.importorskip("llvmlite")

from ggmlb.backends.numba import backend_reg
from ggmlb.backends.numba.llvm.host import levels_here

DEVICE = backend_reg().devices[0]
LEVELS = [level.name for level in levels_here()]

CLAIMED = {
    "binary": 54, "flash_attn": 12, "get_rows": 21, "glu": 37, "misc": 6, "mul_mat": 74, "mul_mat_id": 19,
    "norm": 25, "programs": 6, "rope": 39, "set_rows_cpy": 95, "softmax": 13, "unary": 126,
}  # fmt: skip
"""How many cases of each family the kernels compute, at least."""


def test_what_is_claimed() -> None:
    assert too_few(DEVICE, CLAIMED) == {}


@pytest.mark.parametrize("simd", LEVELS)
@pytest.mark.parametrize("family", sorted(CLAIMED))
def test_family(family: str, simd: str) -> None:
    cases = claimed(DEVICE, family)
    if simd != LEVELS[0]:
        cases = cases[::8]
    with DEVICE.init_backend({"simd": simd, "n_threads": 3}) as stream:
        assert not (why := wrong(cases, stream)), why
