"""The memory of text models: the peak of a process beside the forecast, in twelve configurations.

Each configuration is two processes. The first opens the file and the devices, and plans: it gives the
forecast, that of buffers and of what is beside them. The second loads and computes: a prompt, and 16
sequences together; so that all that was placed is used, it also reads the embeddings that are used in the
mapped file. `peak` is its greatest resident memory (VmHWM; devices of PoCL compute in the machine's memory,
so that they count). It runs twice, because the first time kernels may be compiled, by libraries that are
large; the second counts.

    python benchmarks/fit.py [--smoke]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple

from generate import file_of, peak_nbytes, prompt_of
from report import Table, save

from ggmlb.models import Placement, TextModel

N_CTX = 1024
N_PROMPT = 600
N_SEQUENCES = 16


class Case(NamedTuple):
    """A configuration: a model, and arguments of `TextModel`."""

    name: str
    model: str
    options: dict[str, Any]


CARD, CPU, LLVM = ["OpenCL0", "CPU"], ["CPU"], ["LLVM", "CPU"]
CASES = (
    Case("CPU", "random:q4_0", {"placement": Placement(CPU)}),
    Case("LLVM", "random:q4_0", {"placement": Placement(LLVM)}),
    Case("OpenCL", "random:q4_0", {"placement": Placement(CARD)}),
    Case("11 layers on OpenCL", "random:q4_0", {"placement": Placement(CARD, 11)}),
    Case("OpenCL in 400 MiB", "random:q4_0", {"placement": Placement(CARD, limits={"OpenCL0": 400 << 20})}),
    Case(
        "OpenCL beside LLVM", "random:q4_0", {"placement": Placement(["OpenCL0", *LLVM], {"OpenCL0": "0-7"})}
    ),
    Case("keys on the CPU", "random:q4_0", {"placement": Placement(CARD, overrides={"cache_": "CPU"})}),
    Case("kv q8_0", "random:q4_0", {"placement": Placement(LLVM), "kv_type": "q8_0"}),
    Case(
        "kv f32, 2048 tokens", "random:q4_0", {"placement": Placement(LLVM), "kv_type": "f32", "n_ctx": 2048}
    ),
    Case("LLVM, q8_0", "random:q8_0", {"placement": Placement(LLVM)}),
    Case("OpenCL, q4_K_M", "random:q4_K_M", {"placement": Placement(CARD)}),
    Case("LLVM, f16", "random:f16", {"placement": Placement(LLVM)}),
)


def planned(case: Case) -> dict[str, Any]:
    """Open and plan; return the forecast of buffers, and of the process."""
    from ggmlb.models.text.planner import open_planner
    from ggmlb.models.text.process_memory import process_memory
    from ggmlb.system.process import n_cpus, resident_nbytes

    options = (case.options.get("n_ctx", N_CTX), case.options.get("kv_type", "f16"))
    with ExitStack() as resources:
        planner = open_planner(resources, file_of(case.model), case.options["placement"], *options)
        fit = planner.best()
        process = (resident_nbytes() or 0) + sum(process_memory(planner, fit, n_cpus()))
        return {"buffers": fit.table.total(), "process": process}


def loaded(case: Case) -> dict[str, Any]:
    """Load and compute; return the peak, and what is allocated."""
    with TextModel(file_of(case.model), **{"n_ctx": N_CTX, **case.options}) as model:
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        model.generate(prompt_of(N_PROMPT), max_tokens=8, **options)
        model.generate_many([prompt_of(8)] * N_SEQUENCES, max_tokens=2, **options)
        n_vocab, n_embd = model.config.n_vocab, model.config.n_embd
        model.file.weight("token_embd.weight", (n_vocab, n_embd)).rows().max()
        peak = peak_nbytes()
        return {"allocated": model.memory.allocated.total(), "peak": peak}


def measured(case: Case, part: str) -> dict[str, Any]:
    """Run a part of a configuration in a process of its own."""
    call = [sys.executable, __file__, "--part", part, "--case", case.name]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure all configurations, or a part of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("planned", "loaded"))
    parser.add_argument("--case")
    parser.add_argument("--smoke", action="store_true", help="one configuration; nothing is written")
    asked = parser.parse_args()
    if asked.part:
        (case,) = (case for case in CASES if case.name == asked.case)
        print(json.dumps(planned(case) if asked.part == "planned" else loaded(case)))
        return
    table = Table(
        "configuration", "buffers [MiB]", "allocated", "process [MiB]", "peak [MiB]", "peak / forecast"
    )
    for case in CASES[1:2] if asked.smoke else CASES:
        file_of(case.model)  # which writes it
        told, _, full = (measured(case, part) for part in ("planned", "loaded", "loaded"))
        buffers, process, peak = told["buffers"], told["process"], full["peak"]
        is_equal = "equal" if buffers == full["allocated"] else f"{full['allocated']:,} bytes"
        table.row(
            case.name,
            f"{buffers / 2**20:.1f}",
            is_equal,
            f"{process / 2**20:.1f}",
            f"{peak / 2**20:.1f}",
            f"{peak / (buffers + process):.3f}",
        )
    if not asked.smoke:
        save("fit", ABOUT, table, packages=("numpy", "pyopencl", "llvmlite"))


ABOUT = f"""
Memory of text models: forecast and peak
A model of 1.1 billion random weights, {N_CTX} tokens of context where nothing else is said. The forecast is
what `ggmlb fit` prints, from metadata alone: the bytes of `buffers`, and of the `process` beside them, which
is what a process takes that has opened the devices and the file and planned, and an estimate of vocabulary,
logits, graphs and scratch memory. `allocated` is the sum of the buffers of the loaded model. `peak` is the
greatest resident memory (VmHWM) of a process that loads the model, computes a prompt of {N_PROMPT} tokens and
{N_SEQUENCES} sequences together, and reads the mapped embeddings, with kernels that were compiled before.

The estimate's sizes were measured with this model. Of others, SmolLM2 in q8_0 had 1.02 times the forecast
on LLVM and 1.00 on OpenCL, and Gemma 3 0.98 and 0.92: it reserves the logits of 64 tokens of 262,144 words,
of which the run touched a part.

Made by `python benchmarks/fit.py`.
"""

if __name__ == "__main__":
    main()
