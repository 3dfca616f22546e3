"""Steps emitted by rules, with symbols in place of addresses: one lowering serves all nodes of a kind.

A symbol is an integer with bit 62 set, the number of a slot, and an offset: rules may add to it as to an
address. `llvm.table` fills slots in. The lowest six bits of an operand's symbol are those of its address, so
that rules may ask how it is aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm.kernels.driver import STEP_WORDS
from ggmlb.core.tensor import Tensor
from ggmlb.system.progress import Task

if TYPE_CHECKING:
    from ggmlb.backends.llvm.backend import LlvmBackend
    from ggmlb.backends.llvm.kernels.activations import ActivationLayout

    Ints = npt.NDArray[np.int64]

LEAST_WORK = 6000
"""Least work of a step for several threads [ns]; that others take part in it costs about a sixth of this."""

CHUNK_WORK = 3000
"""The least work of a chunk [ns]."""

CHUNKS_PER_THREAD = 8
"""Chunks of a long step for each thread: one that starts late does fewer."""

SCRATCH, ACTIVATIONS, ERRORS, NUMBER, OPERANDS = range(5)
"""Slots: memory of the item's steps, of activations as bytes, of errors; the number of the item's first step;
and the first of the operands."""

_SYMBOL, _SLOT_BITS = 1 << 62, 48
_OFFSET = (1 << _SLOT_BITS) - 1


def symbol(slot: int, offset: int = 0) -> int:
    """Return what stands for an address in a slot."""
    return _SYMBOL | slot << _SLOT_BITS | offset


@dataclass(slots=True)
class KernelStep:
    """A kernel with its arguments; the work is done in chunks, perhaps by several threads."""

    kernel: int
    args: Sequence[int | float]
    n_chunks: int


@dataclass(frozen=True, slots=True)
class LoweredSteps:
    """The steps of an item, for all items of its kind.

    Attributes:
        n_steps: Number of steps.
        words: For each step the kernel, the place of its arguments from `args` on [bytes], and its chunks.
        args: The arguments of all steps; offsets in slots where they are symbols.
        places: Places of symbols in `args`.
        slots: Their slots.
        n_scratch: Bytes of scratch memory.
        n_activations: Bytes of memory for activations.
        made: Slot of the operand whose values then lie there as bytes, and how; `None`: as before.
        shares: Whether any step is for several threads.
        kept: What the steps point to.
    """

    n_steps: int
    words: Ints
    args: Ints
    places: Ints
    slots: Ints
    n_scratch: int
    n_activations: int
    made: tuple[int, ActivationLayout] | None
    shares: bool
    kept: list[Any]


_NONE: Final[Ints] = np.zeros(0, np.int64)

NOTHING: Final = LoweredSteps(
    0, np.zeros((0, STEP_WORDS), np.int64), _NONE, _NONE, _NONE, 0, 0, None, False, []
)
"""The steps of an item that has nothing to compute."""


class Steps:
    """The steps of a node or group, as rules emit them.

    Args:
        backend: The stream, whose threads share steps.
        task: Told when kernels are compiled.
        operands: The tensors that the item reads and writes, each with its symbol.
        made: Slot of the operand whose values lie in memory as bytes, and how; `None`: none does.

    Attributes:
        library: The kernels.
        n_threads: Threads that may share a step.
    """

    def __init__(
        self,
        backend: LlvmBackend,
        task: Task,
        operands: Mapping[Tensor, int],
        made: tuple[int, ActivationLayout] | None,
    ) -> None:
        self.library = backend.library
        self.n_threads = backend.pool.n
        self._task = task
        self._operands = operands
        self._steps: list[KernelStep] = []
        self._kept: list[Any] = []
        self._n_scratch = self._n_activations = 0
        self._there = made
        self._made: tuple[int, ActivationLayout] | None = None

    @property
    def report(self) -> tuple[int, int]:
        """Return the address where the next step's kernel reports bad data, and the step's number from 1."""
        return symbol(ERRORS), symbol(NUMBER, len(self._steps) + 1)

    def address(self, operand: Tensor | Mem) -> int:
        """Return where the first element is."""
        return operand.offset if isinstance(operand, Mem) else self._operands[operand]

    def mem(self, operand: Tensor) -> Mem:
        """Return the memory of an operand, of which windows may be made."""
        return Mem(None, self.address(operand), operand.dtype, operand.ne, operand.nb)

    def scratch(self, nbytes: int) -> int:
        """Return the address of scratch memory, valid for the steps of one item."""
        start = self._n_scratch
        self._n_scratch += -(-nbytes // 64) * 64
        return symbol(SCRATCH, start)

    def constant(self, array: npt.NDArray[Any]) -> int:
        """Return the address of an array, which is kept alive."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def activations(self, tensor: Tensor, nbytes: int, layout: ActivationLayout) -> tuple[int, bool]:
        """Return memory for a tensor's values as bytes, and whether they lie there so already."""
        key = (self._operands[tensor] & ~_OFFSET & ~_SYMBOL) >> _SLOT_BITS, layout
        there = self._there == key
        if not there:
            self._there = self._made = key
            self._n_activations = max(self._n_activations, nbytes)
        return symbol(ACTIVATIONS), there

    def chunks(self, work: float, most: int | None = None) -> int:
        """Return the number of chunks for some work [ns]; 1 for a single thread."""
        if work < LEAST_WORK:
            return 1
        n = max(2, min(int(work // CHUNK_WORK), CHUNKS_PER_THREAD * self.n_threads))
        if n > self.n_threads:  # as many for each
            n = -(-n // self.n_threads) * self.n_threads
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
        self._steps.append(
            KernelStep(self.library.address(kernel, tuple(params), self._task), args, n_chunks)
        )

    def lowered(self) -> LoweredSteps:
        """Return the steps; none can follow."""
        steps = self._steps
        words = np.zeros((len(steps), STEP_WORDS), np.int64)
        start = 0
        for i, step in enumerate(steps):
            words[i] = step.kernel, 8 * start, step.n_chunks
            start += len(step.args)
        args = list(chain.from_iterable(step.args for step in steps))
        symbols = {i: a for i, a in enumerate(args) if not isinstance(a, float) and a >= _SYMBOL}
        for i, found in symbols.items():
            args[i] = found & _OFFSET
        formats = "".join("d" if isinstance(a, float) else "q" for a in args)
        slots = [(found & ~_SYMBOL) >> _SLOT_BITS for found in symbols.values()]
        return LoweredSteps(
            n_steps=len(steps),
            words=words,
            args=np.frombuffer(struct.pack("=" + formats, *args), np.int64),
            places=np.array(list(symbols), np.int64),
            slots=np.array(slots, np.int64),
            n_scratch=self._n_scratch,
            n_activations=self._n_activations,
            made=self._made,
            shares=any(step.n_chunks > 1 for step in steps),
            kept=self._kept,
        )
