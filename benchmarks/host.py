"""What CUDA's host side costs for each token and part of a prompt, on a driver that only counts calls.

No card is needed: the driver allocates memory of the host, and compiles and computes nothing. What is left is
the time of Python and of what it calls: the thread's processor time, without CUDA's own. The model has 32
layers and 128,256 tokens; its other sizes do not matter to the host. A prompt of 8,192 tokens is computed in
chunks of 512: first in a process that has not seen their sizes, then three times again. CUDA graphs are
captured when steps are queued for the second time.

    python benchmarks/host.py [--layers 32] [--profile token|prompt|again] [--save]
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import random_model
from report import Table, save

import ggmlb.backends.cuda
from ggmlb.backends.cuda.driver import Call, CopyKind, Facts, address_of
from ggmlb.backends.gpu import Launch
from ggmlb.interface.data import Bytes
from ggmlb.models import TextModel
from ggmlb.models.text.decoder import N_BATCH, Token
from ggmlb.models.text.sampling import Options, Sampler

ALIGNMENT = 256
N_PROMPT = 8192


class Failure(Exception):
    """What the driver never raises."""


class CountingDriver:
    """As `CupyDriver`, of a card of 24 GiB, but that it only counts the calls.

    Attributes:
        counts: The calls by name; copies with their sizes.
    """

    errors = (Failure,)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._ids = itertools.count(1)
        self._memory: dict[int, Bytes] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in COUNTED:
            self.counts[name] += 1
        return found

    def device_count(self) -> int:
        return 1

    def facts(self, device: int) -> Facts:
        return Facts("Counting", "0000:01:00.0", 89, 128, 100 << 10, 24 << 30, False)

    def on(self, device: int) -> AbstractContextManager[None]:
        return nullcontext()

    def memory_info(self, device: int) -> tuple[int, int]:
        return (24 << 30) - sum(array.size for array in self._memory.values()), 24 << 30

    def is_out_of_memory(self, error: Exception) -> bool:
        return False

    def malloc(self, nbytes: int) -> int:
        array = self.pinned(nbytes)
        self._memory[address_of(array)] = array
        return address_of(array)

    def free(self, address: int) -> None:
        del self._memory[address]

    def trim(self) -> None: ...

    def device_of(self, address: int) -> int:
        return 0

    def pinned(self, nbytes: int) -> Bytes:
        whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = -address_of(whole) % ALIGNMENT
        return whole[start : start + nbytes]

    def is_pinned(self, array: Bytes) -> bool:
        return True

    def new(self, *_: Any) -> int:
        return next(self._ids)

    stream_new = event_new = capture_end = exec_new = new

    def nothing(self, *_: Any) -> bool:
        return True

    stream_free = stream_synchronize = stream_done = stream_wait = nothing
    event_free = event_record = event_done = event_synchronize = nothing
    copy_2d = copy_peer = fill = capture_begin = graph_free = exec_update = exec_launch = exec_free = nothing

    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        self.counts[f"copy {kind.name} of {nbytes:,} bytes"] += 1

    def prepare(self, launches: Any, device: int) -> None: ...

    def bind(self, launch: Launch, block: bytes, device: int) -> Call:
        def call(stream: int, counts: Counter[str] = self.counts) -> None:
            counts["launch"] += 1

        return call

    def blas(self) -> Any:
        return Library()

    def collective(self, devices: Any) -> None:
        return None


COUNTED = frozenset({
    "on", "stream_synchronize", "stream_done", "stream_wait", "event_new", "event_record", "event_done",
    "event_synchronize", "copy_2d", "is_pinned", "fill", "malloc", "pinned", "capture_begin", "capture_end",
    "exec_new", "exec_update", "exec_launch",
})  # fmt: skip


class Library:
    """cuBLAS, whose functions succeed and do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def thread_ms(run: Callable[[], Any]) -> float:
    """Return a call's processor time in this thread [ms]."""
    start = thread_time()
    run()
    return (thread_time() - start) * 1e3


def profiled(run: Callable[[], Any]) -> None:
    """Print where a call's time goes."""
    profile = cProfile.Profile()
    profile.runcall(run)
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", choices=("token", "prompt", "again"))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    driver = CountingDriver()
    ggmlb.backends.cuda.load_driver = lambda: driver
    random_model.N_VOCAB = 128_256
    random_model.SHAPES["host"] = random_model.Shape(options.layers, 512, 1024, 8, 2)
    with tempfile.TemporaryDirectory() as home:
        path = random_model.random_model("q4_K_M", "host", Path(home))
        model = TextModel(str(path), devices=["CUDA0", "CPU"], n_ctx=N_PROMPT + 512)
        with model:
            tables = measure(model, driver, options.profile)
    if options.save:
        save("host", __doc__, *tables)


def measure(model: TextModel, driver: CountingDriver, profile: str | None) -> tuple[Table, ...]:
    """Return the tables of a model's host times."""
    engine = model._engine
    decoder = engine.decoder

    def prompt(sequence: int) -> list[float]:
        tokens = [Token(300 + i % 1000, sequence, i, i == N_PROMPT - 1) for i in range(N_PROMPT)]
        parts = [tokens[i : i + N_BATCH] for i in range(0, N_PROMPT, N_BATCH)]
        return [thread_ms(lambda part=part: decoder.likeliest(part, 0)) for part in parts]

    def one(sequence: int, position: int) -> None:
        decoder.likeliest([Token(300 + position % 1000, sequence, position, True)], 0)

    chunks = Table("chunks of 512", "mean [ms]", "least [ms]", "most [ms]", "launches and captures", "waits")
    for name in ("first", "again", "again, captured", "again, replayed"):
        sequence = engine.new_sequence()
        driver.counts.clear()
        if (profile, name) in (("prompt", "first"), ("again", "again, replayed")):
            profiled(partial(prompt, sequence))
        else:
            times = prompt(sequence)
            n_queued = driver.counts["launch"] + driver.counts["exec_launch"]
            figures = [f"{f(times):.2f}" for f in (statistics.mean, min, max)]
            chunks.row(name, *figures, n_queued, driver.counts["event_synchronize"])
        last = sequence if name == "again, replayed" else model._engine.memory.remove(sequence)
    results = decoder._runs._results
    assert results is not None
    results.base.view(np.float32)[:] = np.random.default_rng(1).standard_normal(results.size // 4) * 3
    sampler = Sampler(Options())

    def sampled(sequence: int, position: int, k: int) -> None:
        (row,) = decoder.likeliest([Token(300 + position % 1000, sequence, position, True)], k)
        sampler(row, [])

    tokens = Table("token", "median [us]", "least [us]", "driver calls")
    for name, run in (
        ("logits", one),
        ("logits, sampled by default", partial(sampled, k=0)),
        ("candidates, sampled by default", partial(sampled, k=sampler.n_best)),
    ):
        for i in range(N_PROMPT, N_PROMPT + 8):
            run(last, i)
        driver.counts.clear()
        run(last, N_PROMPT + 8)
        calls = ", ".join(f"{n} {call}" for call, n in sorted(driver.counts.items()))
        if (profile, name) == ("token", "logits"):
            profiled(lambda: [one(last, i) for i in range(N_PROMPT + 9, N_PROMPT + 209)])
        times = [thread_ms(lambda i=i, run=run: run(last, i)) for i in range(N_PROMPT + 210, N_PROMPT + 500)]
        tokens.row(name, round(1e3 * statistics.median(times)), round(1e3 * min(times)), calls)
        model._engine.memory.remove(last, N_PROMPT)
    return tokens, chunks


if __name__ == "__main__":
    main()
