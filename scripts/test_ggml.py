"""Run ggml's own `test-backend-ops` over ggmlb's devices, and count what passes.

    python scripts/test_ggml.py [-d CPU,LLVM] [-k REGEX] [-j N] [--every N] [--skip N] [--seed N]

Each case is computed by a device of ggmlb's and by ggml's reference, and compared by ggml. All devices that
are there are run, unless `-d` names some. It exits with 0 if nothing failed but what `ggml_faults.json`
explains as ggml's own fault, with 1 if a case failed, a fault has gone, or nothing ran, with 2 if a device
is missing or the test is not built.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import ggmlb
from tests.support.ggml_bridge import suite
from tests.support.outcomes import FAILED, OK, Progress

REPORTS = Path(__file__).parents[1] / "build/ggml/reports"


def main() -> int:
    """Run what the options choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-d", "--devices", help="names, with commas between them")
    parser.add_argument(
        "-k", "--cases", default="", help="only cases with this regular expression in their names"
    )
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)"
    )
    parser.add_argument("--every", type=int, default=1, help="of so many cases, one")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the first cases")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the data; faults of ggml's are told for 0 only"
    )
    options = parser.parse_args()
    if not (suite.FOLDER / "libtest-backend-ops.so").exists():
        print(f"{suite.FOLDER} holds no test: run scripts/build_ggml_tests.py, as `make test-ggml` does")
        return 2
    devices = options.devices.split(",") if options.devices else [device.name for device in ggmlb.devices()]
    try:
        for name in devices:
            ggmlb.device_by_name(name)
    except ggmlb.Error as error:
        print(error)
        return 2
    every_case = suite.Worker("CPU").names()
    cases = [case for case in every_case if re.search(options.cases, case)][options.skip :: options.every]
    faults = suite.load_faults()
    wrong = suite.unmatched(every_case, faults)
    lines = []
    for device in devices:
        progress = Progress(device, len(cases), REPORTS / f"{device}.jsonl")
        outcomes = suite.run(device, cases, options.jobs, progress, options.seed)
        unexplained, gone = suite.judge(outcomes, faults)
        n_known = progress.counts[FAILED] - len(unexplained)
        lines.append(f"{progress}; {n_known} of the failures are faults of ggml's")
        wrong += [f"{device}: {o.case} failed: {o.detail[-300:]}" for o in unexplained]
        wrong += [f"{device}: {complaint}" for complaint in gone if options.seed == 0]
        if not progress.counts[OK]:
            wrong.append(f"{device}: no case ran")
    print("\n".join(["", *wrong, *lines]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
