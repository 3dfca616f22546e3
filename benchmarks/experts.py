"""A model of 8 experts with all of them in host memory: computed there, or from a cache on the device.

Models of random weights (8 layers of 8 experts, of which a token uses 2) have attention and output on the
first device; the configurations take turns in one run. `speed` is tokens per second of decoding, as a ratio
to that with all experts on the CPU: the median of the rounds, with the least and the greatest. Random weights
use all experts alike; hits are of the last round.

    python benchmarks/experts.py [--rounds 5] [--type q4_0] [--devices OpenCL0,CPU] [--save]
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from random_model import SHAPES, random_model
from report import Table, save

from ggmlb import open_gguf
from ggmlb.models import Placement, TextModel

N_PROMPT, N_TOKENS = 16, 32
SLOTS = (2, 4, 6, 8)


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--type", default="q4_0")
    parser.add_argument("--devices", default="OpenCL0,CPU")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    devices = given.devices.split(",")
    path = random_model(given.type, "8 experts")
    wanted, all_bytes = configurations(path, devices)
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(TextModel(path, devices, n_ctx=256, **arguments))
            for name, arguments in wanted.items()
        }
        speeds: dict[str, list[float]] = {name: [] for name in models}
        hits: dict[str, float] = {}
        load = [os.getloadavg()[0]]
        for _ in range(given.rounds + 1):  # the first one builds kernels and plans
            for name, model in models.items():
                cache = model.experts
                before = (cache.n_hits, cache.n_misses) if cache else (0, 0)
                result = model.generate(
                    range(300, 300 + N_PROMPT), max_tokens=N_TOKENS, temperature=0, ignore_eos=True
                )
                speeds[name].append(result.tokens_per_second)
                if cache:
                    new = cache.n_hits - before[0], cache.n_misses - before[1]
                    hits[name] = new[0] / sum(new)
        load.append(os.getloadavg()[0])
        table = Table("experts", "device memory of experts", "hits", "tokens/s", "speed")
        first = next(iter(models))
        for name, model in models.items():
            on_device = model.experts.nbytes if model.experts else 0 if name == first else all_bytes
            found = [a / b for a, b in zip(speeds[name][1:], speeds[first][1:], strict=True)]
            table.row(
                name,
                f"{on_device / 2**20:.0f} MiB",
                f"{hits[name]:.0%}" if name in hits else "",
                f"{statistics.median(speeds[name][1:]):.1f}",
                f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})",
            )
    if given.save:
        what = f"weights in {given.type}, devices {given.devices}, load {load[0]:.1f} to {load[1]:.1f}"
        save(
            "experts",
            f"{__doc__}\nHere: {what}.",
            table,
            packages=("numpy", "pyopencl", "pocl-binary-distribution"),
        )


def configurations(path: Path, devices: list[str]) -> tuple[dict[str, dict[str, Any]], int]:
    """Arguments of the models by a name, and the bytes of all experts."""
    file = open_gguf(path)
    all_experts = sum(file[name].nbytes for name in file if "_exps" in name)
    each = all_experts // SHAPES["8 experts"].n_expert
    found: dict[str, dict[str, Any]] = {
        "all on the CPU": {"placement": Placement(overrides={"exps": devices[-1]})},
        **{f"cache of {n} of 8": {"placement": Placement(expert_cache=n * each)} for n in SLOTS},
        "all on the device": {},
    }
    return found, all_experts


if __name__ == "__main__":
    main()
