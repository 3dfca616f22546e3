"""Programs run as processes of their own: what they share, and how they must end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

COMMON = """
import numpy as np
from ggmlb import BackendError, BufferUsage, Context, DType, Graph, Scheduler
from ggmlb import alloc_ctx_tensors, device_by_name, devices, init_by_name
from ggmlb.interface import tensor_copy, tensor_copy_async

def scaled(backend, factor=2.0):
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (1000,))
    y = ctx.scale(a, factor)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)
"""


def python(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python, with its output piped, where it finds this checkout's ggmlb."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=cwd, env=settings, check=False
    )


def ggmlb_command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ggmlb`."""
    return python("-m", "ggmlb", *args, cwd=None, **env)


def start(code: str, **env: str) -> subprocess.Popen[str]:
    """Start a Python program that prints "done" where all went well."""
    # What Python and array libraries warn of is not what these programs are about.
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    settings = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **env}
    # Python 3.12 warns of a fork beside threads; programs that fork do so on purpose.
    warnings = ("-W", "error::ResourceWarning", "-W", "ignore:This process:DeprecationWarning")
    return subprocess.Popen(
        [sys.executable, *warnings, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=settings,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for its end; it must have said "done", and nothing else."""
    try:
        out, err = process.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert not err, err
    assert (process.returncode, out) == (0, "done\n")
