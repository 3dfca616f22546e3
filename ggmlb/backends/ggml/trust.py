"""Test runs of a library's ops in a child process, one per kind of node.

ggml's `supports_op` accepts some nodes that then abort the process, or give other values than ggmlb. So the
first node of each `kind` is computed in a child process (`trial`) and compared with the CPU's result; the
outcome is cached on disk, by library and device.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from ggmlb.backends.ggml.library import QUIET
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Ne, Tensor, contiguous_nb
from ggmlb.system import disk_cache, env, progress

if TYPE_CHECKING:
    from ggmlb.backends.ggml.device import GgmlDevice

EDITION: Final = 6
"""Version of the trials; cached outcomes of older ones are ignored."""

CPU_LIMIT_S: Final = 30
GPU_LIMIT_S: Final = 120
"""Limits of a trial's processor time [s]; a GPU's driver may compile shaders for a minute."""

PATIENCE_S: Final = 300.0
"""Time limit of a trial [s], generous for a busy machine."""

SAVE_EVERY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor of a trial: its type, extents and strides."""

    dtype: DType
    ne: Ne
    nb: Ne


@dataclass(frozen=True, slots=True)
class Trial:
    """A node to test.

    Attributes:
        view_of: Index of the operand of which the result is a view, and its offset [bytes]; or `None`.
        memory: Name of the first operand's extra buffer type; empty for the default one.
    """

    op: Op
    params: dict[str, Any]
    result: Shape
    operands: tuple[Shape | None, ...]
    view_of: tuple[int, int] | None
    memory: str


def trial_of(node: Tensor, memory: str) -> Trial:
    """Return a trial of the node; `memory`: name of its first operand's extra buffer type, or empty."""
    view = None
    if node.view_src is not None:
        roots = [t.view_src or t if t is not None else None for t in node.src]
        if (node.view_src.view_src or node.view_src) in roots:
            i = roots.index(node.view_src.view_src or node.view_src)
            seen = node.src[i]
            view = (i, node.view_offs - (seen.view_offs if seen is not None and seen.view_src else 0))
    operands = tuple(None if t is None else Shape(t.dtype, t.ne, t.nb) for t in node.src)
    return Trial(node.op, dict(node.params), Shape(node.dtype, node.ne, node.nb), operands, view, memory)


def kind(trial: Trial) -> str:
    """Return the kind of a node as text: the properties by which a library selects a kernel.

    These are op, modes, types, and classes of extents and strides: 0, 1, few, many; divisible by a vector;
    contiguous, with gaps, permuted.
    """
    modes = [
        f"{name}={value.name if isinstance(value, Enum) else bool(value)}"
        for name, value in sorted(trial.params.items())
        if isinstance(value, (Enum, int, float))
    ]
    exact = trial.op in (Op.FLASH_ATTN_EXT, Op.SSM_SCAN, Op.SSM_CONV)  # kernels per head size
    shapes = ["-" if s is None else _class(s, exact) for s in (trial.result, *trial.operands)]
    where = [f"in {trial.memory}"] if trial.memory else []
    inplace = [f"onto {trial.view_of[0]}"] if trial.view_of is not None else []
    return " ".join([trial.op.value, *modes, *shapes, *inplace, *where])


