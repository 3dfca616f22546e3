"""Models by name, from a local server of the hub's protocol, and from its cache when that is gone."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ggmlb import ModelError
from ggmlb.models.hub import chosen, model_path
from tests.support.processes import ROOT

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install 'ggmlb[hub]'")

PROGRAM = """
import sys
from ggmlb.models import TextModel
with TextModel(sys.argv[1], ["CPU"], n_ctx=32) as model:
    print(model.file.path.name, model.generate([1, 5], max_tokens=2, ignore_eos=True).tokens)
"""
SHA = "a" * 40


@pytest.fixture
def hub(models: Callable[..., Path]) -> Iterator[str]:
    files = {"tiny-Q8_0.gguf": models("llama", "q8_0").read_bytes(), "tiny-F32.gguf": models().read_bytes()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            if "/tiny" in self.path and self.headers.get("Authorization"):  # of a wrong token
                self._send(401, b"{}", {"X-Error-Message": "Invalid credentials"})
            elif "org/tiny" not in self.path:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"})
            elif self.path.startswith("/api/models/org/tiny/tree"):
                tree = [{"type": "file", "path": n, "size": len(c), "oid": SHA} for n, c in files.items()]
                self._send(200, json.dumps(tree).encode(), {})
            elif self.path.startswith("/api/models/org/tiny"):
                told = {"id": "org/tiny", "sha": SHA, "siblings": [{"rfilename": n} for n in files]}
                self._send(200, json.dumps(told).encode(), {})
            else:
                etag = hashlib.sha1(name.encode()).hexdigest()
                self._send(200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            kind = "application/json" if self.path.startswith("/api") else "application/octet-stream"
            for key, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(name: str, home: Path, endpoint: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {
        "PATH": "",
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HOME": str(home),
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env={**given, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_name_is_downloaded_once_and_opened_offline(hub: str, tmp_path: Path) -> None:
    first = run("org/tiny:q8_0", tmp_path, hub)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("tiny-Q8_0.gguf [")
    for name in ("org/tiny:Q8_0", "org/tiny"):
        again = run(name, tmp_path, hub, HF_HUB_OFFLINE="1")
        assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    other = run("org/tiny:F32", tmp_path, hub, HF_HUB_OFFLINE="1")
    assert "give a quantisation that exactly one file has; its files: tiny-Q8_0.gguf" in other.stderr
    for name, why in (("org/tiny:q8_0", ""), ("other/tiny", "the hub refuses, and its cache has org/tiny")):
        denied = run(name, tmp_path, hub, HF_TOKEN="wrong")
        assert denied.stdout == first.stdout * (not why) and why in denied.stderr, denied.stderr
    assert "Invalid credentials" in denied.stderr
    absent = run("org/absent", tmp_path, hub, HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached, and its cache has org/tiny" in absent.stderr
    refused = run("org/absent", tmp_path, hub)
    assert "MissingModelError: org/absent" in refused.stderr


def test_files_are_chosen_by_tag() -> None:
    names = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "b/a-Q6_K-00001-of-00002.gguf", "b/a-Q6_K-00002-of-00002.gguf"]
    assert chosen("o/r", names, "") == ["a-Q4_K_M.gguf"]
    assert chosen("o/r", names, "q4_k_s") == ["a-Q4_K_S.gguf"]
    assert chosen("o/r", names, "Q6_K") == names[2:]
    assert chosen("o/r", ["x.gguf", "mmproj-x-F16.gguf", "README.md"], "") == ["x.gguf"]
    for wrong in ("Q4", "Q5_0"):
        with pytest.raises(ModelError, match=f"o/r:{wrong}: give a quantisation"):
            chosen("o/r", names, wrong)


def test_paths_stay_paths(tmp_path: Path) -> None:
    for path in ("model.gguf", "a/b.gguf", "/no/such", "a/b/c", tmp_path):
        assert model_path(path) == Path(path)
