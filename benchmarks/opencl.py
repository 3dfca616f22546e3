"""OpenCL on two runtimes, with both work splits, beside the LLVM device and ggml, in one run.

PoCL is PyPI's, Intel's runtime for CPUs is installed in build/opencl (`make test-opencl RUNTIME=intel`), ggml
is that of the device `ggml:CPU`. `cpu` gives each core its own rows, `gpu` shares a row among the work-items
of a group, as on cards: on a CPU it is there to be tested, not to be fast. Each library computes in a process
of its own; they take turns and never run at the same time. The times are medians over the rounds, of each
turn's best call: a whole `graph_compute`, queueing the plan and waiting for it.

    python benchmarks/opencl.py [--rounds 5] [--threads 2] [--ops mul_mat]
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from decode import Sizes, decode
from libraries import Case, Ggmlb, recorded
from report import Table, save
from turns import Players, arguments

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.testing.ops.record import Perf

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.opencl_runtimes import environment

SENTENCES = [f"Sentence {i} tells of kernels, queues and {'many ' * (i % 7)}work-items." for i in range(16)]


class Player(Ggmlb):
    """A device of ours."""

    device = "OpenCL0"

    def __init__(self, case: Case, threads: int) -> None:
        import ggmlb

        self._embedder: Any = None
        if case.op == "MiniLM":
            from ggmlb.models import BertEmbedder

            device = ggmlb.device_by_name(self.device)
            opened = partial(device.init_backend, self.params)
            device.init_backend = lambda params=None: opened()  # type: ignore[method-assign]
            self._embedder = BertEmbedder(devices=[self.device])
        else:
            memory = ggmlb.device_by_name(self.device).buffer_type.name
            super().__init__(replace(case, device=self.device, storage=memory), threads)

    def run(self) -> None:
        if self._embedder is None:
            super().run()
        else:
            self._vectors = self._embedder.embed(SENTENCES)

    def values(self) -> Any:
        return super().values() if self._embedder is None else np.ravel(self._vectors)

    def close(self) -> None:
        if self._embedder is None:
            super().close()
        else:
            self._embedder.close()


class ByCores(Player):
    """OpenCL with the work split of CPUs."""

    params = {"work_split": "cpu"}  # noqa: RUF012


class ByGroups(Player):
    """OpenCL with the work split of GPUs."""

    params = {"work_split": "gpu"}  # noqa: RUF012


class Llvm(Player):
    device = "LLVM"


class GgmlCpu(Player):
    device = "ggml:CPU"


LIBRARIES = {
    "PoCL, cpu": ByCores, "PoCL, gpu": ByGroups, "Intel, cpu": ByCores, "Intel, gpu": ByGroups,
    "LLVM": Llvm, "ggml": GgmlCpu,
}  # fmt: skip
OPENCL = tuple(name for name in LIBRARIES if "," in name)


def environments() -> dict[str, dict[str, str]]:
    """Return for each OpenCL runtime that it is alone, with a cache of its own."""
    return {name: environment(name.partition(",")[0].lower()) for name in OPENCL}


CHOSEN = (
    "mul_mat(f32,f32;n=1)", "mul_mat(q8_0,f32;n=1)", "mul_mat(q4_0,f32;n=1)", "mul_mat(f32,f32;n=512)",
    "mul_mat_id(f16,f32;n=64)", "flash_attn_ext(f32,f16;n=512,kv=1024)", "rms_norm(f32)", "soft_max_ext(f32)",
)  # fmt: skip
SIZES = Sizes(n_layers=4, n_embd=1024, n_ff=2816, n_heads=16, n_heads_kv=4, head=64, n_kv=256)


def sized(perf: Perf) -> Case:
    """Return the case of a record's size, with the operands' extents in its text."""
    case = Case.of(perf)
    operands = case.build(Context()).sources[:2]
    return replace(case, what=", ".join(f"{t.dtype.name.lower()} {t.ne}" for t in operands))


CASES = [
    *(sized(perf) for perf in recorded() if perf.id in CHOSEN),
    Case("decode step", "4 layers of 1024, q4_0, 256 cached", partial(decode, SIZES, DType.Q4_0), nmse=1e-2),
    Case("MiniLM", "16 sentences", lambda c: None, nmse=1e-4),
]


def main() -> None:
    args = arguments(__doc__, rounds=5).parse_args()
    table = Table("op", "what", *(f"{name} [ms]" for name in LIBRARIES), "ggml / best OpenCL", "NMSE")
    with Players(__file__, args.threads) as players:
        for case, rounds, nmse in players.measured(args):
            times = {name: statistics.median(rounds[name]) for name in LIBRARIES}
            best = min(times[name] for name in OPENCL)
            shown = (f"{1e3 * s:.3g}" for s in times.values())
            table.row(case.op, case.what, *shown, f"{times['ggml'] / best:.2f}", f"{nmse:.0e}")
    if args.ops:
        return
    about = f"""OpenCL on two runtimes, beside LLVM and ggml
Made by `python benchmarks/opencl.py`: {args.rounds} rounds, {args.threads} threads each. Weights lie in each
device's plain memory. The machine's load (of one minute, all libraries included) was {players.loads}. The
last ratio is ggml's time by the better OpenCL's: above 1, OpenCL is faster.

{__doc__.partition("    python")[0]}"""
    save("opencl", about, table, packages=("numpy", "pyopencl", "pocl-binary-distribution", "xllamacpp"))


if __name__ == "__main__":
    main()
