"""Compile every kernel for CUDA, with every set of macros that launches have.

The launches are those of the golden programs, of random graphs with nodes that are fused, and of ops'
samples. They are compiled for the oldest and the newest architecture, with `--all` for those between, whose
texts are the same as the newest's; CUDA's own kernels for the shapes that matter, for some between too. The
tests' machine must know all instructions of their PTX; what CUDA's own take of a card is compared with
docs/cuda-resources.md.
`--write` writes it for all, as ptxas of its own wheel tells it: pip install nvidia-cuda-nvcc, as NVRTC is.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_resources import TABLE, Resources, Variant, complaints, hot, page
from nvrtc import Nvrtc, assembled

import ggmlb.backends.gpu
from ggmlb import DType
from ggmlb.backends.common.fusion import Group, fuse, gather
from ggmlb.backends.cuda.driver import OPTIONS, text
from ggmlb.backends.cuda.kernels import PACKAGE
from ggmlb.backends.gpu import RULES, Launch, Target, lower
from ggmlb.backends.gpu.source import kernels
from ggmlb.testing.claims import SAMPLES, sample
from ggmlb.testing.programs import load_cases
from tests.support.fusable import RandomGraph
from tests.support.ptx import OF_CUPY, PtxError
from tests.support.ptx.program import Program

TESTS = Path(__file__).parents[1] / "tests"

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SOME = ("sm_75", "sm_80", "sm_90", "sm_120")

ONLY_OPENCL: dict[str, str] = {}
"""Kernels that need not compile for CUDA, and why."""

PACKED = re.findall(
    r"TRAITS\((\w+)_x8,", (Path(ggmlb.backends.gpu.__file__).parent / "kernels/rows.h").read_text()
)
"""Types that some memories keep in another order."""


def variants() -> list[Variant]:
    """Return what a GPU's work split launches, and one variant of each kernel that only a CPU's does."""
    graphs = [case.build().graph for case in load_cases(TESTS / "golden/programs")]
    graphs += [RandomGraph(seed, in_place=False).graph for seed in range(20)]
    # Golden programs are of ggml 0.21, samples of today's.
    samples = [node for name in SAMPLES if (node := sample(name, DType.F32)) is not None]

    def launched(target: Target) -> list[Variant]:
        """The variants of all nodes one by one, and of the groups that are fused."""
        steps: list[Launch] = []
        for graph in graphs:
            for node in graph.nodes:
                steps += lower(node, target) if RULES.declines(node) is None else []
            gather(graph, lambda group: _can_fuse(group, target))
            for item in fuse(graph, lambda group: _can_fuse(group, target)):
                steps += lower(item, target) if isinstance(item, Group) else []
        reached = {step.kernel for step in steps}
        for node in samples:
            made = lower(node, target) if RULES.declines(node) is None else []
            steps += (step for step in made if step.kernel not in reached)
        return list(dict.fromkeys((step.kernel, step.defines, step.wg) for step in steps))

    chosen = launched(Target(False, 2, 128))
    on_gpu = {kernel.name for kernel, *_ in chosen}
    on_cpu = {variant[0].name: variant for variant in launched(Target(True, 2, 1))}
    rest = [variant for name, variant in on_cpu.items() if name not in on_gpu]
    return [*chosen, *rest, *(packed for variant in chosen if (packed := _packed(variant)))]


def _can_fuse(group: Group, target: Target) -> bool:
    return not any(map(RULES.declines, group.nodes)) and RULES.find(group, target) is not None


def _packed(variant: Variant) -> Variant | None:
    """Return the variant that reads the same weights from memory that packs them, if there is one."""
    kernel, defines, wg = variant
    macros = dict(defines)
    weight = macros.get("a_T", "")
    if weight not in PACKED or not (kernel.name.startswith("mul_mat") or "dequantize" in macros.values()):
        return None
    return kernel, tuple(sorted({**macros, "a_T": f"{weight}_x8"}.items())), wg


def compiled(
    nvrtc: Nvrtc, variant: Variant, architecture: str, by_ptxas: bool = False
) -> tuple[str, str, Resources]:
    """Return the kernel's name, what is wrong with it, and what the code takes of a card."""
    kernel, defines, wg = variant
    last = [architecture.replace("sm", "compute")] if by_ptxas else [architecture, "--ptxas-options=-v"]
    options = [*OPTIONS, *OF_CUPY, "-arch", *last]
    ptx, log = nvrtc.compile(text(kernel, defines, wg), options)
    why = log if ptx is None else ""
    if ptx is not None:
        try:
            Program(ptx)
        except PtxError as error:
            why = str(error)
        log = assembled(ptx, architecture) if by_ptxas else log
    where = f"{kernel.name} {dict(defines)} for {architecture}"
    return kernel.name, f"{where}:\n{why}" if why else "", Resources.read(log, defines)


def main(write: bool = False, whole: bool = False) -> int:
    """Compile all; tell of kernels that fail, and where they take more, or less, than the table says."""
    nvrtc, found = Nvrtc(), variants()
    unreached = sorted(set(kernels()) - {kernel.name for kernel, *_ in found})
    unreached += sorted(set(kernels(PACKAGE)) - {kernel.name for kernel, *_ in hot().values()})
    known = [a for a in (ARCHITECTURES if whole or write else SOME) if a in nvrtc.architectures()]
    for_portable = known if whole or write else known[:1] + known[-1:]
    jobs = [
        (name, variant, architecture)
        for architecture in known
        for name, variant in [*((None, variant) for variant in found), *hot(architecture).items()]
        if name is not None or architecture in for_portable
    ]
    taken: tuple[dict[str, dict[str, Resources]], ...] = ({}, {})
    failed: set[str] = set()
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda job: compiled(nvrtc, *job[1:], by_ptxas=write), jobs)
        for (name, _, architecture), (kernel, why, resources) in zip(jobs, results, strict=True):
            if why:
                failed.add(kernel)
                if kernel not in ONLY_OPENCL:
                    print(why)
            rows = taken[name is None].setdefault(name or kernel, {})
            rows[architecture] = resources.most(rows.get(architecture, Resources()))
    for kernel in unreached:
        print(f"{kernel}: no golden program launches it")
    for kernel in sorted(set(ONLY_OPENCL) - failed):
        print(f"{kernel}: compiles for CUDA after all; take it out of ONLY_OPENCL")
    if failed != set(ONLY_OPENCL) or unreached:
        return 1
    if write:
        TABLE.write_text(page(nvrtc.version, known, *taken), encoding="utf-8")
    bad = complaints(nvrtc.version, *taken)
    print(*bad, sep="\n", end="\n" if bad else "")
    if not bad:
        n = len(kernels()) + len(kernels(PACKAGE))
        print(f"{n} kernels in {len(jobs)} variants compile for {', '.join(for_portable)}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:], "--all" in sys.argv[1:]))
