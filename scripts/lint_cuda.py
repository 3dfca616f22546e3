"""Compile every kernel for CUDA, with every set of macros that the golden programs' launches have.

They run as OpenCL C in the tests; this shows that the same texts are CUDA C++, but for what
`ONLY_OPENCL` names.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvrtc import Nvrtc

from ggmlb.kernels import Kernel, Target, declines, kernels, lower, source
from ggmlb.testing.programs import load_cases

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

ONLY_OPENCL: dict[str, str] = {}
"""Kernels that need not compile for CUDA, and why."""

Variant = tuple[Kernel, tuple[tuple[str, str], ...], int]


def variants() -> list[Variant]:
    """Return what a GPU's work split launches, and one variant of each kernel that only a CPU's does."""
    nodes = [
        node
        for case in load_cases(Path(__file__).parents[1] / "tests/golden/programs")
        for node in case.build().graph.nodes
        if declines(node) is None
    ]
    chosen = {
        (launch.kernel, launch.defines, launch.wg): None
        for node in nodes
        for launch in lower(node, Target(False, 2, 128))
    }
    on_gpu = {kernel.name for kernel, *_ in chosen}
    on_cpu = {
        launch.kernel.name: (launch.kernel, launch.defines, launch.wg)
        for node in nodes
        for launch in lower(node, Target(True, 2, 1))
    }
    return [*chosen, *(variant for name, variant in on_cpu.items() if name not in on_gpu)]


def complaint(nvrtc: Nvrtc, variant: Variant, architecture: str) -> tuple[str, str] | None:
    """Return the kernel's name and what the compiler says, or None."""
    kernel, defines, wg = variant
    options = [f"-arch={architecture}", "-diag-suppress=177", f"-DWG={wg}"]
    log = nvrtc.compile(source(kernel, "cuda"), [*options, *(f"-D{n}={v}" for n, v in defines)])
    return (kernel.name, f"{kernel.name} {dict(defines)} for {architecture}:\n{log}") if log else None


def main() -> int:
    """Compile all, and tell of those that fail."""
    nvrtc, found = Nvrtc(), variants()
    unreached = sorted(set(kernels()) - {kernel.name for kernel, *_ in found})
    known = [a for a in ARCHITECTURES if a in nvrtc.architectures()]
    with ThreadPoolExecutor() as pool:
        jobs = [(nvrtc, variant, architecture) for architecture in known for variant in found]
        bad = [failure for failure in pool.map(lambda job: complaint(*job), jobs) if failure]
    failed = {name for name, _ in bad}
    print(*(log for name, log in bad if name not in ONLY_OPENCL), sep="\n", end="")
    for name in unreached:
        print(f"{name}: no golden program launches it")
    for name in sorted(set(ONLY_OPENCL) - failed):
        print(f"{name}: compiles for CUDA after all; take it out of ONLY_OPENCL")
    if failed == set(ONLY_OPENCL) and not unreached:
        print(f"{len(kernels())} kernels in {len(found)} variants compile for {', '.join(known)}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
