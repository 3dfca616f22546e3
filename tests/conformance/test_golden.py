"""The golden programs on each device: every case that it does not decline must be what ggml computed.

All of them run in a device's own way, on OpenCL in that of GPUs. In other ways, which share its kernels, a
sample runs: the cases that reach a kernel, or a type of its first operand, for the first time. The CPU has
more: `test_cpu_golden.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

from ggmlb import Graph
from tests.support.golden import FAMILIES, claimed, first_of_their_kind, too_few, wrong
from tests.support.gpus import first

Kinds = Callable[[Any, Graph], set[Hashable]]

# How many cases of each family a device computes, at least.
SHARED = {"flash_attn": 12, "glu": 37, "mul_mat_id": 19, "rope": 39, "unary": 126}
GPUS = SHARED | {
    "binary": 77, "conv": 46, "get_rows": 35, "loss_opt": 8, "misc": 13, "mul_mat": 110, "norm": 32,
    "out_prod": 7, "pool": 24, "programs": 19, "reduce": 26, "set_rows_cpy": 106, "shape": 37, "softmax": 21,
    "ssm": 21, "upscale": 20,
}  # fmt: skip
LLVM = SHARED | {
    "binary": 54, "get_rows": 21, "misc": 6, "mul_mat": 74, "norm": 25, "programs": 6, "set_rows_cpy": 95,
    "softmax": 13,
}  # fmt: skip
GGML = GPUS | {"misc": 12, "reduce": 26, "set_rows_cpy": 130, "ssm": 20}
CLAIMED = {"OpenCL0": GPUS, "LLVM": LLVM, "ggml:CPU": GGML, "played": GPUS, "CUDA0": GPUS}


# -- what cases reach ------------------------------------------------------------------------------


def portable(stream: Any, graph: Graph) -> set[Hashable]:
    """The portable kernels."""
    from ggmlb.backends.gpu import lower

    launches = [launch for node in graph.nodes for launch in lower(node, stream.target)]
    return {(launch.kernel.name, dict(launch.defines).get("a_T")) for launch in launches}


def cuda(stream: Any, graph: Graph) -> set[Hashable]:
    """CUDA's own kernels, the portable ones, and products by cuBLAS."""
    from ggmlb.backends.cuda.kernels import RULES
    from ggmlb.backends.gpu import Launch, PreparedOperand, lower

    found = [r for node in graph.nodes for r in lower(node, stream.device.target, RULES)]
    return {
        (r.kernel.name, dict(r.defines).get("a_T")) if isinstance(r, Launch) else "gemm"
        for each in found
        for r in (each.made_by if isinstance(each, PreparedOperand) else [each])
    }


def ops(_: Any, graph: Graph) -> set[Hashable]:
    """Ops, with the types of what they read."""
    return {(node.op, *(s.dtype for s in node.src if s is not None)) for node in graph.nodes}


# -- ways ------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A way to compute: a device (`gpus.first`), its stream's parameters; of a sample, what its cases reach.

    `n_runs`: CUDA computes by steps, captures, and replays.
    """

    kind: str
    params: dict[str, Any]
    kinds: Kinds | None = None
    n_runs: int = 1


def _levels() -> list[str]:
    if find_spec("llvmlite") is None:
        return []
    from ggmlb.backends.llvm.codegen.host import levels_here

    return [level.name for level in levels_here()]


PLAYED = Way("played", {}, cuda, 3)
WAYS = [
    pytest.param(Way("OpenCL0", {"work_split": "gpu"}), id="opencl, as on GPUs"),
    pytest.param(Way("OpenCL0", {"work_split": "cpu"}, portable), id="opencl, as on CPUs"),
    pytest.param(Way("LLVM", {"n_threads": 3}), id="llvm"),
    *(
        pytest.param(Way("LLVM", {"n_threads": 3, "simd": level}, ops), id=f"llvm, {level}")
        for level in _levels()[1:]
    ),
    pytest.param(Way("ggml:CPU", {"n_threads": 1}, ops), id="ggml"),
    pytest.param(Way("ggml:CPU", {}), id="ggml, all", marks=pytest.mark.slow),
    pytest.param(PLAYED, id="played"),
    pytest.param(PLAYED._replace(kinds=None, n_runs=1), id="played, all", marks=pytest.mark.slow),
    pytest.param(Way("CUDA0", {}, None, 3), id="card", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def devices() -> dict[str, Any]:
    """The devices that were asked for so far."""
    return {}


def device_of(kind: str, devices: dict[str, Any]) -> Any:
    if kind not in devices:
        devices[kind] = first(kind)
    return devices[kind]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.gpu] if k == "CUDA0" else []) for k in CLAIMED]
)
def test_what_is_claimed(kind: str, devices: dict[str, Any]) -> None:
    assert too_few(device_of(kind, devices), CLAIMED[kind]) == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, way: Way, devices: dict[str, Any]) -> None:
    device, params = device_of(way.kind, devices), way.params
    cases, kinds = claimed(device, family), way.kinds
    with device.init_backend(params) as stream:
        if kinds is not None:
            cases = first_of_their_kind(cases, lambda graph: kinds(stream, graph))
        assert not (why := wrong(cases, stream, way.n_runs)), why
