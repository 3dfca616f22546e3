"""ProcessMemory: what a process takes besides a model's buffers, estimated from measured sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ggmlb.models.text.planner import Fit, Planner

PER_WORD = 160
"""Bytes of a word of the vocabulary: its text, its number, and its place in tables."""

N_SEQUENCES = 16
"""Sequences whose logits are read together."""

N_GRAPHS = 5
"""Size classes of graphs that a prompt and some sequences after it need."""

PER_NODE = 5 << 10
"""Bytes of a node, its tensors, and its step in a plan."""

PER_KERNEL = 6 << 10
"""Further bytes of a node on a device with kernels of its own."""

PER_THREAD = 24 << 20
"""Scratch memory of a thread of the CPU device: tiles of weights and of scores, as float32."""


class ProcessMemory(NamedTuple):
    """Bytes besides the buffers of a model; kernels that are compiled for the first time take more.

    Attributes:
        vocabulary: Words, and what finds them.
        logits: Of the sequences computed together, as arrays.
        graphs: Graphs and their plans.
        scratch: Of processors that compute with blocks of weights as float32.
    """

    vocabulary: int
    logits: int
    graphs: int
    scratch: int


def process_memory(planner: Planner, fit: Fit, n_threads: int) -> ProcessMemory:
    """Return an estimate of what a process with so many threads takes besides a placement's buffers."""
    config, costs = planner.config, planner.costs(fit.placement)
    graphs = scratch = 0
    for name, backend in planner.backends.items():
        cost = costs[name]
        has_kernels = any(not stream.default_buffer_type.is_host for stream in backend.streams)
        graphs += N_GRAPHS * cost.launches * (PER_NODE + (PER_KERNEL if has_kernels else 0))
        if (cost.read or cost.kv_read) and any(s.device.reg.name == "CPU" for s in backend.streams):
            scratch = PER_THREAD * n_threads
    return ProcessMemory(PER_WORD * config.n_vocab, 4 * N_SEQUENCES * config.n_vocab, graphs, scratch)
