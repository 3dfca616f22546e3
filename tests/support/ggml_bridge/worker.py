"""A process that runs cases of ggml's test on a device: `python -m ... FOLDER DEVICE SEED [--list]`.

Each line on stdin is a filter as the test's option `-o` has it; an empty one is all cases. What the test
prints comes on stdout, with a line `END` and the test's status behind it. With `--list` the device supports
nothing, so that every case is named and none is computed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ggmlb
from tests.support.ggml_bridge.c_api import Ggml
from tests.support.ggml_bridge.devices import Registration

END = "END of test-backend-ops, status "


def main() -> None:
    folder, device = Path(sys.argv[1]), ggmlb.device_by_name(sys.argv[2])
    ggml = Ggml(folder)
    registered = Registration(ggml, device, int(sys.argv[3]), supports_nothing="--list" in sys.argv)
    for line in sys.stdin:
        chosen = ["-o", line.strip()] if line.strip() else []
        status = ggml.main("test", "-b", registered.name, *chosen)
        ggml.say(f"\n{END}{status}\n")
    sys.stderr.flush()
    os._exit(0)  # C keeps addresses of our callbacks: nothing is torn down under it


if __name__ == "__main__":
    main()
