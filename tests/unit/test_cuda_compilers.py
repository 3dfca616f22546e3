"""Kernels by other compilers: for older and newer cards, by Clang, as OpenCL C; with the same results."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import RULES, Launch, argument_block, source
from ggmlb.core.enums import DeviceType
from ggmlb.testing.programs import Case
from tests.support.golden import CASES, FAMILIES
from tests.support.ptx import FORWARD, Compiler, Memory, clang
from tests.support.ptx.machine import why_not
from tests.support.ptx.programs import computed

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

CLANG = pytest.mark.skipif(clang.why_not() is not None, reason=str(clang.why_not()))


def claimed(family: str) -> list[Case]:
    cases = [case for case in CASES if case.family == family]
    return [case for case in cases if not any(map(RULES.declines, case.build().graph.nodes))]


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param(Compiler(75), marks=pytest.mark.slow),
        pytest.param(Compiler(80), marks=pytest.mark.slow),
        pytest.param(Compiler(120), marks=pytest.mark.slow),
        pytest.param(Compiler(75, "clang"), marks=[pytest.mark.slow, CLANG]),
        pytest.param(Compiler(90, "clang"), marks=[pytest.mark.slow, CLANG]),
    ],
    ids=lambda compiler: f"{compiler.name} {compiler.capability}",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_programs(family: str, compiler: Compiler) -> None:
    """By CUDA's own kernels where there are: those of test_cuda_races.py are NVRTC's for 9.0."""
    for case in claimed(family):
        computed(case, Memory(compiler), own=True)


class OpenClMemory(Memory):
    """Runs portable kernels as OpenCL C, on a device that computes in the host's memory."""

    def __init__(self, device: Any, kernels: dict[Any, Any]) -> None:
        import pyopencl as cl

        super().__init__()
        self._cl, self._kernels = cl, kernels
        self._context = kernels.setdefault("context", cl.Context([device]))
        self._queue = kernels.setdefault("queue", cl.CommandQueue(self._context))

    def run(self, launch: Launch, order: bool = FORWARD) -> None:
        cl, flags, key = self._cl, self._cl.mem_flags, (launch.kernel, launch.defines, launch.wg)
        if key not in self._kernels:
            program = cl.Program(self._context, source(launch.kernel, "opencl", launch.defines))
            macros = [f"-D{name}={value}" for name, value in (*launch.defines, ("WG", launch.wg))]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PoCL logs even when it has nothing to say
                self._kernels[key] = cl.Kernel(
                    program.build(["-w", "-cl-std=CL1.2", *macros]), launch.kernel.name
                )
        buffers = [
            cl.Buffer(self._context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=self.array(arg))
            for arg in launch.args
            if isinstance(arg, Mem)
        ]
        self._kernels[key].set_args(*buffers, argument_block(launch, "opencl"))
        (x, y, z), wg = launch.groups, launch.wg
        cl.enqueue_nd_range_kernel(self._queue, self._kernels[key], (x * wg, y, z), (wg, 1, 1)).wait()


@pytest.fixture(scope="module")
def opencl() -> tuple[Any, dict[Any, Any]]:
    pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")
    from ggmlb.backends.opencl import backend_reg

    found = [d for d in backend_reg().devices if d.type is DeviceType.CPU or getattr(d, "is_cpu", False)]
    if not found:
        pytest.skip("needs an OpenCL device that computes in the host's memory, such as PoCL")
    return found[0].cl_device, {}  # type: ignore[attr-defined]


DIFFERENT = {
    "fn_cos", "fn_elu", "fn_exp", "fn_expm1", "fn_gelu", "fn_gelu_erf", "fn_gelu_quick", "fn_log", "fn_sin",
    "fn_sigmoid", "fn_silu", "fn_softplus", "fn_tanh", "fn_xielu", "fn2_silu_back", "glu_geglu",
    "glu_geglu_erf", "glu_geglu_quick", "glu_swiglu", "glu_swiglu_oai", "rope", "soft_max", "soft_max_back",
    "flash_attn", "cross_entropy_loss", "cross_entropy_loss_back", "timestep_embedding", "gated_delta_net",
    "ssm_scan", "dsv4_hc_comb", "opt_step_adamw", "opt_step_sgd",
    "sum", "sum_rows", "rms_norm", "rms_norm_back", "layer_norm", "l2_norm", "mul_mat_vec", "mul_mat_id",
    "conv_2d", "out_prod", "pool", "solve_tri", "upscale",
}  # fmt: skip
"""Kernels, or their functions, whose arithmetic is each language's own: first exp and its like, then the
order of a group's sums, at last which multiplications and additions are joined."""


def differing(cases: list[Case], opencl: tuple[Any, dict[Any, Any]]) -> list[str]:
    """Return those of which a result by OpenCL differs from PTX's, where the arithmetic is the same."""
    found = []
    for case in cases:
        one, steps = computed(case, Memory())
        launches = (step for step in steps if isinstance(step, Launch))
        if {dict(launch.defines).get("FN", launch.kernel.name) for launch in launches} & DIFFERENT:
            continue
        other, _ = computed(case, OpenClMemory(*opencl))
        for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True):
            if not np.array_equal(a.get(), b.get()):
                found.append(f"{case.id}: {a.op.name}")
    return found


def test_some_results_are_those_of_opencl(opencl: tuple[Any, dict[Any, Any]]) -> None:
    assert differing([case for family in FAMILIES for case in claimed(family)[::20]], opencl) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_opencl(family: str, opencl: tuple[Any, dict[Any, Any]]) -> None:
    """To the last bit."""
    assert differing(claimed(family), opencl) == []
