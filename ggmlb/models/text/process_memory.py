"""ProcessMemory: an estimate of the memory of a process besides a model's buffers, from measured sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ggmlb.models.text.planner import Fit, Planner

PER_WORD = 160
"""Bytes of a token of the vocabulary: its text, its number, and its table entries."""

N_SEQUENCES = 16
"""Sequences whose logits are read at once."""

N_GRAPHS = 5
"""Graphs of different sizes for a prompt and the steps after it."""

PER_NODE = 5 << 10
"""Bytes of a node, its tensors, and its step in a plan."""

PER_KERNEL = 6 << 10
"""Further bytes of a node on a device with separate memory."""

PER_THREAD = 24 << 20
"""Scratch memory of a thread of the CPU device: tiles of weights and scores in float32."""


class ProcessMemory(NamedTuple):
    """Host memory of a process besides a model's buffers [bytes]; compiling kernels takes more.

    Attributes:
        vocabulary: The vocabulary, with its tables.
        logits: Logits of the sequences of a batch.
        graphs: Graphs and their plans.
        scratch: Scratch memory of the CPU device.
    """

    vocabulary: int
    logits: int
    graphs: int
    scratch: int


def process_memory(planner: Planner, fit: Fit, n_threads: int) -> ProcessMemory:
    """Estimate a process's host memory besides the buffers of the placement `fit`, with `n_threads`."""
    config, costs = planner.config, planner.costs(fit.placement)
    graphs = scratch = 0
    for name, backend in planner.backends.items():
        cost = costs[name]
        has_kernels = any(not stream.default_buffer_type.is_host for stream in backend.streams)
        graphs += N_GRAPHS * cost.launches * (PER_NODE + (PER_KERNEL if has_kernels else 0))
        if (cost.read or cost.kv_read) and any(s.device.reg.name == "CPU" for s in backend.streams):
            scratch = PER_THREAD * n_threads
    return ProcessMemory(PER_WORD * config.n_vocab, 4 * N_SEQUENCES * config.n_vocab, graphs, scratch)
