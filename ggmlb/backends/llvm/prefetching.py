"""Prefetching of weights: hint and distance are measured on the machine, by type and layout, once.

Which are best depends on the processor's caches and prefetchers and on a kernel's pace: on a Zen 4, hint 2
reads plain weights up to twice as fast as hint 3, and strips of simple codes are read best without any. The
choices are kept beside the compiled code. GGMLB_PREFETCH fixes one for all, as `2,4096`: LLVM's hint (0 to 3)
and the distance [bytes]; without distance the line in use is prefetched, which costs and does nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Final, NamedTuple

import numpy as np

from ggmlb.backends.llvm.codegen.host import cache_nbytes
from ggmlb.backends.llvm.codegen.library import Library, function
from ggmlb.backends.llvm.kernels import activations, interleaved, interleaved_products, matvec
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ArgumentError
from ggmlb.interface.host import aligned_empty
from ggmlb.system import disk_cache, env

DISTANCES: Final = (0, 1024, 4096, 12288)
HINTS: Final = (2, 3)
"""Distances [bytes] and hints that are measured: on the processors seen, hint 1 is as 2, and 0 as 3."""

MACHINE: Final = ("q8_0", False)
"""Type and layout by which the hint is chosen, as it hardly depends on them; its kernel compiles fast."""

LEAST_NBYTES, MOST_NBYTES = 1 << 26, 1 << 28
"""Limits of the size of the measured weight, twice the last-level cache if that is known [bytes]."""

N_ELEMENTS, N_ROUNDS = 2048, 3

_lock = Lock()


class Ahead(NamedTuple):
    """How to prefetch a weight.

    Attributes:
        hint: LLVM's locality: 3 for all caches, 2 for all but the first.
        nbytes: Distance [bytes].
    """

    hint: int
    nbytes: int


@cache
def ahead(library: Library, dtype: str, is_interleaved: bool) -> Ahead:
    """Return how to prefetch weights of a type and layout: as fixed, as kept on disk, or as measured now.

    Raises:
        ArgumentError: GGMLB_PREFETCH is not a hint and a distance.
    """
    if (fixed := env.text("GGMLB_PREFETCH")) is not None:
        return _parsed(fixed)
    key = f"{dtype} {'strips' if is_interleaved else 'rows'}"
    hints = HINTS if (dtype, is_interleaved) == MACHINE else (ahead(library, *MACHINE).hint,)
    with _lock:  # threads would disturb each other's measurements
        known = choices(library)
        if key not in known:
            known[key] = _measured(library, dtype, is_interleaved, hints)
            disk_cache.save(library.path("prefetching", "json"), json.dumps(known).encode())
        return known[key]


@cache
def choices(library: Library) -> dict[str, Ahead]:
    """The choices kept for a library's instruction set, by type and layout, as `q8_0 rows`."""
    kept = disk_cache.load(library.path("prefetching", "json"))
    return {} if kept is None else {key: Ahead(*choice) for key, choice in json.loads(kept).items()}


def _parsed(text: str) -> Ahead:
    hint, _, nbytes = text.partition(",")
    if hint in ("0", "1", "2", "3") and nbytes.isdecimal() and len(nbytes) < 10:
        return Ahead(int(hint), int(nbytes))
    raise ArgumentError(
        f"GGMLB_PREFETCH={text!r} is not a hint (0 to 3) and a distance in bytes: set it as 2,4096, or unset "
        f"it, and both are measured"
    )


def _measured(library: Library, dtype: str, is_interleaved: bool, hints: tuple[int, ...]) -> Ahead:
    """Return the choice by which a product with one row of activations is fastest, with a cold weight."""
    row_nbytes = DType.parse(dtype).row_size(N_ELEMENTS)
    m = _weight_nbytes() // row_nbytes // interleaved.ROWS * interleaved.ROWS
    weight, x, y = aligned_empty(m * row_nbytes), aligned_empty(16 * N_ELEMENTS), aligned_empty(4 * m)
    for memory, value in ((weight, 1), (x, 0)):
        memory[:] = value
    b_dtype, rows = (activations.QUANTIZED, 8) if DType.parse(dtype).is_quantized else ("f32", 4)

    def call(choice: Ahead) -> Callable[[], None]:
        params = (dtype, *(() if is_interleaved else (rows,)), 1, b_dtype, choice.hint)
        kernel = interleaved_products.few if is_interleaved else matvec.few
        run = function(library.address(kernel, params), 4)
        nb = (row_nbytes, m * row_nbytes, m * row_nbytes)
        args = np.array(
            (weight.ctypes.data, *nb, x.ctypes.data, 0, 0, 0, y.ctypes.data, 0, 0, 0,
             N_ELEMENTS, m, 1, 1, 1, 1, 1, 1, choice.nbytes), np.int64,
        )  # fmt: skip
        return lambda: run(args.ctypes.data, 0, 1, 0)

    calls = {choice: call(choice) for hint in hints for choice in [Ahead(hint, n) for n in DISTANCES]}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(N_ROUNDS):
        for choice, run in calls.items():
            start = time.thread_time()
            run()
            best[choice] = min(best[choice], time.thread_time() - start)
    return min(best, key=best.__getitem__)


def _weight_nbytes() -> int:
    """The size of a weight that does not stay in the caches [bytes]."""
    return min(max(2 * cache_nbytes(3), LEAST_NBYTES), MOST_NBYTES)
