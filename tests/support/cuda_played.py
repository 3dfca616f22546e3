"""Text models through the CUDA backend, whose driver and kernels run on the processor.

They run as a process of their own, because the driver stays: `python -m tests.support.cuda_played FILE OUT`
with sequences and options as JSON on standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.llama_cpp import ROOT, Floats, our_log_probs


def played_log_probs(path: Path, sequences: Sequence[Sequence[int]], **options: Any) -> Floats:
    """As `our_log_probs`, on cards `CUDA0` and `CUDA1` that are played.

    Raises:
        CalledProcessError: The process failed.
    """
    layers = {name: [int(i) for i in found] for name, found in options.pop("layers_on", {}).items()}
    asked = {"sequences": [list(map(int, s)) for s in sequences], "options": {**options, "layers_on": layers}}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.npy"
        command = [sys.executable, "-m", "tests.support.cuda_played", str(path), str(out)]
        subprocess.run(command, input=json.dumps(asked), text=True, cwd=ROOT, check=True)
        found: Floats = np.load(out)
    return found


def _main(path: str, out: str, sequences: Sequence[Sequence[int]], options: dict[str, Any]) -> None:
    import ggmlb.backends.cuda
    from tests.support.host_driver import HostDriver

    driver = HostDriver(n_devices=2)
    ggmlb.backends.cuda.load_driver = lambda: driver
    np.save(out, our_log_probs(Path(path), sequences, **options))
    assert driver.counts["replay"], driver.counts


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], **json.load(sys.stdin))
