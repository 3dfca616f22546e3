"""The golden programs on OpenCL: every case that the device does not decline must be what ggml computed.

All of them run with the device's own work split. With the other one, which the same kernels serve, those run
that reach a kernel, or a type of its first operand, for the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from golden import FAMILIES, claimed, first_of_their_kind, too_few, wrong
from gpus import OPENCL, device_fixture

from ggmlb.kernels import lower

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ggmlb import Graph
    from ggmlb.backends.opencl.device import OpenClDevice

device = device_fixture(OPENCL)

CLAIMED = {
    "binary": 77, "conv": 42, "flash_attn": 12, "get_rows": 26, "glu": 37, "misc": 12, "mul_mat": 89,
    "mul_mat_id": 19, "norm": 30, "pool": 12, "programs": 18, "reduce": 26, "rope": 39, "set_rows_cpy": 105,
    "shape": 37, "softmax": 19, "ssm": 12, "unary": 126, "upscale": 20,
}  # fmt: skip
"""How many cases of each family the kernels compute, at least."""


def test_what_is_claimed(device: OpenClDevice) -> None:
    assert too_few(device, CLAIMED) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, device: OpenClDevice) -> None:
    with device.init_backend() as stream:
        assert not (why := wrong(claimed(device, family), stream)), why


@pytest.mark.parametrize("family", sorted(CLAIMED))
def test_family_with_the_other_work_split(family: str, device: OpenClDevice) -> None:
    with device.init_backend({"work_split": "gpu" if device.is_cpu else "cpu"}) as stream:
        target = stream.target

        def kernels(graph: Graph) -> set[Hashable]:
            launches = [launch for node in graph.nodes for launch in lower(node, target)]
            return {(launch.kernel.name, dict(launch.defines).get("a_T")) for launch in launches}

        cases = first_of_their_kind(claimed(device, family), kernels)
        assert cases
        assert not (why := wrong(cases, stream)), why
