"""Fake devices beside the CPU, and small graphs whose weights lie on chosen devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import ggmlb
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.interface.registry import init_by_name
from ggmlb.testing.fake import FakeReg
from tests.support.chain import Chain, new_weight


class Bench:
    """Two fake GPUs and the CPU, with helpers that free all they make.

    Attributes:
        reg: The fake registration, whose `calls` say what ran in which order.
        gpu0: A stream on each fake device.
        gpu1: The second.
        cpu: The real CPU backend.
    """

    def __init__(self, stack: ExitStack, reg: FakeReg) -> None:
        self.stack = stack
        self.reg = reg
        streams = [stack.enter_context(d.init_backend()) for d in reg.devices[:2]]
        self.gpu0, self.gpu1 = streams[0], streams[-1]
        self.cpu = stack.enter_context(init_by_name("CPU"))
        self.random = np.random.default_rng(0)

    @property
    def backends(self) -> list[Backend]:
        return [self.gpu0, self.gpu1, self.cpu]

    def weight(self, backend: Backend, *ne: int, name: str = "w") -> Tensor:
        """Place a random float32 weight in the memory of a backend."""
        return new_weight(self.stack, backend, *ne, name=name, random=self.random)

    def chain(self, n_layers: int = 4) -> Chain:
        """Return layers whose weights lie on the fake GPUs by turns."""
        return Chain(self.stack, [self.gpu0, self.gpu1], n_layers)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, FakeReg(2))


@pytest.fixture
def make_bench() -> Iterator[object]:
    """A bench over a fake registration of the test's own making."""
    with ExitStack() as stack:
        yield lambda reg: Bench(stack, reg)


@pytest.fixture
def sanitizer():
    with ggmlb.sanitize() as sanitizer:
        yield sanitizer
