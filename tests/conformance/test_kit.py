"""Our own devices pass the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from ggmlb.backends.cuda import CudaReg
from ggmlb.core.errors import BackendUnavailable, RegistryError
from ggmlb.interface.registry import device_by_name
from ggmlb.testing.devices import device_named
from tests.support.gpus import CUDA, first, host_driver
from tests.support.kit import faults

SAMPLE = 2
"""Cases of an op that are tested by default on devices that compile kernels; `make test-all` takes all."""

pytestmark = pytest.mark.timeout(1800)  # hundreds of kernels are compiled, where no cache has them

SAMPLED = ("LLVM", "OpenCL0", "ggml:CPU", "Meta(CPU,CPU)", "Meta(CPU,OpenCL0,CPU)")
RUNS = [
    *(("CPU", mode, 0) for mode in ("behaviour", "test", "support", "grad")),
    *((name, "behaviour", 0) for name in SAMPLED),
    *((name, mode, SAMPLE) for name in SAMPLED for mode in ("test", "support", "grad")),
    *(
        pytest.param(name, mode, 0, marks=pytest.mark.slow)
        for name in SAMPLED
        for mode in ("test", "support", "grad")
    ),
]


@pytest.mark.parametrize(("name", "mode", "limit"), RUNS)
def test_it_passes(name: str, mode: str, limit: int) -> None:
    try:
        device = device_named(name)
    except (RegistryError, BackendUnavailable) as error:
        pytest.skip(str(error))
    # Of many cases, no operand is float32.
    assert faults(device, mode, limit, **({"least": 0.1} if mode == "grad" else {})) == []


WEIGHTS = (
    ("behaviour", {"ops": ("weights",)}),
    ("test", {"pattern": " in "}),
    ("support", {"pattern": " in "}),
)


@pytest.mark.parametrize(("mode", "chosen"), WEIGHTS, ids=[mode for mode, _ in WEIGHTS])
def test_packed_weights_of_opencl_pass(
    mode: str, chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of CPU type too, which has the memory and does not offer it."""
    device = device_by_name("OpenCL0")
    monkeypatch.setattr(type(device), "extra_bufts", property(lambda d: (d.packed_buffer_type,)))
    assert faults(device, mode, 0, **chosen) == []


@pytest.mark.parametrize(("mode", "chosen"), WEIGHTS, ids=[mode for mode, _ in WEIGHTS])
def test_weights_split_over_cards_pass(mode: str, chosen: dict[str, Any]) -> None:
    device = CudaReg(host_driver(n_devices=2)).devices[1]
    if mode == "behaviour":
        assert faults(device, mode, 0, **chosen) == []
    else:  # few of the weights that are drawn are plain matrices
        assert faults(device, mode, 40, least=0.02, ops=("mul_mat",), **chosen) == []


@pytest.mark.parametrize("kind", CUDA)
def test_cuda_behaves(kind: str) -> None:
    assert faults(first(kind), "behaviour", 0) == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["test", "support"])
def test_cuda_passes(mode: str) -> None:
    assert faults(device_by_name("CUDA0"), mode, 0) == []