def _class(s: Shape, exact: bool) -> str:
    """Return type and class of a tensor: `"f32[m/32,s,1,1]"`.

    If it is not contiguous, the order of its strides follows, `s` if elements of a row are strided, and each
    pair `ij` where the stride of `j` is the size of `i`: ggml asserts on strides even of one element.
    """
    sizes = ["0" if n == 0 else "1" if n == 1 else "s" if n <= 8 else "m" for n in s.ne]
    inner = str(s.ne[0]) if exact and s.ne[0] <= 1024 else sizes[0]
    whole = next((k for k in (256, 32, 4, 2) if s.ne[0] and s.ne[0] % k == 0), 1)
    found = f"{s.dtype.name.lower()}[{inner}/{whole},{','.join(sizes[1:])}]"
    if s.nb == contiguous_nb(s.dtype, s.ne):
        return found
    order = sorted(range(4), key=lambda i: (s.nb[i], i))
    ends = [s.nb[0] * s.ne[0] // s.dtype.block_size, *(s.nb[i] * s.ne[i] for i in (1, 2, 3))]
    meet = [f"{i}{j}" for i in order for j in order if i != j and s.nb[j] == ends[i]]
    apart = "s" if s.nb[0] != s.dtype.type_size else ""
    return f"{found}{''.join(map(str, order))}{apart}:{','.join(meet)}"


class Judge:
    """Cached outcomes of one device's trials."""

    def __init__(self) -> None:
        self._verdicts: dict[str, str] | None = None
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._file = Path()
        self._saved_at = 0.0
        self._changed = False

    def verdict(self, device: GgmlDevice, node: Tensor) -> str | None:
        """Return why this kind of node failed its trial, or `None`; only the kind's first node is tried."""
        first = node.src[0] if node.src else None
        buffer = None if first is None else first.buffer
        memory = "" if buffer is None or buffer.buft not in device.extra_bufts else buffer.buft.name
        trial = trial_of(node, memory)
        name = kind(trial)
        with self._lock:
            if self._verdicts is None:
                facts = (EDITION, device.library.identity, device.name, device.description)
                self._file = disk_cache.folder("ggml") / f"{sha256(repr(facts).encode()).hexdigest()}.trust"
                self._verdicts = self._load()
            if name not in self._verdicts:
                self._verdicts[name] = self._try(device, trial, name) or ""
                self._changed = True
                if monotonic() - self._saved_at > SAVE_EVERY_S:
                    self.save()
            return self._verdicts[name] or None

    def _try(self, device: GgmlDevice, trial: Trial, name: str) -> str | None:
        with progress.task(f"{device.name}: trying ops") as task:
            task.step(name)
            if self._child is None:
                self._child = Child(device)
                atexit.register(self.close)
            return self._child.run(trial)

    # -- on disk -------------------------------------------------------------------------------

    def _load(self) -> dict[str, str]:
        content = disk_cache.load(self._file)
        found: dict[str, str] = {} if content is None else json.loads(content)
        return found

    def save(self) -> None:
        """Write the outcomes to disk, merged with those of other processes."""
        if self._changed and self._verdicts is not None:
            self._verdicts = {**self._load(), **self._verdicts}
            disk_cache.save(self._file, json.dumps(self._verdicts).encode())
            self._saved_at, self._changed = monotonic(), False

    def close(self) -> None:
        """Write the outcomes, and end the child process."""
        with self._lock:
            self.save()
            child, self._child = self._child, None
            if child is not None:
                child.close()
                atexit.unregister(self.close)


class Child:
    """A child process that computes trials on a device; started again after a trial aborts it."""

    def __init__(self, device: GgmlDevice) -> None:
        library = device.library
        limit_s = CPU_LIMIT_S if device.is_cpu else GPU_LIMIT_S
        self._setup = pickle.dumps((library.found, library.prefix, library.facts, device.index, limit_s))
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None

    def run(self, trial: Trial) -> str | None:
        """Run a trial; return why it failed, or `None`."""
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        watch = threading.Timer(PATIENCE_S, _kill, (process,))
        watch.start()
        start = monotonic()
        try:
            message = pickle.dumps(trial)
            process.stdin.write(len(message).to_bytes(8, "little") + message)
            process.stdin.flush()
            n = int.from_bytes(process.stdout.read(8), "little")
            answer = process.stdout.read(n) if n else b""
        except OSError:
            answer = b""
        except BaseException:  # such as Ctrl-C: the late answer would be read as the next trial's
            self.close()
            raise
        finally:
            watch.cancel()
        if answer:
            said: str | None = pickle.loads(answer)
            return said
        status = process.wait()
        self._errors.seek(0)
        words = error_line(self._errors.read())
        self.close()
        if monotonic() - start > PATIENCE_S:
            return f"a trial of it took longer than {PATIENCE_S:.0f} s"
        return abort_reason(-status, words)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # unsent bytes
                    if pipe is not None:
                        pipe.close()
            self._errors.close()

    def _start(self) -> None:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join((root, *env.paths("PYTHONPATH")))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ggmlb.backends.ggml.trial"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=env.extended({**QUIET, "PYTHONPATH": path}), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        with suppress(OSError):  # it ended already; the first trial reports that
            self._process.stdin.write(len(self._setup).to_bytes(8, "little") + self._setup)
            self._process.stdin.flush()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its forks."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def abort_reason(ended_by: int, words: str) -> str:
    """Return why a trial failed, from the signal that ended its process and its `error_line` (`words`)."""
    if ended_by == getattr(signal, "SIGXCPU", None):
        return "a trial of it did not end within the limit of processor time"
    return f"a trial of it ended the process (signal {ended_by}): {words}"


def error_line(log: bytes) -> str:
    """Return the first line of a log with an assertion or error, else the last line."""
    lines = log.decode(errors="replace").strip().splitlines()
    told = [line for line in lines if "ASSERT" in line or "error" in line.lower()] or lines[-1:]
    return " ".join(told[0].split()) if told else "it said nothing"
