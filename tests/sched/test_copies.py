"""The scheduler never copies more often than ggml's does, in programs that ggml has counted.

Only what a node has written since is copied again, which ggml omits.

The table was recorded of ggml itself, with fake backends as these devices are (`ggml_copies.py` of the
tests' support); `tests/oracle/test_copies.py` holds it against the ggml that is installed.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage, Op
from ggmlb.core.graph import Graph
from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.fake import FakeReg
from tests.support.sequences import needless_copies
from tests.support.split_programs import N_ROWS, WIDTH, Recipe, build, recipe

TABLE = json.loads(Path(__file__).with_name("ggml_copies.json").read_text())
ROWS = [(kind, seed) for kind in ("programs", "writing") for seed in sorted(TABLE[kind], key=int)]


def as_drawn(device, drawn: Recipe, index: int) -> None:
    """Let a fake device answer what the recipe says."""
    device._declines = lambda t: "declined by the recipe" if t.op.value in drawn.declined[index] else None
    device.offload_op = lambda t: t.op is Op.MUL_MAT
    if index in drawn.reads_host:
        device.supports_buft = lambda buft: buft.is_host or buft is device.buffer_type


def split(drawn: Recipe, stack: ExitStack) -> Scheduler:
    """Build the program on fake devices and the CPU, and cut it."""
    reg = FakeReg(drawn.n_devices)
    for i, device in enumerate(reg.devices):
        as_drawn(device, drawn, i)
    streams = [stack.enter_context(reg.devices[d].init_backend()) for d in drawn.streams]
    backends = [*streams, stack.enter_context(init_by_name("CPU"))]
    weights = []
    for i, (on, as_weight) in enumerate(drawn.weights):
        own = Context()
        w = own.new_tensor(DType.F32, (WIDTH, WIDTH), name=f"w{i}")
        weights.append((w, own.new_tensor(DType.F32, (WIDTH,), name=f"v{i}")))
        buffer = stack.enter_context(alloc_ctx_tensors(own, backends[on]))
        buffer.usage = BufferUsage.WEIGHTS if as_weight else BufferUsage.ANY
    c = Context()
    inputs = [c.new_tensor(DType.F32, (WIDTH, N_ROWS)) for _ in range(drawn.n_inputs)]
    ids = c.new_tensor(DType.I32, (N_ROWS,))
    for tensor in (*inputs, ids):
        c.set_input(tensor)
    made, roots = build(drawn, c, weights, inputs, ids)
    for i, tensor in enumerate(made):
        c.set_name(tensor, f"n{i}")
    sched = stack.enter_context(Scheduler(backends, op_offload=drawn.op_offload))
    for i, request in drawn.requests:
        sched.set_tensor_backend(made[i], backends[request])
    sched.alloc_graph(Graph().build_forward_expand(*roots))
    return sched


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # requests that a device declines
@pytest.mark.parametrize(("kind", "seed"), ROWS)
def test_it_copies_no_more_often_than_ggml(kind: str, seed: str) -> None:
    digest, n_splits, n_copies, n_lost = TABLE[kind][seed]
    drawn = recipe(int(seed), writes=kind == "writing")
    assert drawn.digest == digest, "the programs have changed: record the table anew"
    with ExitStack() as stack:
        sched = split(drawn, stack)
        assert needless_copies(sched) == []
        # ggml reads a copy of what was written since; so each tensor counts once for each backend.
        copied = {f"{s.backend_id}#{i.tensor.name}" for s in sched.splits for i in s.inputs}
        if not n_lost:  # else ggml computes where the memory written is not, and saves copies by that
            assert len(copied) <= n_copies, f"{copied}\n{sched}"
            assert len(sched.splits) <= n_splits, str(sched)


def test_the_table_tells_of_many_copies() -> None:
    for kind, at_least in (("programs", 200), ("writing", 100)):
        counts = [n_copies for _, _, n_copies, n_lost in TABLE[kind].values() if not n_lost]
        assert len(counts) >= at_least
        assert sum(n > 0 for n in counts) > 0.7 * len(counts)
        assert sum(n >= 5 for n in counts) > 0.25 * len(counts)
