"""The sanitizer finds nothing in what is right: golden programs over fake devices, and a model."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle

import numpy as np
import pytest

import ggmlb
from ggmlb import Scheduler
from ggmlb.core.enums import NO_OPS
from ggmlb.models import BertEmbedder
from ggmlb.testing.fake import FakeReg
from ggmlb.testing.programs import Case
from tests.support.golden import CASES


@pytest.fixture(scope="module")
def backends():
    with ExitStack() as stack:
        streams = [stack.enter_context(device.init_backend()) for device in FakeReg(2).devices]
        yield [*streams, stack.enter_context(ggmlb.init_by_name("CPU"))]


def run(case: Case, backends) -> str | None:
    """Compute a case twice, each node on the next device; return what is wrong, if anything."""
    built = case.build()
    work = [node for node in built.graph.nodes if node.op not in NO_OPS]
    with Scheduler(backends, sanitize=True) as sched:
        for node, backend in zip(work, cycle(backends), strict=False):
            sched.set_tensor_backend(node, backend)
        sched.alloc_graph(built.graph)
        for _ in range(2):
            for leaf in case.leafs:
                if (
                    built.tensors[leaf.name].buffer is not None
                ):  # some give only their shape, and are in no graph
                    built.tensors[leaf.name].set(leaf.data)
            sched.graph_compute_async(built.graph)
        sched.synchronize()
        bad = {name: v.reason for name, v in built.compare().items() if not v.ok}
    return f"{case.id}: {bad}" if bad else None


@pytest.mark.filterwarnings("ignore")  # some requests cannot be fulfilled, which is not this test's business
@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_golden_programs(family, backends):
    wrong = [why for case in CASES if case.family == family and (why := run(case, backends))]
    assert not wrong, "\n".join(wrong)


def test_a_model_over_two_devices():
    with (
        ggmlb.sanitize(),
        BertEmbedder(devices=["OpenCL0", "CPU"], layers_on={"OpenCL0": "0-2", "CPU": "3-5"}) as embedder,
    ):
        assert np.isfinite(embedder.embed(["a", "longer texts than that", "b"])).all()
