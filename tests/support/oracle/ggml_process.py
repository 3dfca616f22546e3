"""The client of `worker.py`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Answer = tuple[int, tuple[int, ...], bytes]
"""Type, extents and bytes of an output."""


class Refused(Exception):
    """ggml ended its process: an assertion of its own failed."""


class Missing(Exception):
    """The ggml that is installed does not have a function."""


class GgmlProcess:
    """Computes programs in a process of its own, which is started again when ggml ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None

    def compute(self, *request: Any) -> list[Answer]:
        """Return type, extents and bytes of each output.

        Raises:
            Refused: ggml does not take the program.
            Missing: ggml does not have one of its functions.
        """
        process = self._running()
        assert process.stdin and process.stdout
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer: list[Answer] | str = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            status = process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            self.close()
            if status > 0:
                raise RuntimeError(said) from None
            raise Refused(next((x for x in said.splitlines() if ".c" in x), f"signal {-status}")) from None
        if isinstance(answer, str):
            raise Missing(answer)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.wait()
            self._errors.close()
        self._process = None
