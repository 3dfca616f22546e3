"""The table of lowering rules, and `LoweringContext`, with which a rule emits the steps of a node.

A rule is a function `(node, ctx)`, or `(group, ctx)` for a fusion pattern, that launches kernels on the
context. Operands have no addresses yet: `ctx.address(tensor)` returns a *symbol*, an integer made of bit 62,
the number of an operand slot, and an offset, to which rules may add as to an address. So one lowering serves
all nodes of a kind; a plan (`llvm.plan`) replaces symbols by addresses. The lowest six bits of an operand's
symbol are those of its address, for alignment checks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.fusion import Item
from ggmlb.backends.common.rules import FLOATS, Rules
from ggmlb.backends.common.strided import Mem, merged
from ggmlb.backends.llvm.codegen.host import cached_nbytes
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.backends.llvm.kernels.driver import STEP_WORDS
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.system.progress import Task

if TYPE_CHECKING:
    from ggmlb.backends.llvm.backend import LlvmBackend
    from ggmlb.backends.llvm.kernels.activations import ActivationLayout

    Ints = npt.NDArray[np.int64]

# -- rules -----------------------------------------------------------------------------------------

RULES: Final[Rules[Callable[[Any, LoweringContext], None]]] = Rules()
"""Conditions and lowering of each op and fusion pattern."""


def lower(item: Item, ctx: LoweringContext) -> None:
    """Emit the steps (kernel launches) of a node or fused group; `RULES` must have a rule that accepts it."""
    RULES.to_lower(item)(item, ctx)


READ: Final = FLOATS | {d for d in DType if d.name.lower() in FORMATS}
"""Types of weights: floats and quantised blocks."""


def name(tensor: Tensor | Mem) -> str:
    """Name of the element type, as a parameter of kernels."""
    return tensor.dtype.name.lower()


# -- steps -----------------------------------------------------------------------------------------

LEAST_WORK = 6000
"""Least time of a step that is shared among threads [ns]; sharing costs about a sixth of this."""

CHUNK_WORK = 3000
"""Least time of a chunk [ns]."""

CHUNKS_PER_THREAD = 8
"""Chunks per thread of a long step: a thread that starts late computes fewer of them."""

SCRATCH, ACTIVATIONS, ERRORS, NUMBER, OPERANDS = range(5)
"""Slots: scratch memory, quantised activations, the error record, number of the item's first step, and the
first operand."""

_SYMBOL, _SLOT_BITS = 1 << 62, 48
_OFFSET = (1 << _SLOT_BITS) - 1


def symbol(slot: int, offset: int = 0) -> int:
    """Return the symbol (a relocatable address) of an offset in the memory of operand slot `slot`."""
    return _SYMBOL | slot << _SLOT_BITS | offset


@dataclass(frozen=True, slots=True)
class LoweredSteps:
    """The steps (kernel launches) of a node or fused group, shared by all of its kind.

    Attributes:
        n_steps: Number of steps.
        words: For each step the kernel's address, the offset of its arguments in `args` [bytes], and its
            number of chunks.
        args: The arguments of all steps; where they are symbols, offsets in slots.
        places: Indices of symbols in `args`.
        slots: Slots of these symbols.
        n_scratch: Size of scratch memory [bytes].
        n_activations: Size of the memory for quantised activations [bytes].
        quantized: Slot and layout of the operand that is in that memory afterwards; `None`: unchanged.
        shares: Whether any step has several chunks.
        kept: Arrays that the steps read, kept alive.
    """

    n_steps: int
    words: Ints
    args: Ints
    places: Ints
    slots: Ints
    n_scratch: int
    n_activations: int
    quantized: tuple[int, ActivationLayout] | None
    shares: bool
    kept: list[Any]


_NONE: Final[Ints] = np.zeros(0, np.int64)

NOTHING: Final = LoweredSteps(
    0, np.zeros((0, STEP_WORDS), np.int64), _NONE, _NONE, _NONE, 0, 0, None, False, []
)
"""The steps of an item that has nothing to compute."""


class LoweringContext:
    """Collects the steps (kernel launches) of a node or fused group (the item).

    Args:
        backend: The stream.
        task: Progress task, notified when a kernel is compiled.
        symbols: Symbols of the tensors that the item reads and writes.
        quantized: Slot and layout of the operand whose quantised values are cached already; or `None`.

    Attributes:
        library: The kernels.
        level: Their instruction set.
        n_threads: Number of threads of the stream.
    """

    def __init__(
        self,
        backend: LlvmBackend,
        task: Task,
        symbols: Mapping[Tensor, int],
        quantized: tuple[int, ActivationLayout] | None,
    ) -> None:
        self.library = backend.library
        self.level = backend.library.target.level
        self.n_threads = backend.pool.n
        self._task = task
        self._symbols = symbols
        self._steps: list[tuple[int, Sequence[int | float], int]] = []
        self._kept: list[Any] = []
        self._n_scratch = self._n_activations = 0
        self._in_memory = quantized
        self._quantized: tuple[int, ActivationLayout] | None = None

    @property
    def report(self) -> tuple[int, int]:
        """Two arguments for kernels that check row indices: address of the error record, and step number."""
        return symbol(ERRORS), symbol(NUMBER, len(self._steps) + 1)

    def address(self, operand: Tensor | Mem) -> int:
        """Return the address (a symbol) of an operand's first element."""
        return operand.offset if isinstance(operand, Mem) else self._symbols[operand]

    def mem(self, operand: Tensor) -> Mem:
        """Return an operand as a `Mem` (address, type, extents, strides), to take strided windows of it."""
        return Mem(None, self.address(operand), operand.dtype, operand.ne, operand.nb)

    def scratch(self, nbytes: int) -> int:
        """Reserve scratch memory for the item's steps; return its address (a symbol)."""
        start = self._n_scratch
        self._n_scratch += -(-nbytes // 64) * 64
        return symbol(SCRATCH, start)

    def constant(self, array: npt.NDArray[Any]) -> int:
        """Return the address of a constant array, kept alive with the steps."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def activations(self, tensor: Tensor, nbytes: int, layout: ActivationLayout) -> tuple[int, bool]:
        """Return the address (a symbol) of a tensor's quantised values, and whether they exist already."""
        key = (self._symbols[tensor] & ~_OFFSET & ~_SYMBOL) >> _SLOT_BITS, layout
        are_there = self._in_memory == key
        if not are_there:
            self._in_memory = self._quantized = key
            self._n_activations = max(self._n_activations, nbytes)
        return symbol(ACTIVATIONS), are_there

    def chunks(self, work: float, most: int | None = None) -> int:
        """Return the number of chunks, at most `most`, for a step of estimated time `work` [ns]."""
        if work < LEAST_WORK:
            return 1
        n = max(2, min(int(work // CHUNK_WORK), CHUNKS_PER_THREAD * self.n_threads))
        if n > self.n_threads:  # the same number for each thread
            n = -(-n // self.n_threads) * self.n_threads
        return n if most is None else max(1, min(n, most))

    def launch(
        self,
        kernel: Callable[..., None],
        params: Sequence[Any],
        args: Sequence[int | float],
        n_chunks: int = 1,
    ) -> None:
        """Append a step: a kernel with compile-time `params`, arguments and number of chunks.

        Args:
            kernel: The function that emits its code.
            params: Compile-time parameters.
            args: Kernel arguments, in the order in which it reads them.
            n_chunks: Number of chunks, from `chunks`.
        """
        self._steps.append((self.library.address(kernel, tuple(params), self._task), args, n_chunks))

    def launch_rows(
        self,
        kernel: Callable[..., None],
        params: Sequence[Any],
        args: Sequence[int | float],
        ne: Ne,
        operands: Sequence[Tensor | Mem],
        work: float,
        *,
        join: bool = False,
        cut: bool = False,
    ) -> None:
        """Append a step that loops over rows; `join`: merge contiguous ones; `cut`: threads may share one.

        Args:
            kernel: The function that emits its code, with a loop of `kernels.row_loop`.
            params: Compile-time parameters.
            args: Kernel arguments before those of the loop.
            ne: Extents of the loop.
            operands: Operands in the kernel's order; extents of 1 are broadcast.
            work: Estimated time of an element [ns].
            join: Whether rows that are contiguous in all operands may be merged.
            cut: Whether threads may share a row.
        """
        extents: Sequence[int] = ne
        strides: list[Sequence[int]] = [_strides(o, ne) for o in operands]
        if join:
            merged_ne, merged_nbs = merged(extents, strides, keep_first=True)
            rest = 4 - len(merged_ne)
            extents, strides = [*merged_ne, *[1] * rest], [[*nb, *[0] * rest] for nb in merged_nbs]
        n_rows = extents[1] * extents[2] * extents[3]
        n = self.chunks(extents[0] * n_rows * work)
        groups = min(n, n_rows)
        parts = 1
        if cut and groups < n:
            parts = max(1, min(-(-n // groups), extents[0] // LEAST_PART))
        loop = [*extents, parts]
        for o, nb in zip(operands, strides, strict=True):
            loop += (self.address(o), *nb[1:])
        self.launch(kernel, params, (*args, *loop), groups * parts)

    def lowered(self) -> LoweredSteps:
        """Return the collected steps."""
        steps = self._steps
        words = np.zeros((len(steps), STEP_WORDS), np.int64)
        start = 0
        for i, (kernel, of_step, n_chunks) in enumerate(steps):
            words[i] = kernel, 8 * start, n_chunks
            start += len(of_step)
        args = list(chain.from_iterable([of_step for _, of_step, _ in steps]))
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
            quantized=self._quantized,
            shares=any(n_chunks > 1 for *_, n_chunks in steps),
            kept=self._kept,
        )


# -- loops over rows -------------------------------------------------------------------------------

VECTOR_NBYTES = 64
"""Size of the widest vector [bytes]."""

LEAST_PART = 2048
"""Least number of elements of a part of a row."""


def _strides(operand: Tensor | Mem, ne: Ne) -> Sequence[int]:
    """Return an operand's byte strides in a loop; 0 where it is broadcast."""
    nb = operand.nb
    if operand.ne[0] == 1:  # this stride is never used, except to merge contiguous rows of one element
        nb = (operand.dtype.type_size, *nb[1:])
    if operand.ne == ne:
        return nb
    first = nb[0] if ne[0] == 1 else 0  # 0: broadcast rows are not merged into one longer than the memory
    return [first if operand.ne[0] == 1 else nb[0]] + [
        0 if n == 1 else b for n, b in zip(operand.ne[1:], nb[1:], strict=True)
    ]


def past_caches(operands: Sequence[Tensor | Mem], ctx: LoweringContext) -> bool:
    """Whether to write the first operand by non-temporal stores, as all operands exceed the caches."""
    nbytes = sum(prod(t.ne) * t.dtype.type_size for t in operands)
    if nbytes <= ctx.n_threads * cached_nbytes():
        return False
    return not any(n % VECTOR_NBYTES for n in (ctx.address(operands[0]), *operands[0].nb[1:]))
