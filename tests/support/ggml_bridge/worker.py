"""A process that runs cases of ggml's test on a device: `python -m ... FOLDER DEVICE SEED [--list]`.

Each line on stdin is a filter as the test's option `-o` has it; an empty one is all cases. What the test
prints comes on stdout, with a line `END` and the test's status behind it. With `--list` the device supports
nothing, so that every case is named and none is computed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import ggmlb
from ggmlb.backends.ggml import abi
from ggmlb.backends.ggml.find import at
from ggmlb.backends.ggml.library import GgmlLibrary, probe
from ggmlb.backends.ggml.registration import GgmlRegistration
from tests.support.ggml_bridge import END, FAULT


class Suite:
    """The test's library, in this process."""

    def __init__(self, folder: Path) -> None:
        library = ctypes.CDLL(str(folder / "libtest-backend-ops.so"))
        self._main = library.main
        self.seed = library.repeatable_seed
        self.seed.argtypes = [ctypes.c_uint64]
        self.set_n_threads = library.ggml_backend_cpu_set_n_threads
        self.set_n_threads.argtypes, self.set_n_threads.restype = [ctypes.c_void_p, ctypes.c_int], None
        self._libc = ctypes.CDLL(None)
        self._stdout = ctypes.c_void_p.in_dll(self._libc, "stdout")
        self._libc.setvbuf(self._stdout, None, 1, 0)  # by lines, so that a crash loses none

    def main(self, *arguments: str) -> int:
        """Call the test's `main`, and return its status."""
        argv = [b"test-backend-ops", *(a.encode() for a in arguments)]
        status: int = self._main(len(argv), (ctypes.c_char_p * (len(argv) + 1))(*argv, None))
        self._libc.fflush(None)
        return status

    def say(self, text: str) -> None:
        """Write to C's stdout, in order with what the test prints there."""
        self._libc.fputs(text.encode(), self._stdout)
        self._libc.fflush(self._stdout)


class TestedDevice(GgmlRegistration):
    """A registration whose errors are seen by the suite, and whose cases have the same data in each run."""

    def __init__(
        self, suite: Suite, library: GgmlLibrary, device: ggmlb.Device, seed: int, lists: bool
    ) -> None:
        self._suite, self._seed, self._lists = suite, seed, lists
        super().__init__(library, device, repack=False)
        self._one_thread_for_ggml()

    def _supports(self, op: int) -> bool:
        return not self._lists and super()._supports(op)

    def _allocate(self, *arguments: Any) -> int:
        self._suite.seed(self._seed)  # the test fills tensors when it has placed them
        return super()._allocate(*arguments)

    def _report(self, name: str, error: BaseException | str) -> None:
        self._suite.say(f"[{FAULT}{type(error).__name__} in {name}: {error}] ".replace("\n", " "))
        traceback.print_exc()

    def _one_thread_for_ggml(self) -> None:
        """Let streams of ggml's CPU have one thread: its default four wait for each other by spinning."""
        kinds = abi.TABLES["device"]["init_backend"].split()[0]
        cpu = abi.Table.from_address(self._c["backend_dev_get"](0))
        index = self._tables["device"]["init_backend"]
        opened = abi.callback(kinds, cpu.slots[index])

        def init_backend(dev: int, params: bytes | None) -> Any:
            stream = opened(dev, params)
            self._suite.set_n_threads(stream, 1)
            return stream

        self._one_thread = abi.callback(kinds, init_backend)
        cpu.slots[index] = ctypes.cast(self._one_thread, ctypes.c_void_p).value


def main() -> None:
    folder, device = Path(sys.argv[1]), ggmlb.device_by_name(sys.argv[2])
    found = at(folder)
    assert found is not None
    library = GgmlLibrary(found, "ggml:", probe(found, "--tables"))
    library.functions()
    suite = Suite(folder)
    tested = TestedDevice(suite, library, device, int(sys.argv[3]), "--list" in sys.argv)
    for line in sys.stdin:
        chosen = ["-o", line.strip()] if line.strip() else []
        status = suite.main("test", "-b", tested.name, *chosen)
        suite.say(f"\n{END}{status}\n")
    sys.stderr.flush()
    os._exit(0)  # C keeps addresses of our callbacks: nothing is torn down under it


if __name__ == "__main__":
    main()
