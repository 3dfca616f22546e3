"""Split modes of a text model over several devices: the predicted time of a token beside the measured one.

Every split mode that `ggmlb fit` plans is loaded, and all of them decode by turns, so that the load of the
machine meets them alike.

    python benchmarks/split_modes.py [MODEL] [--devices OpenCL0,OpenCL1,CPU] [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from time import perf_counter

from generate import prompt_of
from report import Table, save

N_CTX = 128
N_TOKENS = 32


def main() -> None:
    """Measure all split modes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--devices", default="OpenCL0,OpenCL1,CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("POCL_DEVICES", "pthread pthread")  # two devices, before any is asked for

    from ggmlb.models import Placement, TextModel, default_text_model
    from ggmlb.models.text.planner import open_planner
    from ggmlb.models.text.strategies import STRATEGIES, StrategyPlanner

    path, devices = asked.model or default_text_model(), asked.devices.split(",")
    with ExitStack() as resources:
        strategies = StrategyPlanner(resources, open_planner(resources, path, Placement(devices), N_CTX))
        planned = [each for each in strategies.planned() if each.fit is not None]
    took: dict[str, list[float]] = {mode.name: [] for mode in planned}
    with ExitStack() as resources:
        models = {
            name: resources.enter_context(TextModel(path, placement=Placement(devices, name), n_ctx=N_CTX))
            for name in took
        }
        for i in range(asked.rounds + 1):
            for name, model in models.items():
                times: list[float] = []
                model.generate(
                    prompt_of(8),
                    on_token=lambda _: times.append(perf_counter()),  # noqa: B023 - called at once
                    max_tokens=N_TOKENS,
                    temperature=0,
                    ignore_eos=True,
                )
                if i:  # the first round plans graphs
                    took[name] += [after - before for before, after in pairwise(times)]
    table = Table("split mode", "", "predicted [ms]", "least [ms]", "median [ms]", "median / predicted")
    for mode in planned:
        found = median(took[mode.name])
        cells = (f"{1e3 * t:.1f}" for t in (mode.time, min(took[mode.name]), found))
        table.row(mode.name, STRATEGIES[mode.name], *cells, f"{found / mode.time:.2f}")
    if asked.save:
        conditions = (
            f"Here: {os.path.basename(path)}, devices {asked.devices}, load {os.getloadavg()[0]:.1f}."
        )
        save("split_modes", f"{ABOUT}\n{conditions}\n", table, packages=("numpy", "pyopencl"))


ABOUT = """
Split modes of a text model over several devices: prediction and measurement
`predicted` is the time of a token that `ggmlb fit` shows, from bandwidths, transfers and launches that it
measures on the spot. `least` and `median` are times of generated tokens, the split modes taking turns, on a
machine that other work loaded as it did when the bandwidths were measured. PoCL's two devices and the CPU are
one processor: devices that work at the same time slow each other down, which the prediction does not know.

    python benchmarks/split_modes.py [MODEL] [--devices OpenCL0,OpenCL1,CPU] [--rounds 3] [--save]
"""

if __name__ == "__main__":
    main()
