"""What a GPU must answer first of speed: the host's time per token, decoding, prompts; with verdicts.

The models are random (`random_model`). `host` counts processor time of the thread that generates, less what
it spends in CUDA's waits, in which it spins. Decoding is compared with the bytes that a token needs at the
rate of a copy on the device, a prompt with its multiplications at the rate of a large f16 product, and both
with ggml on the same card, if its library is given (`GGMLB_GGML_PATH`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

from generate import prompt_of, token_nbytes
from gpu_measure import Bench
from random_model import random_model

from ggmlb import device_by_name, open_gguf
from ggmlb.core.errors import Error
from ggmlb.models import TextModel

HOST_GOAL_S = 0.12e-3
"""Processor time per token of a model of 32 layers, beside which no card of today is faster [s]."""
N_PROMPT, N_TOKENS, DEPTH = 512, 128, 32
GOOD, FAIR = 0.8, 0.5
"""Shares of a limit."""

NO_CALLS = {"errors", "on", "is_out_of_memory"}
"""Names of a driver that are no calls, or not counted."""


@dataclass
class Calls:
    """Calls of CUDA: how many of each, and the processor time of waits [s]."""

    counts: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes a call and makes it."""
        is_wait = name.endswith("synchronize")

        def noted(*args: Any, **options: Any) -> Any:
            self.counts[name] += 1
            start = thread_time()
            try:
                return call(*args, **options)
            finally:
                self.waited_s += is_wait * (thread_time() - start)

        return noted


@contextmanager
def noted_calls(driver: Any) -> Iterator[Calls]:
    """Note the calls of a driver of CUDA."""
    from ggmlb.backends.cuda.cupy_driver import CupyDriver

    calls, names = Calls(), {name for name in vars(CupyDriver) if not name.startswith("_")} - NO_CALLS
    for name in names:
        setattr(driver, name, calls.of(name, getattr(driver, name)))
    try:
        yield calls
    finally:
        for name in names:
            delattr(driver, name)


class HostTime(NamedTuple):
    """What a token takes of the host."""

    seconds: float
    n_calls: float
    n_waits: float
    n_launches: float


def host_time(bench: Bench) -> HostTime:
    """Measure the host's part of decoding; the device must be one of CUDA's."""
    n = bench.size(256, 4)
    path = random_model("q4_K_M", "2 layers" if bench.smoke else "32 layers")
    with TextModel(path, [bench.device.name, "CPU"], n_ctx=1024) as model:

        def generate(n_tokens: int) -> tuple[float, Calls]:
            with noted_calls(bench.device.driver) as calls:  # type: ignore[attr-defined]
                start = thread_time()
                model.generate(prompt_of(8), max_tokens=n_tokens, temperature=0, ignore_eos=True)
                return thread_time() - start - calls.waited_s, calls

        for _ in range(2):
            generate(n + 1)  # compiles, captures
        once_s, once = generate(1)
        all_s, calls = generate(n + 1)
    counts = calls.counts - once.counts
    waits = sum(count for name, count in counts.items() if name.endswith("synchronize"))
    return HostTime((all_s - once_s) / n, counts.total() / n, waits / n, counts["exec_launch"] / n)


def verdict_on_host(found: HostTime) -> str:
    """Say what the host's time means."""
    is_good = found.seconds <= HOST_GOAL_S
    return (
        f"Host: {found.seconds * 1e3:.3f} ms of processor time a token ({found.n_calls:.1f} calls of CUDA, "
        f"of them {found.n_launches:.1f} graph launches and {found.n_waits:.1f} waits), "
        + ("within" if is_good else "beyond")
        + f" the goal of {HOST_GOAL_S * 1e3:.2f} ms: no model of 32 layers is faster than "
        f"{1 / found.seconds:,.0f} tokens per second for one sequence."
    )


class Speed(NamedTuple):
    """Tokens per second of a prompt, and of what follows it."""

    prompt: float
    decode: float


def speed(bench: Bench, name: str, path: Path) -> Speed:
    """Return the median speed of a model on a device."""
    n_prompt, n_tokens = bench.size(N_PROMPT, 40), bench.size(N_TOKENS, 4)
    prompts, decodes = list[float](), list[float]()
    with TextModel(path, [name, "CPU"] if name != "CPU" else ["CPU"], n_ctx=1024) as model:
        for i in range(1 if bench.smoke else 5):
            asked: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
            prompt = model.generate(prompt_of(n_prompt), max_tokens=1, **asked)
            after = model.generate(prompt_of(DEPTH), max_tokens=n_tokens, **asked)
            if bench.smoke or i > 1:  # the first runs compile and capture
                prompts.append(prompt.prompt_tokens_per_second)
                decodes.append(after.tokens_per_second)
    return Speed(statistics.median(prompts), statistics.median(decodes))


class Speeds(NamedTuple):
    """A model's speed, its limits on the device, and a peer's speed, or why there is none."""

    ours: Speed
    limits: Speed
    peer: Speed | str


def speeds(bench: Bench, beside: str, bandwidth: float, flops: float) -> Speeds:
    """Measure decoding and prompts.

    Args:
        bench: The device.
        beside: Name of the device to compare with.
        bandwidth: Bytes per second that the device copies.
        flops: Operations per second of its fastest large product.
    """
    path = random_model("q4_K_M", "2 layers" if bench.smoke else "8B")
    try:
        file = open_gguf(path)
        work = 2.0 * sum(math.prod(file[name].ne) for name in file if name.startswith("blk."))
        limits = Speed(flops / work, bandwidth / token_nbytes(str(path), DEPTH + N_TOKENS // 2))
        ours = speed(bench, bench.device.name, path)
        try:
            device_by_name(beside)
            peer: Speed | str = speed(bench, beside, path)
        except Error as error:
            peer = str(error).splitlines()[0]
    finally:
        if not bench.smoke:
            path.unlink()  # some 5 GB
    return Speeds(ours, limits, peer)


def verdicts_on(found: Speeds, beside: str, host_s: float) -> list[str]:
    """Say what the speeds mean; `beside`: the peer's device; `host_s`: the host's time per token, or 0."""
    said = []
    for what, ours, limit, where in (
        ("Decoding", found.ours.decode, found.limits.decode, "the memory's bandwidth"),
        ("A prompt", found.ours.prompt, found.limits.prompt, "the tensor cores' rate"),
    ):
        share = ours / limit
        text = f"{what}: {ours:,.0f} tokens per second, {share:.0%} of what {where} allows: "
        if share >= GOOD:
            text += "that is the limit."
        elif what == "Decoding" and host_s * ours > 1 - FAIR:
            text += f"the host takes {min(host_s * ours, 1):.0%} of the time; see Host."
        elif share >= FAIR:
            text += "kernels, or gaps between them, take the rest; see sections ops, attention and decode."
        else:
            text += "far from it; see sections ops, attention and decode, and trace it (`Scheduler.trace`)."
        said.append(text)
    if isinstance(found.peer, str):
        return [
            *said,
            f"Beside {beside}: not compared, {found.peer}; GGMLB_GGML_PATH is the folder of ggml's library.",
        ]
    ratios = found.ours.decode / found.peer.decode, found.ours.prompt / found.peer.prompt
    is_ahead = min(ratios) >= 1
    said.append(
        f"Beside {beside}: {ratios[0]:.2f} times its tokens per second in decoding, "
        f"{ratios[1]:.2f} times in prompts: " + ("ahead in both." if is_ahead else "behind; begin there.")
    )
    return said
