"""A person at a terminal: types lines into an environment of their own, and looks at what comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

TIMEOUT_S = 1800


class Session:
    """A clean environment, a folder to work in, and a transcript of all that was typed and shown.

    Attributes:
        home: The folder, with nothing of the checkout.
        checkout: A copy of the files that git knows.
        failed: What was not as its page says.
    """

    def __init__(self, folder: Path, root: Path, transcript: TextIO) -> None:
        self.home, self.checkout, self._venv = (folder / name for name in ("home", "checkout", "venv"))
        self.home.mkdir()
        self.failed: list[str] = []
        self._transcript = transcript
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True)
        for name in filter(None, listed.split("\0")):
            copy = self.checkout / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((root / name).read_bytes())
        subprocess.run([sys.executable, "-m", "venv", self._venv], check=True)

    def run(
        self, *words: str, at: Path | None = None, stdin: str = "", timeout: float = TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; with one word, that is a line for the shell."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GGMLB_"))}
        env |= {"PATH": f"{self._venv}/bin:{env['PATH']}", "VIRTUAL_ENV": str(self._venv), "COLUMNS": "80"}
        command: Sequence[str] = ["bash", "-c", words[0]] if len(words) == 1 else words
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=at or self.home, env=env, input=stdin, capture_output=True, text=True,
                timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, 124, "", f"still running after {timeout} s")
        self._transcript.write(
            f"$ {' '.join(words)}\n{stdin}{done.stdout}{done.stderr}"
            f"[status {done.returncode}, {time.perf_counter() - start:.1f} s]\n\n"
        )
        self._transcript.flush()
        return done

    def judge(self, what: str, wrong: Sequence[str]) -> None:
        """Note whether a step went as its page says, and show it."""
        print(f"{'as told' if not wrong else 'OTHERWISE':10}{what}", *wrong, sep="\n    ", flush=True)
        self.failed += [what] if wrong else []
