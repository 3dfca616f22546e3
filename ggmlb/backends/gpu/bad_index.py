"""Out-of-range indices: kernels record a stream's first one in device memory, and the host raises the error.

A kernel that reads indices from a tensor (rows, experts) skips those out of range. It writes the first one
to its stream's record, with the number of its step, which it gets as the offset of the tensor `bad`.
`synchronize` reads the record (24 bytes) if a queued step reads indices.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np

from ggmlb.core.errors import BackendError

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import BadIndex
    from ggmlb.backends.gpu.stream import GpuBackend
    from ggmlb.interface import Buffer

N_WORDS: Final = 3
"""Words of the record (i64): whether there is a bad index (i32 and padding), the index, the step's number."""

MAX_DROPPED: Final = 4096
"""Number of dropped plans at which planning synchronizes the stream, to drop the names of their nodes."""


class BadIndices:
    """A stream's first out-of-range index, recorded on the device, and the node that each step computes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._record: Buffer | None = None
        self._numbers = itertools.count(1)
        self._nodes: dict[int, tuple[str, int]] = {}
        # Garbage collection may drop plans at any point, so their numbers are only queued for removal.
        self._dropped: deque[Sequence[int]] = deque()
        self._uses = itertools.count(1)
        self._last_use = self._last_checked = 0

    def bind(self, plan: object, steps: Sequence[BadIndex], stream: GpuBackend) -> list[tuple[Buffer, int]]:
        """Number a plan's steps that read indices (rows, experts); return each one's record and number.

        Raises:
            BackendError: As `finish`, if there are many dropped plans.
        """
        if not steps:
            return []
        if len(self._dropped) >= MAX_DROPPED:
            self.finish(stream)
        record = self._record
        if record is None:
            self._record = record = stream.new_record(8 * N_WORDS)
        numbers = [next(self._numbers) for _ in steps]
        self._nodes.update(zip(numbers, [(step.node.describe(), step.n) for step in steps], strict=True))
        weakref.finalize(plan, self._dropped.append, numbers).atexit = False
        return [(record, number) for number in numbers]

    def note_use(self) -> None:
        """Note that steps that read indices were queued, so that `finish` must check the record."""
        self._last_use = next(self._uses)

    def finish(self, stream: GpuBackend) -> None:
        """Wait for all work queued on the stream; raise if its record has an out-of-range index.

        Raises:
            BackendError: An index was out of range; names the node.
        """
        if self._record is None or (self._last_use == self._last_checked and not self._dropped):
            stream.finish()
            return
        with self._lock:
            last_use, n_dropped = self._last_use, len(self._dropped)
            words = np.zeros(N_WORDS, np.int64)
            if last_use == self._last_checked:
                stream.finish()
            else:
                stream.finish_and_read(self._record, words)
            self._last_checked = last_use
            is_bad, index, number = words.tolist()
            node, n = self._nodes[number] if is_bad else ("", 0)
            for _ in range(n_dropped):
                for gone in self._dropped.popleft():
                    del self._nodes[gone]
            if is_bad:
                self._record._clear(0)
        if is_bad:
            raise BackendError(
                f"{stream.name} failed to compute {node}: row number {index} for a tensor of {n} rows; "
                f"indices must be from 0 to {n - 1}"
            )
