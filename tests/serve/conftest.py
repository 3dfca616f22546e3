"""A server of the small real model, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from ggmlb.models import default_text_model
from tests.support.processes import ROOT

pytest.importorskip("starlette", reason="needs starlette: pip install 'ggmlb[server]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'ggmlb[server]'")


class Served:
    """A running `ggmlb serve`, and plain requests to it."""

    def __init__(self, *args: str, program: str = "") -> None:
        """Start it with options of the command, or by a Python program."""
        command = ["-m", "ggmlb", "--quiet", "serve", "-m", str(default_text_model()), "--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, *(["-c", program] if program else [*command, "-c", "2048", *args])],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in iter(self.process.stderr.readline, ""):
            self.log.append(line)
            if " at http" in line:
                self.url = line.split()[2]
                return
        raise AssertionError("".join(self.log))

    @property
    def address(self) -> tuple[str, int]:
        found = urlsplit(self.url)
        return str(found.hostname), int(found.port or 0)

    def call(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, raw: bytes | None = None
    ) -> tuple[int, Any]:
        """Return the status and the answer, parsed if it is JSON."""
        client = HTTPConnection(*self.address, timeout=300)
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        client.request(
            "GET" if content is None else "POST", path, content,
            {"Content-Type": "application/json", **(headers or {})},
        )  # fmt: skip
        answer = client.getresponse()
        text = answer.read().decode()
        client.close()
        is_json = (answer.getheader("content-type") or "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text

    def metric(self, name: str, headers: Mapping[str, str] | None = None) -> float:
        text: str = self.call("/metrics", headers=headers)[1]
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"ggmlb_{name} "))

    def wait_for_metric(self, name: str, value: float, headers: Mapping[str, str] | None = None) -> None:
        end = time.monotonic() + 300
        while (found := self.metric(name, headers)) != value:
            assert time.monotonic() < end, f"{name} is {found}, not {value}"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(300)
        assert self.process.stderr is not None
        self.log += self.process.stderr.readlines()
        self.process.stderr.close()
        return code


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.stop()
    assert "Traceback" not in "".join(found.log), "".join(found.log)
