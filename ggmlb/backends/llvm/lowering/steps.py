"""Steps emitted by rules, and their table for machine code."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.backends.llvm.kernels.driver import STEP_WORDS
from ggmlb.core.tensor import Tensor
from ggmlb.system.progress import Task

if TYPE_CHECKING:
    from ggmlb.backends.common.strided import Mem
    from ggmlb.backends.llvm.backend import LlvmBackend

    Ints = npt.NDArray[np.int64]

LEAST_WORK = 8000
"""Least work of a step for several threads [ns]; waking them costs about a tenth of this."""

CHUNK_WORK = 4000
"""The least work of a chunk [ns]."""

CHUNKS_PER_THREAD = 8
"""Chunks of a long step for each thread: one that starts late does fewer."""


@dataclass(slots=True)
class Step:
    """A kernel with its arguments; the work is done in chunks, perhaps by several threads."""

    kernel: int
    args: Sequence[int | float]
    n_chunks: int


@dataclass(slots=True)
class Table:
    """The steps as machine code reads them; keeps alive what it points to.

    Attributes:
        address: Of the first step.
        errors: Row number, limit and step of the first fault that a kernel found; zeros if none.
    """

    address: int
    errors: Ints
    words: Ints
    args: Ints


class Steps:
    """The steps of a plan, as rules emit them.

    Attributes:
        library: The kernels.
        steps: In order.
        n_threads: Threads that may share a step.
        errors: Where kernels write what is wrong with the data.
        kept: What the steps point to.
        shares: Whether any step is for several threads.
    """

    def __init__(self, backend: LlvmBackend, task: Task) -> None:
        self._task = task
        self.library = backend.library
        self.steps: list[Step] = []
        self.n_threads = backend.pool.n
        self.errors = np.zeros(8, np.int64)
        self.kept: list[Any] = []
        self.shares = False
        self._scratch = backend.scratch
        self._for_activations = backend.activations
        self._bases: dict[int, int] = {}
        self._activations: tuple[Any, ...] | None = None
        self._activation_range = (0, 0)

    @property
    def report(self) -> tuple[int, int]:
        """Return the address where the next step's kernel reports bad data, and the step's number from 1."""
        return int(self.errors.ctypes.data), len(self.steps) + 1

    def address(self, tensor: Tensor | Mem) -> int:
        """Return where the first element is."""
        buffer = tensor.buffer
        assert buffer is not None
        base = self._bases.get(id(buffer))
        if base is None:
            memory = buffer.base
            self.kept.append(memory)
            base = self._bases[id(buffer)] = int(memory.ctypes.data)
        return base + tensor.offset

    def scratch(self, nbytes: int) -> int:
        """Return the address of scratch memory, valid for the steps of one node."""
        memory = self._scratch.take((nbytes,), np.uint8)
        self.kept.append(memory)
        return int(memory.ctypes.data)

    def constant(self, array: npt.NDArray[Any]) -> int:
        """Return the address of an array, which is kept alive."""
        self.kept.append(array)
        return int(array.ctypes.data)

    def begin(self, node: Tensor) -> None:
        """Begin the steps of a node."""
        self._scratch.restart()
        if self._activations is not None:
            start = self.address(node)
            low, high = self._activation_range
            if start < high and low < start + node.nbytes:
                self._activations = None  # what they were made from is written

    def activations(self, tensor: Tensor, nbytes: int) -> tuple[int, bool]:
        """Return memory for a tensor's values as bytes, and whether they are there already."""
        address = self.address(tensor)
        key = (address, tensor.ne, tensor.nb, tensor.dtype, nbytes)
        if self._activations is not None and self._activations[0] == key:
            return self._activations[1], True
        self._for_activations.restart()
        memory = self._for_activations.take((nbytes,), np.uint8)
        self.kept.append(memory)
        self._activations = (key, int(memory.ctypes.data))
        self._activation_range = (address, address + tensor.nbytes)
        return self._activations[1], False

    def chunks(self, work: float, most: int | None = None) -> int:
        """Return the number of chunks for some work [ns]; 1 for a single thread."""
        if work < LEAST_WORK:
            return 1
        n = max(2, min(int(work // CHUNK_WORK), CHUNKS_PER_THREAD * self.n_threads))
        return n if most is None else max(1, min(n, most))

    def emit(
        self,
        kernel: Callable[..., None],
        params: Sequence[Any],
        args: Sequence[int | float],
        n_chunks: int = 1,
    ) -> None:
        """Append a step.

        Args:
            kernel: Writes the code.
            params: What it is specialised for.
            args: In the order in which it asks for them.
            n_chunks: From `chunks`.
        """
        self.shares = self.shares or n_chunks > 1
        self.steps.append(Step(self.library.address(kernel, tuple(params), self._task), args, n_chunks))

    def pack(self) -> Table:
        """Return the table; no steps can follow."""
        n_args = [len(s.args) for s in self.steps]
        args = np.empty(max(1, sum(n_args)), np.int64)
        words = np.empty((max(1, len(self.steps)), STEP_WORDS), np.int64)
        packed = bytearray()
        start, base = 0, int(args.ctypes.data)
        for i, (step, n) in enumerate(zip(self.steps, n_args, strict=True)):
            packed += struct.pack(_format(step.args), *step.args)
            words[i] = (step.kernel, base + 8 * start, step.n_chunks)
            start += n
        if packed:
            args[:] = np.frombuffer(packed, np.int64)
        return Table(int(words.ctypes.data), self.errors, words, args)


def _format(args: Sequence[int | float]) -> str:
    return "=" + "".join("d" if isinstance(a, float) else "q" for a in args)
