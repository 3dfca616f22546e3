"""GgmlLibrary: a probed ggml library, loaded at the first use of one of its devices."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from ggmlb.backends.ggml import abi
from ggmlb.backends.ggml.find import Found
from ggmlb.backends.ggml.params import encode
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import BackendBroken, BackendUnavailable
from ggmlb.core.tensor import Tensor
from ggmlb.system import env
from ggmlb.system.process import LibraryGuard

log: Final = logging.getLogger("ggmlb.ggml")
guard: Final = LibraryGuard("ggml")

PATIENCE_S: Final = 120.0
"""Time limit of the probe of a library [s]; opening a GPU driver may take some seconds."""

_FORMATS: Final = {
    "type": "i", "buffer": "Q", "ne": "4q", "nb": "4Q", "op": "i", "op_params": "64s", "flags": "i",
    "src": "10Q", "view_src": "Q", "view_offs": "Q", "data": "Q", "name": "64s", "extra": "Q",
}  # fmt: skip
N_SRC: Final = 10
N_PARAMS: Final = 64
N_NAME: Final = 63
"""`GGML_MAX_SRC`, `GGML_MAX_OP_PARAMS`, and the longest name, without its 0 [bytes]."""

QUIET: Final = {"GGML_NO_BACKTRACE": "1", "GGMLB_REGISTER_WITH_GGML": ""}
"""Environment of child processes: no debugger for a backtrace after an abort, no registration of devices."""


def probe(found: Found, *options: str) -> dict[str, Any]:
    """Return the result of `abi.probe`, run in a child process.

    Args:
        found: The library.
        options: `--tables` for `abi.tables`, too.

    Raises:
        BackendUnavailable: The library cannot be loaded, or is incompatible.
    """
    command = [sys.executable, "-I", str(Path(abi.__file__)), *found.parts]
    command += [*options, *(("--load", found.folder) if found.folder else ())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env=env.extended(QUIET), timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"the child process that probes the library failed: {error}") from error
    facts: dict[str, Any] = {}
    if done.returncode == 0:
        facts = json.loads(done.stdout.splitlines()[-1])
    else:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        facts["unfit"] = f"it ended the process that probed it, with status {done.returncode}: {said[-1]}"
    if "unfit" in facts:
        raise BackendUnavailable(facts["unfit"])
    layout = facts["tensor"]
    n_params, n_src = layout["flags"] - layout["op_params"], (layout["view_src"] - layout["src"]) // 8
    if (n_params, n_src, layout["room"]) != (N_PARAMS, N_SRC, N_NAME + 1):
        raise BackendUnavailable(
            f"ggml {facts['version']} has GGML_MAX_SRC {n_src}, GGML_MAX_OP_PARAMS {n_params}, GGML_MAX_NAME "
            f"{layout['room']}; build it with {N_SRC}, {N_PARAMS}, {N_NAME + 1}"
        )
    return facts


class GgmlLibrary:
    """A ggml library.

    Args:
        found: Its files.
        prefix: Prefix of its devices' names.
        facts: Result of `probe`.

    Attributes:
        version: Version of ggml.
        identity: Digest of its files, which an update changes.
    """

    def __init__(self, found: Found, prefix: str, facts: dict[str, Any]) -> None:
        self.found = found
        self.prefix = prefix
        self.facts = facts
        self.version: str = facts["version"]
        self._layout: dict[str, int] = facts["tensor"]
        self._lock = threading.Lock()
        self._ggml: abi.Ggml | None = None
        self.tensor_size = self._layout["size"]
        self._pack = struct.Struct(self._format())
        self.types = {
            t: facts["types"][t.name.lower()][0]
            for t in DType
            if tuple(facts["types"].get(t.name.lower(), ())[1:]) == (t.type_size, t.block_size)
        }
        self.ops = {op: facts["ops"][op.value] for op in Op if op.value in facts["ops"]}

    def __str__(self) -> str:
        return f"ggml {self.version} ({self.found.origin})"

    @cached_property
    def identity(self) -> str:
        """Digest of the paths, sizes and modification times of its files."""
        files = [
            *self.found.parts,
            *(map(str, sorted(Path(self.found.folder).iterdir())) if self.found.folder else ()),
        ]
        facts = [(f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
        return sha256(repr((self.version, facts)).encode()).hexdigest()

    # -- loading -------------------------------------------------------------------------------

    def load(self) -> abi.Functions:
        """Load the library once per process; return its functions by name without the prefix `ggml_`.

        Raises:
            BackendBroken: It cannot be loaded, or the loader took files of another library instead.
            BackendError: This process was forked from one that had loaded it.
        """
        if self._ggml is None:
            guard.check(f"load {self}")
            with self._lock:
                if self._ggml is None:
                    self._ggml = self._loaded()
        return self._ggml.c

    @property
    def is_loaded(self) -> bool:
        """Whether the library is loaded."""
        return self._ggml is not None

    def functions(self, needed: Mapping[str, str] = abi.SIGNATURES) -> abi.Ggml:
        """Return the library with its functions, loaded if it is not; the program goes on to use it.

        Args:
            needed: The functions that it must have.

        Raises:
            BackendBroken: It cannot be loaded, lacks a function, or another library with the same functions
                is loaded for the whole process.
        """
        try:
            ggml = abi.Ggml(self.found.parts, needed)
        except (OSError, abi.Unfit) as error:
            raise BackendBroken(f"{self} cannot be loaded: {error}") from error
        self._check_parts(ggml)
        return ggml

    def _loaded(self) -> abi.Ggml:
        try:
            ggml = self.functions()
            ggml.c["log_set"](ctypes.cast(_forward_log, ctypes.c_void_p), None)
            ggml = abi.load(self.found.parts, self.found.folder)
        except (OSError, abi.Unfit) as error:
            raise BackendBroken(f"{self} cannot be loaded: {error}") from error
        n, expected = ggml.c["backend_dev_count"](), len(self.facts["devices"])
        if n < expected:  # more are those that `register_with_ggml` added
            raise BackendBroken(
                f"{self} has {n} devices now, and had {expected} when probed; set environment variables "
                "before the first use of ggmlb"
            )
        return ggml

    def _check_parts(self, ggml: abi.Ggml) -> None:
        """Raise if the loader took functions from another library with the same names."""
        for name in ("version", "backend_dev_count"):
            file = abi.file_of(ggml.c[name])
            if file is not None and os.path.realpath(file) not in self.found.parts:
                raise BackendBroken(
                    f"{self} cannot be loaded: {file} with the same name is loaded already; use one of the "
                    "two per process (set GGMLB_GGML_PATH)"
                )
        tensor, op = self.room(1), self.ops[Op.ADD]
        ctypes.c_int.from_buffer(tensor, self._layout["op"]).value = op
        if ggml.c["op_desc"](ctypes.addressof(tensor)) != ggml.c["op_name"](op):
            raise BackendBroken(
                f"{self} cannot be used: another ggml was loaded for the whole process before it, as by "
                "ggml-python, and its functions call that one; import the two in the other order"
            )

    # -- tensors -------------------------------------------------------------------------------

    def pack(
        self,
        memory: ctypes.Array[ctypes.c_char],
        index: int,
        tensor: Tensor,
        place: tuple[int, int, int],
        node: tuple[int, int, Sequence[int]] | None = None,
        flags: int = 0,
    ) -> None:
        """Write a tensor to element `index` of an array of `ggml_tensor`s; `place`, `node`, `flags`: fields.

        Args:
            memory: An array of C tensors.
            index: Index in it.
            tensor: The tensor.
            place: Values of `buffer`, `data` and `extra`.
            node: Values of `view_src`, `view_offs` [bytes] and `src`; `None` for a leaf.
            flags: Value of `flags`.

        Raises:
            LookupError: The library lacks the type, the op or one of its functions.
        """
        buffer, address, extra = place
        op, params, view, view_offs = 0, b"", 0, 0
        sources: Sequence[int] = ()
        if node is not None:
            view, view_offs, sources = node
            op = self.ops[tensor.op]
            params = encode(tensor, self.facts["unary_ops"], self.facts["glu_ops"])
        rest = (0,) * (N_SRC - len(sources))
        self._pack.pack_into(
            memory, index * self.tensor_size, self.types[tensor.dtype], buffer, *tensor.ne, *tensor.nb, op,
            params, flags, *sources, *rest, view, view_offs, address, tensor.name.encode()[: N_NAME], extra,
        )  # fmt: skip

    def unpack(self, raw: bytes) -> tuple[Any, ...]:
        """Return the fields of a `ggml_tensor`, in ggml's order (`_FORMATS`)."""
        return self._pack.unpack(raw)

    def room(self, n: int) -> ctypes.Array[ctypes.c_char]:
        """Return a zeroed array of `n` `ggml_tensor`s."""
        return ctypes.create_string_buffer(n * self.tensor_size)

    def extra(self, memory: ctypes.Array[ctypes.c_char]) -> int:
        """Return the `extra` pointer of the first `ggml_tensor` in `memory`."""
        return ctypes.c_size_t.from_buffer(memory, self._layout["extra"]).value

    def has_slot(self, address: int, kind: str, slot: str) -> bool:
        """Whether a C `buffer` or `buffer_type` (`kind`) has the function `slot`; `True` if unknown."""
        index = self.facts["slots"][kind][slot]
        return index < 0 or bool(ctypes.c_void_p.from_address(address + 8 * index).value)

    def _format(self) -> str:
        """Return the format by which `struct` packs a tensor."""
        text, end = "=", 0
        for name, kind in _FORMATS.items():
            text += f"{self._layout[name] - end}x{kind}"
            end = self._layout[name] + struct.calcsize("=" + kind)
        return text + f"{self.tensor_size - end}x"


def operands(node: Tensor, where: Mapping[Tensor | None, int]) -> list[int]:
    """Return the addresses of a node's operands in ggml's order; `where` maps tensors to addresses."""
    sources = [where[t] for t in node.src]
    if node.op is Op.CPY and len(sources) == 1:  # a cast: in ggml src[1] is the result
        sources.append(where[node])
    return sources


_LEVELS: Final = (logging.DEBUG, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
_CONTINUED: Final = 5
_line: list[Any] = [logging.DEBUG, ""]


def _log_line(level: int, text: bytes, _: int | None) -> None:
    """Forward ggml's log to Python's, line by line."""
    if level != _CONTINUED:
        _line[:] = _LEVELS[level] if level < len(_LEVELS) else logging.INFO, ""
    _line[1] += text.decode(errors="replace")
    if _line[1].endswith("\n"):
        log.log(_line[0], "%s", _line[1].rstrip())
        _line[1] = ""


_forward_log: Final = abi.LogCallback(_log_line)
